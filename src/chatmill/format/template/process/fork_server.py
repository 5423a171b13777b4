"""A fork server: a fresh Python interpreter that forks sandboxed processes on request.

The server imports all modules that the forked processes need, and never reads untrusted data. The server's standard
input is a Unix socket: for each byte that arrives with two socket descriptors, the server forks a process. The first of
the two sockets is the channel, which carries requests and responses. The second socket is the leash: if the renderer
exits or closes its end of the leash, the server kills the forked process. When a forked process exits, the server
writes its exit code to the leash.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import struct
from collections.abc import Callable
from contextlib import suppress

from chatmill.format.template.process import messages
from chatmill.format.template.process.lockdown import lock_down

CHANNEL = 0
"""The file descriptor of the channel, which is the only open file descriptor of a forked process."""
HEADER = struct.Struct("<Q")

Service = Callable[[bytes], bytes]
"""A function that maps an encoded request to an encoded response."""


def run_server(start: Callable[..., Service]) -> None:
    """Fork a process for every byte on standard input until the renderer closes its end of the socket.

    Each forked process calls `start` to create its service, and is sandboxed before it reads the first request.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Freeze imported objects, so that forked processes share them and never garbage-collect them.
    gc.collect()
    gc.freeze()
    gc.enable()
    woken, wake = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    control = socket.socket(fileno=CHANNEL)
    children: dict[int, socket.socket] = {}
    """Maps the pid of each running process to a socket; the process is killed when the socket is closed."""
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(woken, select.POLLIN)
    while True:
        ready = [descriptor for descriptor, _ in poll.poll()]
        for pid, leash in children.items():
            if leash.fileno() in ready:
                os.kill(pid, signal.SIGKILL)
                poll.unregister(leash)
        if woken in ready:
            os.read(woken, 4096)
        for pid, leash in list(children.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del children[pid]
                with suppress(KeyError):
                    poll.unregister(leash)
                _tell(leash, os.waitstatus_to_exitcode(status))
        if control.fileno() in ready:
            message, descriptors, _, _ = socket.recv_fds(control, 1, 2)
            if not message:
                break
            if len(descriptors) == 2:
                leash = socket.socket(fileno=descriptors[1])
                known = [control, leash, *children.values()]
                highest = max(woken, wake, descriptors[0], *(each.fileno() for each in known))
                children[_fork(descriptors[0], highest, start)] = leash
                os.close(descriptors[0])
                poll.register(leash, select.POLLIN)
    for pid in children:
        os.kill(pid, signal.SIGKILL)


def _tell(leash: socket.socket, code: int) -> None:
    with suppress(OSError):
        leash.send(struct.pack("<i", code))
    leash.close()


def _fork(channel: int, highest: int, start: Callable[..., Service]) -> int:
    """Fork a process with `channel` as its only open file descriptor.

    `highest` is the highest open file descriptor of the server.
    """
    server = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.dup2(channel, CHANNEL)
        os.closerange(1, highest + 1)
        setup = messages.decode_setup(_read())
        service = start(*setup.arguments)
        protections = lock_down(setup.memory, server)
        _write(messages.encode(messages.Ready(os.getpid(), protections)))
        while frame := _read():
            _write(service(frame))
    finally:
        os._exit(1)


def _read() -> bytes:
    """Return the next message from the channel, or empty bytes at the end of the stream."""
    header = _read_exactly(HEADER.size)
    return _read_exactly(HEADER.unpack(header)[0]) if header else b""


def _read_exactly(size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        if not (piece := os.read(CHANNEL, min(size - len(data), 1 << 20))):
            return b""
        data += piece
    return bytes(data)


def _write(frame: bytes) -> None:
    for data in (memoryview(HEADER.pack(len(frame))), memoryview(frame)):
        while data:
            data = data[os.write(CHANNEL, data) :]
