"""Memory-mapped files that keep no file descriptor open, and that raise an error if they are truncated.

Python's `mmap` keeps a file descriptor open for every mapped file, and a process can often open only 1,024 descriptors.
This module maps files through the C library, which needs no descriptor after mapping. If a mapped file is truncated,
reading a missing page raises the signal SIGBUS, which would kill the process without a message. Read mapped bytes like
this:

    with reading():
        ids = array[start:stop].copy()
        check_mapped(array)

A page that cannot be read raises `DataError` inside `reading()`. Outside `reading()`, a page that cannot be read ends
the process with a one-line message and exit code 1. If a file is truncated in the middle of a page, the missing bytes
of this page are read as zeros; `check` detects this.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.errors import DataError, one_line
from chatmill.remote.urls import Place

STATS_PER_SECOND = 500
"""Maximum number of `stat` calls per second, over all mapped files, to detect overwritten bytes."""
MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


@dataclass(eq=False)
class _Region:
    address: int
    size: int
    path: Place
    absolute: Path
    fault: str = ""
    """The reason why the mapped bytes must no longer be used; empty if they can be used."""

    def note_fault(self) -> None:
        """Record why a page cannot be read."""
        try:
            size = self.absolute.stat().st_size
        except OSError:
            size = self.size
        shown = one_line(str(self.path), 1000)
        if size < self.size:
            what = f"was truncated from {self.size} to {size} bytes while it was being read"
        elif size > self.size:
            what = f"was overwritten while it was being read: its size changed from {self.size} to {size} bytes"
        else:
            what = "was overwritten, or its disk failed, while it was being read"
        self.fault = f"{shown}: {what}; copy or build the dataset again, and never modify its files in place"


_regions: dict[int, _Region] = {}
"""All mapped files by address, for the SIGBUS handler."""


class MappedFile:
    """Maps the file with the open descriptor `fd` into memory; `fd` can be closed afterwards.

    `absolute` is the absolute path of the file, which stays valid if the working directory changes.
    """

    live = 0
    """Number of files that are mapped in this process."""

    def __init__(self, fd: int, path: Place, absolute: Path) -> None:
        status = os.fstat(fd)
        self.size = status.st_size
        self._stamp = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
        self._stat_at = time.monotonic() + MappedFile.live / STATS_PER_SECOND
        self._region = _Region(0, self.size, path, absolute)
        if not self.size:
            return
        address = _libc.mmap(None, self.size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
        if address == MAP_FAILED:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), str(path))
        self._region.address = address
        _regions[address] = self._region
        MappedFile.live += 1
        _install_handler()
        with reading():
            # Remember the last nonzero byte, which reads as 0 if the file is truncated before it.
            begin = (self.size - 1) // mmap.PAGESIZE * mmap.PAGESIZE
            end = ctypes.string_at(address + begin, self.size - begin)
            last = max(len(end.rstrip(b"\0")), 1) - 1
            self._last, self._value = ctypes.c_ubyte.from_address(address + begin + last), end[last]

    @property
    def __array_interface__(self) -> dict[str, Any]:
        # Even an empty array needs an address.
        where = self._region.address or id(self)
        return {"version": 3, "typestr": "|u1", "shape": (self.size,), "data": (where, True)}

    def check(self) -> None:
        """Raise `DataError` if the file has changed since it was mapped; call this after reading the bytes.

        Truncation is always detected. To limit the number of `stat` calls, other changes are detected with a delay of
        up to 2 ms per mapped file.
        """
        if not self.size:
            return
        if self._region.fault or self._last.value != self._value:
            self._refuse()
        if (now := time.monotonic()) > self._stat_at:
            self._stat_at = now + MappedFile.live / STATS_PER_SECOND
            try:
                status = self._region.absolute.stat()
            except OSError:
                return
            stamp = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
            # Ignore a new file with the same name, because the old file stays mapped.
            if stamp[:2] == self._stamp[:2] and stamp != self._stamp:
                self._refuse()

    def is_removed(self) -> bool:
        """Whether the file was removed or replaced, so that unmapping it frees disk space."""
        try:
            status = self._region.absolute.stat()
        except OSError:
            return True
        return (status.st_dev, status.st_ino) != self._stamp[:2]

    def _refuse(self) -> None:
        if not self._region.fault:
            self._region.note_fault()
        raise DataError(self._region.fault)

    def advise(self, advice: int) -> None:
        """Call `madvise` for the mapped bytes; `mmap.MADV_DONTNEED` frees their memory."""
        if self.size:
            _libc.madvise(self._region.address, self.size, advice)

    def __del__(self) -> None:
        region = getattr(self, "_region", None)
        if region is not None and region.address and _regions is not None:
            _regions.pop(region.address, None)
            MappedFile.live -= 1
            _libc.munmap(region.address, region.size)


def mapped_file(array: NDArray[Any]) -> MappedFile | None:
    """Return the mapped file that an array is a view of, or None for any other array."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    return base if isinstance(base, MappedFile) else None


