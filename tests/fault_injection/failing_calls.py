"""Calls of the C library that fail: shim.c, compiled and preloaded, and told from here which call fails and how.

`run.py` starts itself again with the shim preloaded, where there is a C compiler and the system is Linux. The shim lets
every call through until a trial arms it, so all trials run with it, and what they change in chatmill holds.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("shim.c")
LOADED = "CHATMILL_TRIALS_SHIM"
"""The variable that says that this process was started with the shim, and where its file is."""
SHORT = -1
"""In place of an error number: a part of the bytes is read or written, which is no error."""

ONCE: dict[str, tuple[int, ...]] = {
    "write": (errno.ENOSPC, SHORT, errno.EIO, errno.EINTR, errno.EDQUOT),
    "sync": (errno.EIO, errno.ENOSPC, errno.EINTR),
    "rename": (errno.EIO, errno.ENOSPC, errno.EINVAL),
    "mmap": (errno.ENOMEM, errno.EIO),
    "open": (errno.EMFILE, errno.EIO, errno.EINTR, errno.ENFILE, errno.ENOSPC),
    "mkdir": (errno.ENOSPC, errno.EIO, errno.EDQUOT),
    "remove": (errno.EIO, errno.EBUSY),
    "read": (errno.EIO, SHORT, errno.EINTR),
    "close": (errno.EIO, errno.EDQUOT, errno.EINTR),
    "list": (errno.EIO, errno.EMFILE, errno.ENOMEM),
    "flock": (errno.ENOLCK, errno.EINTR),
    "link": (errno.EIO, errno.EMLINK),
    "truncate": (errno.EIO, errno.ENOSPC, errno.EINTR),
}
"""How a call may fail, of each kind; calls of a kind are counted together (write, pwrite, writev and sendfile)."""
FOREVER: dict[str, tuple[int, ...]] = {
    "open": (errno.EMFILE,),
    "read": (errno.EIO,),
    "write": (errno.ENOSPC, SHORT),
    "sync": (errno.EIO,),
    "rename": (errno.EIO, errno.EINVAL),
    "mmap": (errno.ENOMEM,),
    "mkdir": (errno.ENOSPC,),
    "remove": (errno.EROFS,),
    "close": (errno.EIO,),
    "list": (errno.EIO,),
}
"""How every call of a kind from one on may fail: the disk stays full, the descriptors stay used up."""
KINDS = tuple(ONCE)


@dataclass(frozen=True)
class Failure:
    """Call number `at` of a kind fails, and with `forever` those after it."""

    kind: str
    at: int
    error: int
    forever: bool = False

    def __str__(self) -> str:
        how = "short" if self.error == SHORT else errno.errorcode[self.error]
        return f"{self.kind} {self.at}{' and all later ones' if self.forever else ''}: {how}"


def ways(counts: dict[str, int], *, each: bool) -> list[Failure]:
    """Failures of every counted call: in every way that its kind may fail, or in one way each, all of them in turn."""
    failures = []
    for kind, count in counts.items():
        hows = [(error, False) for error in ONCE[kind]] + [(error, True) for error in FOREVER.get(kind, ())]
        for at in range(1, count + 1):
            chosen = hows if each else [hows[(at - 1) % len(hows)]]
            failures += [Failure(kind, at, error, forever) for error, forever in chosen]
    return failures


@contextmanager
def armed(root: Path, failure: Failure | None = None) -> Iterator[None]:
    """Calls about paths below `root` are counted, in this process and those it forks, and one of them fails."""
    kind, at, error = (KINDS.index(failure.kind), failure.at, failure.error) if failure else (-1, 0, 0)
    if _shim().faults_arm(os.fsencode(root), kind, at, error, int(bool(failure and failure.forever))):
        raise MemoryError("the shim has no memory to share")
    try:
        yield
    finally:
        _shim().faults_disarm()


def counted() -> dict[str, int]:
    """How many calls of each kind there were since the shim was armed."""
    return {kind: _shim().faults_count(number) for number, kind in enumerate(KINDS)}


def failed() -> tuple[int, str]:
    """How many calls failed since the shim was armed, and the path of the first."""
    return _shim().faults_failed(), os.fsdecode(_shim().faults_path())


@cache
def _shim() -> Any:
    library = ctypes.CDLL(None)
    library.faults_arm.argtypes = (ctypes.c_char_p, ctypes.c_int, ctypes.c_long, ctypes.c_int, ctypes.c_int)
    library.faults_count.restype = library.faults_failed.restype = ctypes.c_long
    library.faults_path.restype = ctypes.c_char_p
    return library


def why_not() -> str:
    """Why no call can be made to fail here; empty if it can."""
    if hasattr(ctypes.CDLL(None), "faults_arm"):
        return ""
    if sys.platform != "linux":
        return "calls are made to fail on Linux only"
    return "shim.c is not loaded: there is no C compiler (cc) that works, or the trial was not started by run.py"


def start_again_with_shim() -> None:
    """Restart this process with the shim preloaded; continue without it if that is not possible."""
    if (file := os.environ.pop(LOADED, None)) is not None:
        # Loaded by now. Other programs that are started from here need not have it.
        os.environ.pop("LD_PRELOAD")
        shutil.rmtree(Path(file).parent, ignore_errors=True)
        return
    if sys.platform != "linux" or not (compiler := shutil.which("cc")):
        return
    file = str(Path(tempfile.mkdtemp(prefix="chatmill-shim-")) / "shim.so")
    if subprocess.run([compiler, "-O1", "-shared", "-fPIC", str(SOURCE), "-o", file, "-ldl"], check=False).returncode:
        return
    os.environ |= {LOADED: file, "LD_PRELOAD": file}
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
