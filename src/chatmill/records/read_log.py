"""Which bytes of a file were read, and their hash, taken while they are read."""

from __future__ import annotations

import hashlib
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_CHUNK = 1 << 20


@dataclass(frozen=True)
class BytesRead:
    """The bytes of a file that were read: their ranges, the hash of all of them, and where the file ended, if seen."""

    ranges: tuple[tuple[int, int], ...]
    sha256: str
    ends: tuple[int, ...]

    def is_in(self, path: Path) -> bool:
        """Whether a file still has these bytes, and no others behind an end that was seen."""
        log = ReadLog()
        try:
            with LoggedFile(path, log) as file:
                for start, stop in self.ranges:
                    file.seek(start)
                    while start < stop and (data := file.read(min(_CHUNK, stop - start))):
                        start += len(data)
                size = file.seek(0, io.SEEK_END)
        except OSError:
            return False
        return log.bytes_read().sha256 == self.sha256 and all(end == size for end in self.ends)

    def to_json(self) -> list[Any]:
        return [self.ranges, self.sha256, self.ends]

    @classmethod
    def from_json(cls, stored: Any) -> BytesRead:
        ranges, sha256, ends = stored
        return cls(tuple((start, stop) for start, stop in ranges), sha256, tuple(ends))


class ReadLog:
    """Hashes the bytes of one file as they are read. A reader may open the file several times, and skip in it."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []
        self._hash = hashlib.sha256()
        self._ends: set[int] = set()

    def add(self, start: int, data: memoryview) -> None:
        """Add what was read at byte `start`: nothing, if the file ends there."""
        if not len(data):
            self._ends.add(start)
        elif self._ranges and self._ranges[-1][1] == start:
            self._ranges[-1] = (self._ranges[-1][0], start + len(data))
        else:
            self._ranges.append((start, start + len(data)))
        self._hash.update(data)

    def bytes_read(self) -> BytesRead:
        return BytesRead(tuple(self._ranges), self._hash.hexdigest(), tuple(sorted(self._ends)))


class LoggedFile(io.FileIO):
    """A file whose reads are added to a log."""

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

    # Those of FileIO do not call readinto.
    read = io.RawIOBase.read  # type: ignore[assignment]
    readall = io.RawIOBase.readall
