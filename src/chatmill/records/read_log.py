"""Record which bytes of a file were read, and a digest of these bytes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from chatmill.records.part_hashes import part_hashes

BLOCK = 1 << 12
"""Number of bytes that are hashed as one part."""


@dataclass(frozen=True)
class BytesRead:
    """The byte ranges that were read from a file, the digest of these bytes, and the file size if the file was read to
    the end.
    """

    ranges: tuple[tuple[int, int], ...]
    digest: str
    ends: tuple[int, ...]

    def to_json(self) -> list[Any]:
        return [self.ranges, self.digest, self.ends]

    @classmethod
    def from_json(cls, stored: Any) -> BytesRead:
        ranges, digest, ends = stored
        return cls(tuple((start, stop) for start, stop in ranges), digest, tuple(ends))


class ReadLog:
    """Records and hashes the bytes of a file as they are read. Bytes can be read in any order, and the file can be
    opened more than once.

    The digest is the SHA-256 of the hashes of all complete blocks of `BLOCK` bytes, followed by the remaining bytes.
    Several blocks of one read are hashed at a time, which is faster than one SHA-256 of all bytes. The digest depends
    only on the bytes and their order, and not on how many bytes each read returns.
    """

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []
        self._hash = hashlib.sha256()
        self._incomplete = bytearray()
        """The bytes after the last complete block."""
        self._ends: set[int] = set()

    def add(self, start: int, data: memoryview) -> None:
        """Record that `data` was read at the offset `start`; empty `data` means that the file ends there."""
        if not len(data):
            self._ends.add(start)
        elif self._ranges and self._ranges[-1][1] == start:
            self._ranges[-1] = (self._ranges[-1][0], start + len(data))
        else:
            self._ranges.append((start, start + len(data)))
        if self._incomplete:
            missing = BLOCK - len(self._incomplete)
            self._incomplete += data[:missing]
            data = data[missing:]
            if len(self._incomplete) == BLOCK:
                self._add_blocks(self._incomplete)
                self._incomplete = bytearray()
        complete = len(data) - len(data) % BLOCK
        self._add_blocks(data[:complete])
        self._incomplete += data[complete:]

    def _add_blocks(self, data: bytearray | memoryview) -> None:
        if len(data):
            self._hash.update(part_hashes(data, np.arange(BLOCK, len(data) + 1, BLOCK)))

    def bytes_read(self) -> BytesRead:
        digest = self._hash.copy()
        digest.update(self._incomplete)
        return BytesRead(tuple(self._ranges), digest.hexdigest(), tuple(sorted(self._ends)))
