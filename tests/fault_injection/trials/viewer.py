from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hostile_requests import HALF_OPEN, UNREAD, Hostile, get, hostile_requests, mutated

from chatmill.prepare import Job, LocalEngine, prepare_dataset
from chatmill.prepare.job import InputSource
from fault_injection.processes import apart, begin, cpu_time
from fault_injection.trial import Tally, Trial

CLIENT_SECONDS = 0.5
"""Seconds that this viewer waits for its clients."""
FLOOD_SECONDS = 600.0
"""A long client timeout, so that connections are closed only because there are too many."""
MAX_CONNECTIONS = 96
ACCEPTED_AT_ONCE = 32
AT_ONCE = 24
"""Number of concurrent requests, and of half-open connections that are open at the same time."""
QUIET_ROUNDS = 4
"""A viewer that is idle for this multiple of its client timeout will not close more connections."""
THREADS = 8
"""Number of responses that the viewer computes concurrently."""
MEMORY = 24 << 20
"""Bytes by which the viewer may grow after the first wave."""
EPISODES = 60
GOOD = [
    "/", "/page/page.js",
    "/api/train/episodes?start=7&limit=9", "/api/train/episodes?limit=200", "/api/train/episode/5",
    "/api/train/episode/59?start=1", "/api/train/episode/7/token/3", "/api/train/episode/8/record/0",
    "/api/train/order?start=10", "/api/train/episode/3/order?epoch=2", "/api/train/episodes?q=number%207",
]  # fmt: skip


class Served:
    def __init__(self, port: int, pid: int) -> None:
        self.port, self.pid, self.descriptors = port, pid, 0
        self.answers: dict[str, bytes] = {}
        self._quiet, self._used = 0, 0.0

    def is_stuck(self) -> bool:
        """Whether the viewer was idle in several consecutive checks and therefore will not close more connections."""
        before, self._used = self._used, cpu_time(self.pid)
        self._quiet = self._quiet + 1 if self._used < before + 0.05 else 0
        return self._quiet > QUIET_ROUNDS

    async def next_piece(self, reader: asyncio.StreamReader) -> bytes:
        receiving = asyncio.ensure_future(reader.read(1 << 20))
        while not (await asyncio.wait([receiving], timeout=2 * CLIENT_SECONDS))[0]:
            if self.is_stuck():
                receiving.cancel()
                raise AssertionError("the viewer neither responds nor closes the connection")
        return receiving.result()


@contextmanager
def viewer(folder: Path, client_seconds: float = CLIENT_SECONDS) -> Iterator[tuple[int, int, Path]]:
    errors, reading = folder / f"stderr-{client_seconds}", os.pipe()

    def serve() -> None:
        from chatmill.cli.guard import guarded
        from chatmill.show import connections, server
        from chatmill.show.dataset import open_view
        from chatmill.show.viewer import Viewer

        # This process inherits the runner's signal handlers.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.dup2(os.open(errors, os.O_CREAT | os.O_WRONLY, 0o600), 2)
        connections.CLIENT_SECONDS, connections.MAX_CONNECTIONS = client_seconds, MAX_CONNECTIONS
        server.INDEX_DELAY = 0.0
        shown = Viewer(open_view(folder / "data"), cache=folder / "index", record_folders=[folder])
        guarded(lambda: server.serve(shown, port=0, ready=lambda url: os.write(reading[1], f"{url}\n".encode())))

    child = begin(serve)
    os.close(reading[1])
    url = b""
    while not url.endswith(b"\n") and (piece := os.read(reading[0], 100)):
        url += piece
    os.close(reading[0])
    try:
        yield int(url.rsplit(b":", 1)[1].strip(b"/\n")), child.pid, errors
    finally:
        os.kill(child.pid, signal.SIGTERM)
        child.end()


