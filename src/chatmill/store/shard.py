"""A shard as the reader needs it, and its files, mapped."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.errors import DataError


@dataclass(frozen=True)
class Shard:
    """Where a shard lies, and how many records each of its files has."""

    folder: Path
    num_episodes: int
    num_tokens: int
    dtype: np.dtype[np.unsignedinteger]
    records: Mapping[str, int]


def map_file(path: Path, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
    """So many records of a file, read when they are touched."""
    size = count * dtype.itemsize
    with path.open("rb") as file:
        # Nothing can be mapped of an empty file.
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
    if len(data) != size:
        raise DataError(f"{path}: {len(data)} bytes, when it was opened {size}; it was changed while it was read")
    return np.frombuffer(data, dtype=dtype)


def release(array: NDArray[Any]) -> None:
    """Let go of the memory behind a mapped file; what is asked for again is read again."""
    if isinstance(array.base, memoryview) and isinstance(array.base.obj, mmap.mmap):
        array.base.obj.madvise(mmap.MADV_DONTNEED)
