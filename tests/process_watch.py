"""Find processes that tests have started but not ended, and make them print their stacks and exit.

Processes inherit an environment variable with the id of the test process, so they are found even after their parents
have ended. A process that does not inherit the variable is found only while its ancestors are alive.
"""

from __future__ import annotations

import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MARK = "CHATMILL_TEST_PROCESS"
PATIENCE = 60.0
"""Seconds after which a process that should be ending counts as left behind."""
LAST_WORDS = 10.0
"""Seconds that a process has to print its stacks."""
SERVERS: set[int] = set()
"""Processes that serve all tests, and therefore outlive the tests of a file."""


@dataclass(frozen=True)
class Process:
    pid: int
    parent: int
    command: str
    marked: bool

    def __str__(self) -> str:
        return f"process {self.pid} ({self.command})"


def mark_children() -> None:
    """Mark the processes that are started after this call, and make them print their stacks on SIGABRT."""
    os.environ[MARK] = str(os.getpid())
    os.environ["PYTHONFAULTHANDLER"] = "1"


def started_processes() -> list[Process]:
    """Return the running processes that this process or its descendants started, except servers shared by all tests."""
    # Ignore the servers of `multiprocessing` and the object stores, which end with this process.
    servers = {multiprocessing.forkserver._forkserver._forkserver_pid}
    servers.add(multiprocessing.resource_tracker._resource_tracker._pid)
    running = {process.pid: process for process in map(_look_at, Path("/proc").glob("[0-9]*")) if process is not None}
    return [
        process
        for process in running.values()
        if process.pid not in {*servers, os.getpid()}
        and (process.marked or _is_below(process, running, os.getpid()))
        and not any(_is_below(process, running, server) for server in SERVERS)
    ]


def _look_at(folder: Path) -> Process | None:
    try:
        state, parent = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
        marked = f"{MARK}={os.getpid()}".encode() in (folder / "environ").read_bytes().split(b"\0")
        command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return None
    return None if state == "Z" else Process(int(folder.name), int(parent), command[:300], marked)


def _is_below(process: Process, running: dict[int, Process], ancestor: int) -> bool:
    while process.pid != ancestor:
        if process.parent not in running:
            return False
        process = running[process.parent]
    return True


def end_with_stacks(processes: list[Process]) -> str:
    errors = [_open_errors(process.pid) for process in processes]
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGABRT)
    end = time.monotonic() + LAST_WORDS
    while any(_look_at(Path(f"/proc/{process.pid}")) for process in processes) and time.monotonic() < end:
        time.sleep(0.02)
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    return "\n".join(f"{process}:\n{_read_all(file)}" for process, file in zip(processes, errors, strict=True))


def _open_errors(pid: int) -> int | None:
    """Open a process's standard error to read what it prints next. The standard error must be a file, or a pipe without
    other readers.
    """
    try:
        file = os.open(f"/proc/{pid}/fd/2", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    with suppress(OSError):
        os.lseek(file, 0, os.SEEK_END)
    return file


def _read_all(file: int | None) -> str:
    if file is None:
        return "(its standard error cannot be read)"
    text = b""
    with suppress(OSError):
        while piece := os.read(file, 1 << 16):
            text += piece
    os.close(file)
    return text.decode(errors="replace")


def wait_for_all() -> list[Process]:
    """Stop the template servers, wait for all other processes to end, and return those that still run after the time
    limit.
    """
    if templates := sys.modules.get("chatmill.format.template.process.channel"):
        templates.stop_servers()
    end = time.monotonic() + PATIENCE
    while (left := started_processes()) and time.monotonic() < end:
        time.sleep(0.05)
    return left
