"""Controls shim.c, a preloaded library that makes chosen C library calls fail.

On Linux with a C compiler, `run.py` restarts itself with the shim preloaded. The shim passes every call through until a
trial arms it.
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
"""Environment variable with the path of the shim, set if this process was started with it."""
SHORT = -1
"""Used instead of an errno value: the call reads or writes only part of the bytes, without an error."""

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
"""Ways in which a single call of each kind may fail; related calls (write, pwrite, writev and sendfile) are counted
together.
"""
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
"""Ways in which a call and all later calls of its kind may fail, as when a disk stays full."""
KINDS = tuple(ONCE)


@dataclass(frozen=True)
class Failure:
    """A failure of the `at`-th C library call of one kind. With `forever`, all later calls of that kind fail too."""

    kind: str
    at: int
    error: int
    forever: bool = False

    def __str__(self) -> str:
        how = "short" if self.error == SHORT else errno.errorcode[self.error]
        return f"{self.kind} {self.at}{' and all later ones' if self.forever else ''}: {how}"


def ways(counts: dict[str, int], *, each: bool) -> list[Failure]:
    """Return failures for every counted call: one failure mode, chosen in rotation, or with `each` all modes."""
    failures = []
    for kind, count in counts.items():
        hows = [(error, False) for error in ONCE[kind]] + [(error, True) for error in FOREVER.get(kind, ())]
        for at in range(1, count + 1):
            chosen = hows if each else [hows[(at - 1) % len(hows)]]
            failures += [Failure(kind, at, error, forever) for error, forever in chosen]
    return failures


@contextmanager
def armed(root: Path, failure: Failure | None = None) -> Iterator[None]:
    """Count calls on paths below `root`, in this process and in forked processes. With `failure`, make the calls
    that it describes fail.
    """
    kind, at, error = (KINDS.index(failure.kind), failure.at, failure.error) if failure else (-1, 0, 0)
    if _shim().faults_arm(os.fsencode(root), kind, at, error, int(bool(failure and failure.forever))):
        raise MemoryError("the shim could not allocate shared memory")
    try:
        yield
    finally:
        _shim().faults_disarm()


def counted() -> dict[str, int]:
    return {kind: _shim().faults_count(number) for number, kind in enumerate(KINDS)}


def failed() -> tuple[int, str]:
    return _shim().faults_failed(), os.fsdecode(_shim().faults_path())


@cache
def _shim() -> Any:
    library = ctypes.CDLL(None)
    library.faults_arm.argtypes = (ctypes.c_char_p, ctypes.c_int, ctypes.c_long, ctypes.c_int, ctypes.c_int)
    library.faults_count.restype = library.faults_failed.restype = ctypes.c_long
    library.faults_path.restype = ctypes.c_char_p
    return library


def why_not() -> str:
    if hasattr(ctypes.CDLL(None), "faults_arm"):
        return ""
    if sys.platform != "linux":
        return "C library calls can be made to fail only on Linux"
    return "shim.c is not loaded: install a working C compiler (cc) and start the trials with run.py"


def start_again_with_shim() -> None:
    """Restart this process with the shim preloaded, or continue without the shim if it is not available."""
    if (file := os.environ.pop(LOADED, None)) is not None:
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
