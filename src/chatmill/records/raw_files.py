"""Open local files and remote objects. Remote objects are read in blocks of up to 4 MiB, with read-ahead."""

from __future__ import annotations

import io
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from chatmill.records.read_log import BytesRead, ReadLog
from chatmill.remote import objects
from chatmill.remote.threads import submit
from chatmill.remote.urls import Place, Url

FIRST_BYTES = 1 << 19
"""Bytes of the first request. Each sequential request reads four times as many bytes as the previous request, up to
`MOST_BYTES`.
"""
MOST_BYTES = 1 << 22
_CHUNK = 1 << 20


def open_raw(path: Place, log: ReadLog | None = None, *, stop: int | None = None) -> io.RawIOBase:
    """Open a file without decompressing it. `log` records which bytes are read. The caller must read only bytes before
    `stop`.
    """
    if isinstance(path, Url):
        return RemoteFile(path, log, stop=stop)
    return io.FileIO(path) if log is None else LoggedFile(path, log)


def has_bytes(path: Place, read: BytesRead) -> bool:
    """Whether a file still contains the bytes that were read before and, if it was read to the end, still has the same
    size.
    """
    log = ReadLog()
    try:
        with open_raw(path, log) as file:
            for start, stop in read.ranges:
                file.seek(start)
                while start < stop and (data := file.read(min(_CHUNK, stop - start))):
                    start += len(data)
            size = file.seek(0, io.SEEK_END)
    except (OSError, objects.MissingObjectError):
        return False
    return log.bytes_read().digest == read.digest and all(end == size for end in read.ends)


class LoggedFile(io.FileIO):
    """A local file that logs which bytes are read."""

    def __init__(self, path: Path, log: ReadLog) -> None:
        super().__init__(path)
        self._log = log

    def readinto(self, buffer: Any, /) -> int:
        start = self.tell()
        count = super().readinto(buffer) or 0
        view = memoryview(buffer).cast("B")
        if count or len(view):
            self._log.add(start, view[:count])
        return count

    # In FileIO, these methods do not call `readinto`, so their reads would not be logged.
    read = io.RawIOBase.read  # type: ignore[assignment]
    readall = io.RawIOBase.readall


class RemoteFile(io.RawIOBase):
    """A remote object opened for reading. `log` records which bytes are read; read-ahead stops at the offset `stop`."""

    def __init__(self, url: Url, log: ReadLog | None = None, *, stop: int | None = None) -> None:
        self._url, self._log, self._stop = url, log, stop
        self._size: int | None = None
        self._at = 0
        self._start, self._block = 0, memoryview(b"")
        """The current block and its offset."""
        self._length = FIRST_BYTES
        self._ahead: tuple[int, Future[bytes]] | None = None
        """The block that is being read ahead, and its offset."""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at}.get(whence, self._end())
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer).cast("B")
        if not len(view):
            return 0
        if not self._start <= self._at < self._start + len(self._block):
            self._load()
        skipped = self._at - self._start
        count = min(len(view), len(self._block) - skipped)
        view[:count] = self._block[skipped : skipped + count]
        if self._log is not None:
            self._log.add(self._at, view[:count])
        self._at += count
        return count

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead[1].cancel()
        self._ahead, self._block = None, memoryview(b"")
        super().close()

    def _end(self) -> int:
        if self._size is None:
            if (info := objects.find(self._url)) is None:
                raise objects.missing(self._url)
            self._size = info.size
        return self._size

    def _load(self) -> None:
        """Read the block at the current position; if access is sequential, also start to read the next block in the
        background.
        """
        end = self._stop if self._stop is not None and self._at < self._stop else self._end()
        is_first = not len(self._block)
        goes_on = not is_first and self._at == self._start + len(self._block)
        self._length = min(MOST_BYTES, 4 * self._length) if goes_on else FIRST_BYTES
        self._start = self._at
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == self._at:
            data = ahead[1].result()
        else:
            if ahead is not None:
                ahead[1].cancel()
            stop = min(end, self._at + self._length)
            data = objects.read(self._url, self._at, stop) if self._at < stop else b""
        self._block = memoryview(data)
        start = self._at + len(data)
        # A reader with a log reads sequentially, so read ahead after the first block.
        if data and start < end and (goes_on or (is_first and self._log is not None)):
            stop = min(end, start + min(MOST_BYTES, 4 * self._length))
            url = self._url
            self._ahead = start, submit(lambda: objects.read(url, start, stop))
