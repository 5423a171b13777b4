from __future__ import annotations

import json
import threading
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextmanager
def serving(answer):
    """Run a server that replies with `answer(request)` or `answer(request, number)`; yield its URL and its requests.

    A reply is (status, body), (status, body, headers), or a function that writes to the connection.
    """
    asked = []
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                asked.append((self.path, dict(self.headers), request))
                number = len(asked)
            reply = answer(request) if answer.__code__.co_argcount == 1 else answer(request, number)
            self.close_connection = True
            if callable(reply):
                # The client may have disconnected.
                with suppress(OSError):
                    reply(self.wfile)
                return
            status, body, *headers = reply
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            for name, value in {"Content-Length": str(len(data)), **(headers[0] if headers else {})}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