def check_mapped(array: NDArray[Any]) -> None:
    """Call `MappedFile.check` if an array is a view of a mapped file."""
    if (file := mapped_file(array)) is not None:
        file.check()


# Functions that handle pages that cannot be read.


class _ThisThread(threading.local):
    depth = 0
    """Number of nested `reading` blocks in this thread."""
    fault = ""


_this_thread = _ThisThread()


class _Reading:
    def __enter__(self) -> None:
        # A forked process may have a different SIGBUS handler, because torch workers install their own.
        if _installed_by != os.getpid():
            _install_handler()
        _this_thread.depth += 1

    def __exit__(self, *error: object) -> None:
        _this_thread.depth -= 1
        if fault := _this_thread.fault:
            if not _this_thread.depth:
                _this_thread.fault = ""
            # Discard any other error from the block, because it was caused by the zeros in the unreadable page.
            raise DataError(fault) from None


def reading() -> _Reading:
    """Return a context manager in which this thread raises `DataError` for a page that cannot be read."""
    return _READING


_READING = _Reading()


class _SigAction(ctypes.Structure):
    """`struct sigaction` on 64-bit Linux (glibc, musl) and macOS."""

    _fields_ = [
        ("handler", ctypes.c_void_p),
        *(
            [("mask", ctypes.c_uint32), ("flags", ctypes.c_int)]
            if sys.platform == "darwin"
            else [("mask", ctypes.c_uint64 * 16), ("flags", ctypes.c_int), ("restorer", ctypes.c_void_p)]
        ),
    ]


SA_SIGINFO, SI_CODE, SI_ADDR = (0x40, 8, 24) if sys.platform == "darwin" else (4, 8, 16)
"""The SA_SIGINFO flag, and the offsets of the cause (si_code) and the address (si_addr) in `siginfo_t`."""
_previous = _SigAction()


def _on_bus_error(number: int, info: int, context: int) -> None:
    """Handle SIGBUS. Python code can run here because the signal is raised synchronously when a page is read."""
    address = ctypes.c_void_p.from_address(info + SI_ADDR).value or 0
    was_sent = ctypes.c_int.from_address(info + SI_CODE).value <= 0
    regions = [] if was_sent else list(_regions.values())
    for region in regions:
        size = -(-region.size // mmap.PAGESIZE) * mmap.PAGESIZE
        if region.address <= address < region.address + size:
            region.note_fault()
            if not _this_thread.depth:
                os.write(2, f"{region.fault}\n".encode(errors="backslashreplace"))
                os._exit(1)
            _this_thread.fault = region.fault
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10  # 0x10 is MAP_FIXED: map zeros at this address.
            _libc.mmap(region.address, size, mmap.PROT_READ, flags, -1, 0)
            return
    # The address is not in a mapped file, so call the previous handler.
    _libc.sigaction(signal.SIGBUS, ctypes.byref(_previous), None)
    if was_sent:
        os.kill(os.getpid(), signal.SIGBUS)


def _make_handler() -> Any:
    """Return the SIGBUS handler as a C function, or None if the platform is not supported."""
    if sys.platform not in ("linux", "darwin") or ctypes.sizeof(ctypes.c_void_p) != 8:
        return None
    try:
        return ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(_on_bus_error)
    except (MemoryError, OSError):
        return None


_handler = _make_handler()
_handler_address = None if _handler is None else ctypes.cast(_handler, ctypes.c_void_p).value


_installed_by = 0
"""The id of the process that installed the SIGBUS handler."""


def _install_handler() -> None:
    """Install the SIGBUS handler; errors outside mapped files are passed to the previous handler."""
    global _installed_by
    _installed_by = os.getpid()
    now = _SigAction()
    if _handler_address is None or _libc.sigaction(signal.SIGBUS, None, ctypes.byref(now)):
        return
    if now.handler != _handler_address:
        ctypes.pointer(_previous)[0] = now
        _libc.sigaction(signal.SIGBUS, ctypes.byref(_SigAction(handler=_handler_address, flags=SA_SIGINFO)), None)
