"""HTTP requests that no browser sends: the viewer must reject each of them and still answer the next normal request."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import quote

HOST = b"Host: 127.0.0.1\r\n"
REFUSED = frozenset({400, 403, 404, 405, 421})
"""Status codes that are allowed in the response to a hostile request, if the connection is not closed instead."""
ANSWERED = REFUSED | {200}


@dataclass(frozen=True)
class Hostile:
    """The bytes of an HTTP request, and the allowed status codes of the response. An empty set means that the server
    must close the connection.
    """

    data: bytes
    statuses: frozenset[int]


def get(path: str | bytes, *headers: str, method: str = "GET") -> bytes:
    path = path if isinstance(path, bytes) else path.encode()
    lines = "".join(f"{line}\r\n" for line in (*headers, "Connection: close")).encode("latin-1")
    return method.encode() + b" " + path + b" HTTP/1.1\r\n" + HOST + lines + b"\r\n"


NUMBERS = [
    "9" * 5000,
    "9" * 4300,
    "-1",
    "+1",
    "0x10",
    "1_0",
    "1e3",
    "nan",
    "inf",
    "-0",
    "1.5",
    " 1",
    "%00",
    "%0a1",
    "%F0%9F%98%80",
    quote("٣"),
    quote("１"),
    quote("²"),
    "9" * 18,
    "9" * 19,
    str(2**63),
    str(-(2**63)),
    str(2**64),
    "",
    "true",
    "[]",
    "1;2",
    "%ff",
]
PATHS = [
    "/../../../../etc/passwd",
    "/page/..%2f..%2fserver.py",
    "/page/%2e%2e/%2e%2e/server.py",
    "/page/..%5cserver.py",
    "/page/%00",
    "/page/page.js%00.html",
    "//evil.example/api/about",
    "/api//about",
    "/api/about/",
    "/%61pi/none",
    "/api/train",
    "/api/%2ftrain/episodes",
    "/api/..%2f..%2f/episodes",
    "/page/" + "a" * 5000,
    "/\x7f",
    "/%",
    "/%zz",
    "/api/%1b%5b2J/episodes",
    "/api/%E2%80%AE/episodes",
    "/api/%ff/episodes",
    "/api/train/episode/0/token",
    "*",
    "http://evil.example/api/about/x",
    "/?" + "a=b&" * 5000,
    "/api/train/none?" + "%00" * 3000,
]
QUERIES = ["start", "limit", "least", "most", "share_from", "share_to", "role", "rule", "source", "q"]


def numbered() -> Iterator[Hostile]:
    for number in NUMBERS:
        is_number = number.isdigit() and number.isascii() and len(number) <= 18
        for path in (
            "/api/train/episode/{}",
            "/api/train/episode/0/token/{}",
            "/api/train/episode/0/record/{}",
            "/api/audit/{}",
            "/api/audit/0/step/{}",
        ):
            yield Hostile(get(path.format(number)), frozenset({400} if is_number else {400, 404}))
        for name in QUERIES:
            yield Hostile(get(f"/api/train/episodes?{name}={number}"), ANSWERED)
        for name in ("seed", "epoch", "start"):
            yield Hostile(get(f"/api/train/order?{name}={number}"), ANSWERED)
            yield Hostile(get(f"/api/train/episode/0/order?{name}={number}"), ANSWERED)
        yield Hostile(get(f"/api/train/episode/0?start={number}&q={number}"), ANSWERED)


def malformed() -> Iterator[Hostile]:
    yield from (Hostile(get(path), REFUSED if "?" not in path else ANSWERED) for path in PATHS)
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "BREW", "get"):
        yield Hostile(get("/api/about", method=method), frozenset({400, 405}))
    yield Hostile(get("/api/about", method="HEAD"), frozenset({200}))
    yield Hostile(get("/api/about", "Range: bytes=" + ",".join(f"{n}-" for n in range(5000))), ANSWERED)
    yield Hostile(get("/api/about", "Cookie: " + "x" * 60_000), ANSWERED)
    yield Hostile(get("/api/about", "Cookie: " + "x" * 200_000), frozenset({400}))
    yield Hostile(get("/api/about", *(f"X-{n}: y" for n in range(3000))), ANSWERED)
    yield Hostile(get("/" + "a" * 200_000), frozenset({400}))
    yield Hostile(get("/api/about", "Expect: 100-continue", "Content-Length: 10"), frozenset({100, 200, 400}))
    yield Hostile(get("/api/about", "Upgrade: websocket", "Connection: Upgrade"), ANSWERED)
    yield Hostile(get("/api/about", "Content-Length: 99999999999999999999"), frozenset({200, 400}))
    yield Hostile(get("/api/about", "Content-Length: -1"), frozenset({400}))
    yield Hostile(get("/api/about", "Content-Length: 1", "Content-Length: 2"), frozenset({400}))
    yield Hostile(get("/api/about", "Transfer-Encoding: chunked") + b"ffffffffffffffffffff\r\n", frozenset({200, 400}))
    yield Hostile(get("/api/about", "Host: evil.example"), frozenset({400}))
    for host in (
        "evil.example",
        "127.0.0.1.evil.example",
        "localhost.evil.example:80",
        "127.0.0.1@evil.example",
        "0.0.0.0",
        "[::1",
        "localhost:80:80",
        "169.254.169.254",
        "\xb2",
        "127.1",
        "2130706433",
        "",
    ):
        yield Hostile(get("/api/about").replace(HOST, f"Host: {host}\r\n".encode("latin-1")), frozenset({400, 421}))
    yield Hostile(b"GET /api/about HTTP/1.1\r\n\r\n", frozenset({400}))
    yield Hostile(b"GET /api/about HTTP/1.0\r\n\r\n", frozenset({421}))
    yield Hostile(b"GET /api/about HTTP/9.9\r\n" + HOST + b"\r\n", frozenset({200, 400}))
    for origin in ("http://evil.example", "null", "http://127.0.0.1:1", "file://", "http://127.0.0.1.evil.example"):
        yield Hostile(get("/api/about", f"Origin: {origin}"), frozenset({403}))
    yield Hostile(get("/api/about", "Sec-Fetch-Site: cross-site"), frozenset({403}))
    for noise in (
        b"\x00" * 100,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"\r\n" * 1000,
        b"GET\r\n\r\n",
        b"\xff\xfe" * 50,
        b"GET /api/about HTTP/1.1\r\nHost : a\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /api/about HTTP/1.1\r\nHost: 127.0.0.1\r\n folded\r\n\r\n",
        b"G" * 100_000 + b"\r\n\r\n",
    ):
        yield Hostile(noise, frozenset({400, 404, 421}))


def hostile_requests() -> list[Hostile]:
    return [*numbered(), *malformed()]


def mutated(request: bytes, rng: random.Random) -> Hostile:
    """Return a valid HTTP request with some bytes changed, inserted or removed. Every response except a server error is
    allowed.
    """
    data = bytearray(request)
    for _ in range(rng.randrange(1, 6)):
        at = rng.randrange(len(data))
        match rng.randrange(3):
            case 0:
                data[at] = rng.randrange(256)
            case 1:
                del data[at : at + rng.randrange(1, 8)]
            case _:
                data[at:at] = bytes(rng.randrange(256) for _ in range(rng.randrange(1, 8)))
    return Hostile(bytes(data), ANSWERED | {100})


HALF_OPEN = [
    b"",
    b"G",
    b"GET /api/about HTTP/1.1\r\n",
    b"GET /api/about HTTP/1.1\r\n" + HOST + b"X-A: " + b"a" * 1000,
    get("/api/about").replace(b"Connection: close\r\n", b"")[:-2],
    get("/api/about", "Content-Length: 100000").replace(b"Connection: close\r\n", b"") + b"x" * 10,
    get("/api/about", "Transfer-Encoding: chunked").replace(b"Connection: close\r\n", b"") + b"5\r\nab",
    get("/api/about").replace(b"Connection: close\r\n", b"") + b"GET /api/ab",
]
"""Requests that never end, or that are followed by a request that never ends."""
UNREAD = get("/page/page.js").replace(b"Connection: close\r\n", b"") * 300
"""Requests whose responses exceed the system's buffers, for a client that does not read them."""
