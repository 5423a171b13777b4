"""Log which bytes of a file were read, and hash them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class BytesRead:
    """The bytes read from a file: their ranges, their hash, and the end of the file if it was reached."""

    ranges: tuple[tuple[int, int], ...]
    sha256: str
    ends: tuple[int, ...]

    def to_json(self) -> list[Any]:
        return [self.ranges, self.sha256, self.ends]

    @classmethod
    def from_json(cls, stored: Any) -> BytesRead:
        ranges, sha256, ends = stored
        return cls(tuple((start, stop) for start, stop in ranges), sha256, tuple(ends))


class ReadLog:
    """Hashes the bytes of a file as they are read. The file may be read in any order, and opened several times."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []
        self._hash = hashlib.sha256()
        self._ends: set[int] = set()

    def add(self, start: int, data: memoryview) -> None:
        """Add the bytes read at `start`; empty `data` means the end of the file."""
        if not len(data):
            self._ends.add(start)
        elif self._ranges and self._ranges[-1][1] == start:
            self._ranges[-1] = (self._ranges[-1][0], start + len(data))
        else:
            self._ranges.append((start, start + len(data)))
        self._hash.update(data)

    def bytes_read(self) -> BytesRead:
        return BytesRead(tuple(self._ranges), self._hash.hexdigest(), tuple(sorted(self._ends)))
