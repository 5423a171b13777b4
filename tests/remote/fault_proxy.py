"""An HTTP proxy that throttles, delays or breaks the responses of a server, as configured.

    with fault_proxy(server.port, bandwidth=100e6) as proxy:      # bytes a second, for all connections together
        proxy.fail(Fault("status", status=503, times=2), Fault("reset", after=1000, method="GET", path="tokens"))
        ...                                                       # requests to http://127.0.0.1:{proxy.port}
        proxy.requests()                                          # the requests it received

The proxy runs in its own process on plain sockets, and sustains 100 MB/s with less than one core. `python
tests/remote/fault_proxy.py --measure` measures the proxy's speed.
"""

from __future__ import annotations

import json
import re
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

PIECE = 1 << 16
"""Bytes forwarded at a time."""
EVER = 1 << 30
"""The value of `times` for a permanent fault."""


@dataclass(frozen=True)
class Fault:
    """A fault that skips the first `skip` requests with this method and path, and affects the next `times` requests.

    status    respond with `status` and `code`, without asking the server
    reset     reset the connection after `after` bytes of the response body
    cut       close the connection there, without a network error
    short     send only that many bytes, with a matching Content-Length
    corrupt   change the byte there
    lost      forward the request, and reset the connection before the response
    reset_upload  reset the connection after `after` bytes of the request body, and forward none of it
    hang      never respond
    delay     respond `seconds` later
    """

    kind: Literal["status", "reset", "cut", "short", "corrupt", "lost", "reset_upload", "hang", "delay"]
    times: int = 1
    skip: int = 0
    method: str = ""
    path: str = ""
    """A regular expression, searched in the path and query."""
    after: int = 0
    status: int = 503
    code: str = "SlowDown"
    seconds: float = 0.0


@dataclass(frozen=True)
class Proxy:
    port: int
    _process: Any = field(repr=False)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def fail(self, *faults: Fault) -> None:
        """Replace the current faults; without arguments, forward all requests."""
        self._tell({"faults": [asdict(fault) for fault in faults]})

    def throttle(self, bandwidth: float = 0.0, *, latency: float = 0.0) -> None:
        """Limit the bytes per second, and delay each response by `latency` seconds; 0 means no limit or no delay."""
        self._tell({"bandwidth": bandwidth, "latency": latency})

    def requests(self, *, forget: bool = True) -> list[tuple[str, str, str]]:
        """Return the method, path and Range header of each request since the list of requests was last cleared."""
        return [tuple(each) for each in self._tell({"requests": forget})]

    def _tell(self, order: dict[str, Any]) -> Any:
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


