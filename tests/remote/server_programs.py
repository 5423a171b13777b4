"""Test servers, each of which runs in a separate process: `python server_programs.py NAME`.

Each server prints its port and exits when its stdin is closed, so it also exits if the tests crash.
"""

from __future__ import annotations

import base64
import hashlib
import http.server
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import urllib.parse
from contextlib import suppress
from pathlib import Path

children: list[int] = []
"""Processes that exit with this one."""


def end_with_the_tests() -> None:
    def wait() -> None:
        os.read(0, 1)
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()


def moto() -> None:
    """Run an S3 server that stores objects in memory, supports conditional writes, and accepts any credentials."""
    import logging

    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)

    class Handler(MotoRequestHandler):
        # With HTTP/1.1, connections stay open between requests, as in S3.
        protocol_version = "HTTP/1.1"

    application = DomainDispatcherApplication(create_backend_app)
    server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=Handler)
    print(server.port, flush=True)
    server.serve_forever()


def rclone(folder: str, key: str, secret: str) -> None:
    """Run an S3 server whose buckets are the subfolders of `folder`. The server checks credentials, but does not
    support conditional writes.
    """
    program = shutil.which("rclone", path=str(Path(sys.executable).parent)) or "rclone"
    command = [program, "serve", "s3", "--addr", "127.0.0.1:0", "--auth-key", f"{key},{secret}", "--config", os.devnull]
    server = subprocess.Popen([*command, "-v", folder], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    print_port(server)


def azurite(program: str, folder: str) -> None:
    words = ["--blobHost", "127.0.0.1", "--blobPort", "0", "--location", folder, "--silent", "--skipApiVersionCheck"]
    print_port(
        subprocess.Popen(
            [program, *words], stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True
        )
    )


def print_port(server: subprocess.Popen[str]) -> None:
    children.append(server.pid)
    for line in server.stderr or server.stdout or ():
        if match := re.search(r"http://127\.0\.0\.1:(\d+)", line):
            print(match[1], flush=True)
    sys.exit(f"{server.args[0]} has ended")


def gcs() -> None:
    """Run a Google Cloud Storage emulator that stores objects in memory and accepts any credentials. Range requests and
    preconditions are added to the emulator here.
    """
    from functools import partial

    from gcp_storage_emulator.exceptions import NotFound
    from gcp_storage_emulator.server import RequestHandler
    from gcp_storage_emulator.storage import Storage

    storage = Storage(use_memory_fs=True)
    lock = threading.Lock()

    class Handler(RequestHandler):
        def do_GET(self) -> None:  # noqa: N802
            connection, self.wfile = self.wfile, io.BytesIO()
            with lock:
                super().do_GET()
            head, _, content = self.wfile.getvalue().partition(b"\r\n\r\n")
            self.wfile = connection
            wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            if wanted and b" 200 " in head.split(b"\r\n")[0]:
                start, stop = int(wanted[1]), int(wanted[2] or len(content)) + 1
                status = b"206 Partial Content" if start < len(content) else b"416 Range Not Satisfiable"
                content = content[start:stop]
                head = re.sub(
                    rb"(?i)(content-length:) *\d+", rb"\1 %d" % len(content), head.replace(b"200 OK", status, 1)
                )
            connection.write(head + b"\r\n\r\n" + content)

        def do_POST(self) -> None:  # noqa: N802
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            address = urllib.parse.urlsplit(self.path)
            query = dict(urllib.parse.parse_qsl(address.query))
            with lock:
                if (wanted := query.get("ifGenerationMatch")) is not None:
                    if not (name := query.get("name")):
                        name = json.JSONDecoder().raw_decode(body[body.index(b"{") :].decode(errors="replace"))[0][
                            "name"
                        ]
                    try:
                        generation = storage.get_file_obj(address.path.split("/")[-2], name)["generation"]
                    except NotFound:
                        generation = "0"
                    if str(generation) != wanted:
                        self.send_error(412, "conditionNotMet")
                        return
                self.rfile = io.BytesIO(body)
                # gcsfs uploads parts with POST, which the real service accepts, but the emulator expects PUT.
                super().do_PUT() if "upload_id" in query else super().do_POST()

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, storage))
    print(server.server_port, flush=True)
    server.serve_forever()


