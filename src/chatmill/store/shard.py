"""The files of one shard, memory-mapped, and lookups in their tables."""

from __future__ import annotations

import mmap
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.errors import DataError
from chatmill.rows import Index, Part, Role, Rule, Table

UNKNOWN = {
    name: ~np.isin(np.arange(256), [int(code) for code in codes])
    for name, codes in (("role", Role), ("part", Part), ("rule", Rule))
}
"""For the role, part and rule of a span, whether each byte from 0 to 255 is no known value."""


@dataclass(frozen=True)
class Shard:
    """Where a shard is, and how many records each of its files has."""

    folder: Path
    num_episodes: int
    num_tokens: int
    dtype: np.dtype[np.unsignedinteger]
    records: Mapping[str, int]


def map_file(path: Path, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
    """The `count` records of a file, read from disk when they are accessed."""
    size = count * dtype.itemsize
    with path.open("rb") as file:
        # An empty file cannot be mapped.
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
    if len(data) != size:
        raise DataError(f"{path}: {len(data)} bytes, when it was opened {size}; it was changed while it was read")
    return np.frombuffer(data, dtype=dtype)


def release(array: NDArray[Any]) -> None:
    """Free the memory of a mapped file; pages are read again when they are accessed."""
    if isinstance(array.base, memoryview) and isinstance(array.base.obj, mmap.mmap):
        array.base.obj.madvise(mmap.MADV_DONTNEED)


def lower_bound(column: NDArray[Any], value: int, low: int = 0) -> int:
    """The first index from `low` on of a sorted column that is not below the value, in O(log n).

    `np.searchsorted` would first copy the whole column, because it is strided in the mapped file.
    """
    # Where each row is one conversation, the number of a row is that of its segment.
    size = len(column)
    guess = low if value < low else size if value > size else value
    if (guess == size or column[guess] >= value) and (guess == low or column[guess - 1] < value):
        return guess
    return bisect_left(column, value, low)


def first_spans(origins: Table, segments: Index, end: int) -> Index:
    """The first span of each segment; `end` for the number after the last segment."""
    if not len(origins):
        return np.full(len(segments), end, dtype=np.int64)
    first = origins["first_span"][np.minimum(segments, len(origins) - 1)].astype(np.int64)
    return np.where(segments < len(origins), first, end)