@contextmanager
def fault_proxy(port: int, *, bandwidth: float = 0.0, latency: float = 0.0) -> Iterator[Proxy]:
    import subprocess

    command = [sys.executable, "-S", str(Path(__file__)), str(port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            proxy = Proxy(int(process.stdout.readline()), process)
            proxy.throttle(bandwidth, latency=latency)
            yield proxy
        finally:
            process.kill()


class Throttle:
    """Limits the total bytes per second of all connections: each chunk is delayed until enough bandwidth is free."""

    BURST = 0.02
    """Seconds of unused bandwidth that can be used after a pause, because sleeping is imprecise."""

    def __init__(self) -> None:
        self.bandwidth = 0.0
        self._free_at = 0.0
        self._lock = threading.Lock()

    def wait(self, count: int) -> None:
        if not self.bandwidth:
            return
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now - self.BURST) + count / self.bandwidth
            wait = self._free_at - now
        if wait > 0:
            time.sleep(wait)


class ConnectionBrokenError(Exception):
    pass


class Stream:
    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.buffer = b""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def head(self) -> bytes:
        while b"\r\n\r\n" not in self.buffer:
            piece = self.socket.recv(PIECE)
            if not piece:
                return b""
            self.buffer += piece
        head, _, self.buffer = self.buffer.partition(b"\r\n\r\n")
        return head

    def some(self, limit: int) -> bytes:
        if self.buffer:
            piece, self.buffer = self.buffer[:limit], self.buffer[limit:]
            return piece
        piece = self.socket.recv(min(limit, PIECE))
        if not piece:
            raise ConnectionBrokenError
        return piece

    def line(self) -> bytes:
        while b"\r\n" not in self.buffer:
            piece = self.socket.recv(PIECE)
            if not piece:
                raise ConnectionBrokenError
            self.buffer += piece
        line, _, self.buffer = self.buffer.partition(b"\r\n")
        return line + b"\r\n"

    def reset(self) -> None:
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()


def headers_of(head: bytes) -> dict[str, str]:
    lines = head.decode("latin-1").split("\r\n")[1:]
    return {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


def body(stream: Stream, headers: dict[str, str], *, until_closed: bool) -> Iterator[bytes]:
    if headers.get("transfer-encoding", "").lower() == "chunked":
        while True:
            line = stream.line()
            yield line
            left = int(line.split(b";")[0], 16) + 2
            last = left == 2
            while left:
                piece = stream.some(left)
                left -= len(piece)
                yield piece
            if last:
                return
    elif "content-length" in headers:
        left = int(headers["content-length"])
        while left:
            piece = stream.some(left)
            left -= len(piece)
            yield piece
    elif until_closed:
        with suppress(ConnectionBrokenError):
            while True:
                yield stream.some(PIECE)


class Forwarder:
    def __init__(self, port: int) -> None:
        self.port = port
        self.down, self.up = Throttle(), Throttle()
        self.latency = 0.0
        self.faults: list[dict[str, Any]] = []
        self.seen: list[tuple[str, str, str]] = []
        self.lock = threading.Lock()

    def obey(self, order: dict[str, Any]) -> Any:
        with self.lock:
            if "faults" in order:
                self.faults = order["faults"]
            if "bandwidth" in order:
                self.down.bandwidth = self.up.bandwidth = order["bandwidth"]
                self.latency = order["latency"]
            if "requests" in order:
                seen = list(self.seen)
                if order["requests"]:
                    self.seen.clear()
                return seen
        return None

    def fault_of(self, method: str, path: str, headers: dict[str, str]) -> dict[str, Any]:
        with self.lock:
            self.seen.append((method, path, headers.get("range", "")))
            for fault in self.faults:
                if (fault["method"] in ("", method)) and re.search(fault["path"], path) and fault["times"]:
                    if fault["skip"]:
                        fault["skip"] -= 1
                        continue
                    fault["times"] -= 1
                    return fault
        return {"kind": ""}

    def serve(self, connection: socket.socket) -> None:
        client = Stream(connection)
        server = None
        try:
            while head := client.head():
                if server is None:
                    server = Stream(socket.create_connection(("127.0.0.1", self.port)))
                if not self.exchange(head, client, server):
                    break
        except (ConnectionBrokenError, OSError):
            pass
        finally:
            for stream in filter(None, (client, server)):
                stream.socket.close()

    def exchange(self, head: bytes, client: Stream, server: Stream) -> bool:
        method, path, _ = head.split(b"\r\n")[0].decode("latin-1").split(" ", 2)
        headers = headers_of(head)
        fault = self.fault_of(method, path, headers)
        kind = fault["kind"]
        if headers.get("expect", "").lower() == "100-continue":
            head = b"\r\n".join(line for line in head.split(b"\r\n") if not line.lower().startswith(b"expect:"))
            client.socket.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        if kind not in ("status", "reset_upload", "hang"):
            server.socket.sendall(head + b"\r\n\r\n")
        uploaded = 0
        for piece in body(client, headers, until_closed=False):
            self.up.wait(len(piece))
            uploaded += len(piece)
            if kind == "reset_upload" and uploaded >= fault["after"]:
                break
            if kind not in ("status", "reset_upload", "hang"):
                server.socket.sendall(piece)
        if kind == "reset_upload":
            client.reset()
            return False
        if kind == "hang":
            client.socket.recv(1)
            return False
        if self.latency or kind == "delay":
            time.sleep(self.latency + (fault["seconds"] if kind == "delay" else 0))
        if kind == "status":
            text = f"<Error><Code>{fault['code']}</Code><Message>told to fail</Message></Error>" * (method != "HEAD")
            answer = f"HTTP/1.1 {fault['status']} Fault\r\nContent-Type: application/xml\r\n"
            client.socket.sendall(f"{answer}Content-Length: {len(text)}\r\n\r\n{text}".encode())
            return True
        return self.answer(client, server, method, fault)

    def answer(self, client: Stream, server: Stream, method: str, fault: dict[str, Any]) -> bool:
        kind, after = fault["kind"], fault.get("after", 0)
        head = server.head()
        while head and head.split(b" ", 2)[1] == b"100":
            head = server.head()
        if not head:
            raise ConnectionBrokenError
        if kind == "lost":
            client.reset()
            return False
        headers = headers_of(head)
        stays = headers.get("connection", "").lower() != "close" and not head.startswith(b"HTTP/1.0")
        length = int(headers.get("content-length", 0))
        if kind == "short" and method != "HEAD":
            head = re.sub(rb"(?i)(content-length:) *\d+", rb"\1 %d" % min(length, after), head)
        client.socket.sendall(head + b"\r\n\r\n")
        if method == "HEAD" or head.split(b" ", 2)[1] in (b"204", b"304"):
            return stays
        sent = 0
        for piece in body(server, headers, until_closed=True):
            self.down.wait(len(piece))
            if kind in ("reset", "cut", "short") and sent + len(piece) >= after:
                client.socket.sendall(piece[: after - sent])
                if kind == "reset":
                    client.reset()
                return False
            if kind == "corrupt" and sent <= after < sent + len(piece):
                place = after - sent
                piece = piece[:place] + bytes([piece[place] ^ 1]) + piece[place + 1 :]
            client.socket.sendall(piece)
            sent += len(piece)
        return stays and ("content-length" in headers or "transfer-encoding" in headers)


def run(port: int) -> None:
    forwarder = Forwarder(port)
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    print(listener.getsockname()[1], flush=True)

    def accept() -> None:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=forwarder.serve, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    for line in sys.stdin:
        print(json.dumps(forwarder.obey(json.loads(line))), flush=True)


def measure(bandwidth: float = 100e6, size: int = 200 << 20, connections: int = 4) -> float:
    def send(connection: socket.socket) -> None:
        with connection:
            stream = Stream(connection)
            while stream.head():
                connection.sendall(f"HTTP/1.1 200 OK\r\nContent-Length: {size // connections}\r\n\r\n".encode())
                for _ in range(size // connections >> 20):
                    connection.sendall(bytes(1 << 20))

    def receive(port: int) -> None:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            stream = Stream(connection)
            length = int(headers_of(stream.head())["content-length"]) - len(stream.buffer)
            place = bytearray(1 << 20)
            while length:
                length -= connection.recv_into(place)

    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            with suppress(OSError):
                while True:
                    threading.Thread(target=send, args=(listener.accept()[0],), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        with fault_proxy(listener.getsockname()[1], bandwidth=bandwidth) as proxy:
            readers = [threading.Thread(target=receive, args=(proxy.port,)) for _ in range(connections)]
            start = time.monotonic()
            for reader in readers:
                reader.start()
            for reader in readers:
                reader.join()
            return size / (time.monotonic() - start)


if __name__ == "__main__":
    if sys.argv[1] == "--measure":
        for limit in (10e6, 100e6, 0):
            size = 200 << 20 if limit != 10e6 else 20 << 20
            print(f"limit {limit / 1e6:.0f} MB/s: {measure(limit, size) / 1e6:.1f} MB/s")
    else:
        run(int(sys.argv[1]))