class FileHandler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    folder: Path
    has_ranges = True
    has_lengths = True
    password = ""

    def log_message(self, *_: object) -> None:
        pass

    def send_file(self, path: Path, **headers: str) -> None:
        if self.password and self.headers.get("Authorization") != self.password:
            self.send_bytes(b"", 401, **{"WWW-Authenticate": "Basic"})
            return
        if not path.is_file():
            self.send_bytes(b"no such file", 404)
            return
        content = path.read_bytes()
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")) if self.has_ranges else None
        headers["ETag"] = f'"{hash(content) & 0xFFFFFFFF:x}"'
        if wanted is None:
            self.send_bytes(content, 200, **headers)
        elif int(wanted[1]) >= len(content):
            self.send_bytes(b"", 416, **{"Content-Range": f"bytes */{len(content)}"})
        else:
            start, stop = int(wanted[1]), min(int(wanted[2] or len(content)) + 1, len(content))
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
            self.send_bytes(content[start:stop], 206, **headers)

    def send_bytes(self, content: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        if self.has_lengths:
            self.send_header("Content-Length", str(len(content)))
        else:
            self.send_header("Connection", "close")
            self.close_connection = True
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def web(folder: str) -> None:
    """Serve a folder at /ranges/ with range requests, at /whole/ without them, at /stream/ without Content-Length, and
    at /locked/ with a password.
    """
    locked = "Basic " + base64.b64encode(b"user:pass word").decode()

    class Handler(FileHandler):
        def do_GET(self) -> None:
            _, kind, name = urllib.parse.unquote(self.path.partition("?")[0]).split("/", 2)
            self.has_ranges = kind in ("ranges", "locked")
            self.has_lengths = kind != "stream"
            self.password = locked if kind == "locked" else ""
            self.send_file(Path(folder, name))

        do_HEAD = do_GET  # noqa: N815

    serve(Handler)


def hub(folder: str) -> None:
    """Serve the Hugging Face Hub API for reading files: FOLDER/ORG/NAME/FILE is a file of the dataset ORG/NAME."""

    class Handler(FileHandler):
        def do_GET(self) -> None:
            path = urllib.parse.unquote(self.path.partition("?")[0])
            if match := re.fullmatch(r"/datasets/([^/]+/[^/]+)/resolve/main/(.*)", path):
                self.send_file(Path(folder, match[1], match[2]), **{"X-Repo-Commit": "0" * 40})
            elif match := re.fullmatch(r"/api/datasets/([^/]+/[^/]+)(/tree/main|/revision/main|)(/.*)?", path):
                self.describe(match[1], match[2], (match[3] or "").strip("/"))
            else:
                self.send_bytes(b"{}", 404)

        do_HEAD = do_GET  # noqa: N815

        def describe(self, name: str, what: str, below: str) -> None:
            dataset = Path(folder, name)
            if not dataset.is_dir():
                self.send_bytes(b"{}", 404, **{"X-Error-Code": "RepoNotFound"})
            elif what != "/tree/main":
                self.send_json({"id": name, "sha": "0" * 40, "siblings": [], "tags": [], "private": False})
            elif not (dataset / below).is_dir():
                self.send_bytes(b"{}", 404, **{"X-Error-Code": "EntryNotFound"})
            else:
                deep = "recursive=true" in self.path.lower()
                paths = sorted((dataset / below).rglob("*") if deep else (dataset / below).iterdir())
                self.send_json([self.entry(path, dataset) for path in paths])

        def entry(self, path: Path, dataset: Path) -> dict[str, object]:
            name = path.relative_to(dataset).as_posix()
            if path.is_dir():
                return {"type": "directory", "oid": "0" * 40, "size": 0, "path": name}
            digest = hashlib.sha1(path.read_bytes()).hexdigest()
            return {"type": "file", "oid": digest, "size": path.stat().st_size, "path": name}

        def send_json(self, value: object) -> None:
            self.send_bytes(json.dumps(value).encode(), 200, **{"Content-Type": "application/json"})

    serve(Handler)


def serve(handler: type[FileHandler]) -> None:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    end_with_the_tests()
    programs = {"moto": moto, "rclone": rclone, "azurite": azurite, "gcs": gcs, "web": web, "hub": hub}
    programs[sys.argv[1]](*sys.argv[2:])
