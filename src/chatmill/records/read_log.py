"""Record which bytes of a file were read, and the hash of these bytes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class BytesRead:
    """The byte ranges that were read from a file, the hash of these bytes, and the file size if the file was read to
    the end.
    """

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
    """Records and hashes the bytes of a file as they are read. Bytes can be read in any order, and the file can be
    opened more than once.
    """

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []
        self._hash = hashlib.sha256()
        self._ends: set[int] = set()

    def add(self, start: int, data: memoryview) -> None:
        """Record that `data` was read at the offset `start`; empty `data` means that the file ends there."""
        if not len(data):
            self._ends.add(start)
        elif self._ranges and self._ranges[-1][1] == start:
            self._ranges[-1] = (self._ranges[-1][0], start + len(data))
        else:
            self._ranges.append((start, start + len(data)))
        self._hash.update(data)

    def bytes_read(self) -> BytesRead:
        return BytesRead(tuple(self._ranges), self._hash.hexdigest(), tuple(sorted(self._ends)))