async def answer(served: Served, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    received = b""
    try:
        with suppress(ConnectionError):
            writer.write(request)
            await writer.drain()
            while piece := await served.next_piece(reader):
                received += piece
                if request.count(b"Connection: close") == 0 and b"\r\n\r\n" in received:
                    break
        return received
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


def status_of(received: bytes) -> int | None:
    return int(match[1]) if (match := re.match(rb"HTTP/1\.1 (\d{3}) ", received)) else None


def body_of(received: bytes) -> bytes:
    return received.partition(b"\r\n\r\n")[2]


async def body(served: Served, path: str) -> bytes:
    return body_of(await answer(served, get(path)))


async def try_good(served: Served, path: str, tally: Tally) -> None:
    try:
        received = await answer(served, get(path))
    except AssertionError as error:
        tally.loses(f"{path}: {error}")
        return
    if status_of(received) != 200:
        tally.loses(f"{path}: the response was {received[:100]}")
    elif body_of(received) != served.answers[path]:
        tally.is_wrong(f"{path}: the response differs from the earlier one")
    else:
        tally.survives()


async def try_hostile(served: Served, request: Hostile, tally: Tally) -> None:
    try:
        received = await answer(served, request.data)
    except AssertionError as error:
        tally.loses(f"{request.data[:100]!r}: {error}")
        return
    answered_well = not received or status_of(received) in request.statuses
    tally.judge(found=answered_well, lost=f"{request.data[:100]}: the response was {received[:100]}")


async def half_open(port: int, data: bytes) -> socket.socket:
    connection = socket.socket()
    connection.setblocking(False)
    # Unread responses must not fit into the receive buffer.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(connection, ("127.0.0.1", port))
    if data:
        with suppress(ConnectionError):
            await loop.sock_sendall(connection, data)
    return connection


async def wave(served: Served, requests: list[Hostile], rng: random.Random, tally: Tally) -> None:
    """Send valid and hostile requests while half-open connections exist. The viewer must close the half-open
    connections.
    """
    begun = [await half_open(served.port, HALF_OPEN[number % len(HALF_OPEN)]) for number in range(AT_ONCE)]
    begun.append(await half_open(served.port, UNREAD))
    room = asyncio.Semaphore(AT_ONCE)

    async def one(request: Hostile) -> None:
        async with room:
            await try_hostile(served, request, tally)
            await try_good(served, rng.choice(GOOD), tally)

    await asyncio.gather(*map(one, requests))
    kept = await kept_open(served, begun, tally)
    for number, connection in enumerate(begun):
        tally.judge(found=number >= kept, lost="a half-open connection was not closed")
        connection.close()


async def kept_open(served: Served, begun: list[socket.socket], tally: Tally) -> int:
    """Return the number of connections that stay open after the time limit; wait longer if the viewer is busy."""
    # When the viewer answers this request, it has accepted all connections; when it answers the next one, it has also
    # checked its timers. A connection whose response is still being computed may stay open longer.
    await try_good(served, "/", tally)
    while (kept := descriptors(served.pid) - served.descriptors) > 0 and not served.is_stuck():
        for connection in begun:
            # One more byte must not extend the time limit.
            with suppress(OSError):
                connection.send(b"a")
        await asyncio.sleep(CLIENT_SECONDS + 0.1)
        await try_good(served, "/", tally)
    return kept


async def flood(served: Served, tally: Tally) -> None:
    await begin_to_serve(served)
    begun = []
    for _ in range(4):
        begun += [await half_open(served.port, b"GET / HT") for _ in range(MAX_CONNECTIONS)]
        await asyncio.gather(*(try_good(served, path, tally) for path in GOOD))
        held = descriptors(served.pid) - served.descriptors
        tally.judge(found=held <= MAX_CONNECTIONS + ACCEPTED_AT_ONCE, lost=f"the viewer keeps {held} connections")
    for connection in begun:
        connection.close()


def descriptors(pid: int) -> int:
    return len([*Path(f"/proc/{pid}/fd").iterdir()])


def memory(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS"))) << 10


def threads(pid: int) -> int:
    return len([*Path(f"/proc/{pid}/task").iterdir()])


async def begin_to_serve(served: Served) -> None:
    while any(each["searched"] < each["episodes"] for each in json.loads(await body(served, "/api/progress")).values()):
        await asyncio.sleep(0.01)
    served.descriptors = descriptors(served.pid)
    served.answers = {path: await body(served, path) for path in GOOD}


async def soak(served: Served, size: int, rng: random.Random, tally: Tally) -> None:
    await begin_to_serve(served)
    pid = served.pid
    known = hostile_requests()
    requests = rng.sample(known, size) if size < len(known) else known
    requests += [mutated(get(rng.choice(GOOD)), rng) for _ in range(max(size // 4, size - len(known)))]
    rng.shuffle(requests)
    # The first wave creates threads and caches, so memory is measured after it.
    first, step = AT_ONCE * 2, AT_ONCE * 20
    await wave(served, requests[:first], rng, tally)
    used = memory(pid)
    for start in range(first, len(requests), step):
        await wave(served, requests[start : start + step], rng, tally)
    left, grown, running = descriptors(pid) - served.descriptors, memory(pid) - used, threads(pid)
    tally.judge(found=left <= 0, lost=f"{left} more descriptors than at the beginning")
    tally.judge(found=grown < MEMORY, lost=f"{grown >> 20} MiB more than after the first wave")
    tally.judge(found=running <= THREADS + 3, lost=f"{running} threads")
    tally.notes["KiB of memory growth after the first wave of requests"] = grown >> 10


def make(folder: Path) -> bool:
    text = "<script>alert(1)</script>\x1b[2J\u202e"
    lines = [[("user", f"number {n} {text}"), ("assistant", f"answer {n} {text}" * 9)] for n in range(EPISODES)]
    records = [{"messages": [{"role": role, "content": content} for role, content in turns]} for turns in lines]
    (folder / "chat.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    job = Job((InputSource((str(folder / "chat.jsonl"),), shape="messages"),), format="primer")
    prepare_dataset(job, folder / "data", engine=LocalEngine(1))
    return True


def work(size: int, seed: int, folder: Path, tally: Tally) -> None:
    try:
        import uvicorn  # noqa: F401
    except ImportError:
        tally.skipped = "install uvicorn and starlette to run this trial"
        return
    assert apart(lambda: make(folder)).value
    with viewer(folder) as (port, pid, errors):
        asyncio.run(soak(Served(port, pid), size, random.Random(seed), tally))
    with viewer(folder, FLOOD_SECONDS) as (port, pid, more_errors):
        asyncio.run(flood(Served(port, pid), tally))
    if written := errors.read_text(errors="replace") + more_errors.read_text(errors="replace"):
        tally.loses(f"the viewer wrote to standard error: {written[-300:]}")


TRIAL = Trial(
    "hostile viewer requests",
    "Sends valid and hostile requests to `chatmill view` at the same time. Every valid request must get the right "
    "response, and every hostile request must be refused. The numbers of threads and file descriptors and the memory "
    "use must return to their earlier levels",
    work,
    full=5000,
    short=40,
    in_memory=True,
)
