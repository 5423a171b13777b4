"""Hash many parts of a buffer. The compiled module hashes several parts at the same time on one core."""

from __future__ import annotations

import hashlib
from itertools import pairwise

import numpy as np

from chatmill.rows import Index

try:
    from chatmill._native import _columns
except ImportError:  # pragma: no cover
    _columns = None  # type: ignore[assignment]


def part_hashes(data: bytes | bytearray | memoryview, stop: Index) -> bytes:
    """Return the first 16 bytes of the SHA-256 of each part, concatenated. `stop` contains the end offset of each
    part in `data`; a part starts where the previous part ends.
    """
    if _columns is not None:
        return _columns.keys(data, np.ascontiguousarray(stop, dtype=np.int64))
    whole = memoryview(data)
    parts = pairwise([0, *stop.tolist()])
    return b"".join(hashlib.sha256(whole[start:end]).digest()[:16] for start, end in parts)
