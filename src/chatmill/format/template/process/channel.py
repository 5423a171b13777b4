"""Start template processes, exchange messages with them, and enforce limits that a template cannot evade."""

from __future__ import annotations

import atexit
import os
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

from chatmill.errors import DataError, one_line
from chatmill.format.template.process import messages

WAITING = 20.0
"""Maximum wall-clock time of a process, as a multiple of its CPU time limit. The wall-clock limit is high, because a
process may wait for the CPU on a busy machine.
"""
GRACE = 1.0
"""Extra seconds before a process is killed, so that it can stop by itself and report the line of the template."""
START_SECONDS = 600.0
"""Maximum time for a fork server to start, in seconds. The limit is high, because starting is slow on a busy machine.
"""
POLL_SECONDS = 0.1
HEADER = struct.Struct("<Q")

_START = """
import gc, os, sys
gc.disable()
sys.path[:] = sys.argv[2].split(os.pathsep)
from importlib import import_module
import_module(sys.argv[1]).main()
"""


class EndedError(Exception):
    """Raised if a template process exits, exceeds a limit or sends an invalid response."""


class ForkServer:
    """A fork server, which is a fresh interpreter that calls the `main` function of a module."""

    def __init__(self, module: str) -> None:
        self._owner = os.getpid()
        self._control, theirs = socket.socketpair()
        paths = [str(Path(__file__).resolve().parents[4]), *(str(Path(path).absolute()) for path in sys.path if path)]
        options = ["-I", "-S", *(["-B"] if sys.dont_write_bytecode else [])]
        # Keep LD_LIBRARY_PATH, because Python might not start without its shared libraries.
        environment = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, *options, "-c", _START, module, os.pathsep.join(paths)],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=environment,
                    cwd="/",
                    start_new_session=True,
                )
        except (OSError, TypeError) as error:
            # Popen raises TypeError if `sys.executable` is None.
            self._control.close()
            what = f"the process that runs chat templates cannot be started ({one_line(str(error), 200)})"
            raise DataError(f"{what}; check that {one_line(str(sys.executable), 200)} can be run") from None

    def connect(self) -> tuple[socket.socket, socket.socket]:
        """Start a process and return two sockets: the channel, which carries requests, and the leash. The process is
        killed when the leash is closed.
        """
        channel, its_channel = socket.socketpair()
        leash, its_leash = socket.socketpair()
        with its_channel, its_leash:
            try:
                socket.send_fds(self._control, [b"+"], [its_channel.fileno(), its_leash.fileno()])
            except OSError:
                channel.close()
                leash.close()
                raise
        return channel, leash

    def close(self) -> None:
        """Kill the fork server and its processes."""
        self._control.close()
        if self._owner == os.getpid():
            self._process.kill()
            self._process.wait()


_servers: dict[str, ForkServer] = {}
_servers_lock = threading.Lock()


def fork_server(module: str) -> ForkServer:
    """Return the fork server for a module, starting the server if needed.

    The fork server starts in the background. Child processes that are forked later share the fork server.
    """
    with _servers_lock:
        if module not in _servers:
            _servers[module] = ForkServer(module)
        return _servers[module]


def stop_servers() -> None:
    """Kill all fork servers and their processes. The next call to `fork_server` starts a new server."""
    with _servers_lock:
        servers = list(_servers.values())
        _servers.clear()
    for server in servers:
        server.close()


atexit.register(stop_servers)


class Channel:
    """A process that was forked by a fork server. The process can allocate at most `memory` additional bytes.

    `arguments` are passed to the start function of the process.
    """

    def __init__(self, server: ForkServer, memory: int, *arguments: str) -> None:
        self.memory, self.pid = memory, 0
        self._socket, self._leash = server.connect()
        self._socket.setblocking(False)
        self._poll = select.poll()
        try:
            ready = messages.decode_ready(
                self.exchange(messages.encode(messages.Setup(memory, arguments)), seconds=START_SECONDS, limit=1 << 16)
            )
        except BaseException:
            self.close()
            raise
        self.pid, self.protections = ready.pid, ready.protections

    def exchange(self, frame: bytes, *, seconds: float, limit: int) -> bytes:
        """Send a request and return the response. Raise `EndedError` if the process exceeds the limits on time or
        response size.
        """
        clock = _Clock(self.pid, seconds)
        for part in (HEADER.pack(len(frame)), frame):
            data = memoryview(part)
            while data:
                self._wait(select.POLLOUT, clock)
                data = data[self._socket.send(data) :]
        (size,) = HEADER.unpack(self._receive(HEADER.size, clock))
        if size > limit:
            raise EndedError(f"the response exceeds {limit >> 20:,} MiB")
        return self._receive(size, clock)

    def _receive(self, size: int, clock: _Clock) -> bytes:
        data = bytearray(size)
        view, at = memoryview(data), 0
        while at < size:
            self._wait(select.POLLIN, clock)
            count = self._socket.recv_into(view[at:])
            if not count:
                raise EOFError
            at += count
        return bytes(data)

    def _wait(self, event: int, clock: _Clock) -> None:
        self._poll.register(self._socket, event)
        while not self._poll.poll(POLL_SECONDS * 1000):
            clock.check()
        clock.check_sometimes()

    def end(self) -> int | None:
        """Kill the process if it is running. Return the exit code of the process (negative if a signal killed it), or
        None if the exit code is unknown.
        """
        try:
            self._leash.shutdown(socket.SHUT_WR)
            self._leash.settimeout(60)
            status = self._leash.recv(4)
        except OSError:
            status = b""
        self.close()
        return int(struct.unpack("<i", status)[0]) if len(status) == 4 else None

    def close(self) -> None:
        """Close the sockets. The server kills the process when all copies of the leash socket are closed."""
        self._socket.close()
        self._leash.close()


class _Clock:
    """Measures the time that a process uses for one request."""

    def __init__(self, pid: int, seconds: float) -> None:
        self._pid, self._seconds = pid, seconds
        self._cpu, self._began = _cpu_time(pid), time.monotonic()
        self._next = self._began + POLL_SECONDS

    def check_sometimes(self) -> None:
        if time.monotonic() > self._next:
            self._next += POLL_SECONDS
            self.check()

    def check(self) -> None:
        """Raise `EndedError` if the process exceeds the CPU time limit or the much larger wall-clock limit."""
        waited = time.monotonic() - self._began
        cpu = _cpu_time(self._pid)
        used = waited if cpu is None or self._cpu is None else cpu - self._cpu
        if used > self._seconds + GRACE or waited > self._seconds * WAITING:
            raise EndedError(too_long(self._seconds))


def too_long(seconds: float) -> str:
    return f"the time limit of {seconds:.0f} seconds was exceeded"


def _cpu_time(pid: int) -> float | None:
    """Return the CPU seconds that a process has used, or None if the system does not report CPU time."""
    if not pid or sys.platform != "linux":
        return None
    try:
        # The clock id of the process, as computed by clock_getcpuclockid(3).
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return None


def _after_fork() -> None:
    """Replace the lock in a forked child, because a thread that exists only in the parent may have acquired it."""
    global _servers_lock
    _servers_lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
