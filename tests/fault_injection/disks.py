from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from chatmill.store import files
from chatmill.store.files import Disk

OPERATIONS = (
    "make_folder",
    "create",
    "append",
    "write",
    "sync",
    "link",
    "symlink",
    "rename",
    "rename_new",
    "exchange",
    "remove",
)


class KilledAt(Disk):
    """Kills the process at disk operation number `at`; if `at` is 0, only counts disk operations.

    If disk operation `at` is a write, half of the data is written before the process is killed.
    """

    def __init__(self, at: int = 0) -> None:
        self.at, self.count = at, 0

    def reached(self) -> bool:
        self.count += 1
        return self.count == self.at

    def end(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def tear(self, fd: int, data: Any) -> None:
        os.write(fd, data[: len(data) // 2])

    def write(self, fd: int, data: Any) -> int:
        if self.reached():
            self.tear(fd, data)
            self.end()
        return super().write(fd, data)


def _counted(name: str) -> Any:
    def operation(self: KilledAt, *args: Any) -> Any:
        if self.reached():
            self.end()
        return getattr(Disk, name)(self, *args)

    return operation


for _name in OPERATIONS:
    if _name != "write":
        setattr(KilledAt, _name, _counted(_name))


class HeldAt(KilledAt):
    """Pauses before disk operation number `at`: writes a byte to the pipe `tell`, then waits for a byte from the pipe
    `wait`.
    """

    def __init__(self, at: int, tell: int, wait: int) -> None:
        super().__init__(at)
        self._tell, self._wait = tell, wait

    def tear(self, fd: int, data: Any) -> None:
        pass

    def end(self) -> None:
        os.write(self._tell, b".")
        os.read(self._wait, 1)


class Dribbling(Disk):
    def __init__(self, most: int) -> None:
        self._most = most

    def write(self, fd: int, data: Any) -> int:
        time.sleep(0.0005)
        return os.write(fd, data[: random.randint(1, self._most)])


class Full(Disk):
    def __init__(self, room: int) -> None:
        self.room = room

    def write(self, fd: int, data: Any) -> int:
        if self.room <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = os.write(fd, data[: self.room])
        self.room -= written
        return written


class Unsynced(Disk):
    """Skips fsync, to save time in the steps that follow a simulated crash."""

    def sync(self, path: Path) -> None:
        pass


@contextmanager
def in_place(disk: Disk) -> Iterator[Disk]:
    real, files.disk = files.disk, disk
    try:
        yield disk
    finally:
        files.disk = real


class Room:
    def __init__(self, path: Path) -> None:
        self.path = path

    def resize(self, size: int) -> None:
        _mount("-o", f"remount,size={size}", str(self.path))

    def lock(self) -> None:
        _mount("-o", "remount,ro", str(self.path))


@contextmanager
def small_room(path: Path, size: int) -> Iterator[Room | None]:
    path.mkdir()
    mounted = _mount("-t", "tmpfs", "-o", f"size={size}", "chatmill-trial", str(path))
    try:
        yield Room(path) if mounted else None
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(path)], check=True, capture_output=True)


def _mount(*args: str) -> bool:
    try:
        return subprocess.run(["mount", *args], capture_output=True, check=False).returncode == 0
    except OSError:
        return False
