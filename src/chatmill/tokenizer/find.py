"""Find bytes and token ids in large arrays. The compiled module is faster than comparisons in numpy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from chatmill.rows import Ids, Index

try:
    from chatmill._native import _positions
except ImportError:  # pragma: no cover
    _positions = None  # type: ignore[assignment]


def byte_pairs(data: bytes, first: int, is_second: NDArray[np.bool_]) -> Index:
    """Return the positions of the bytes `first` that are followed by a byte b with is_second[b], or by the end.

    >>> import numpy as np
    >>> from chatmill.tokenizer.find import byte_pairs
    >>> is_bar = np.arange(256) == ord("|")
    >>> byte_pairs(b"a < b <|end|>", ord("<"), is_bar).tolist()
    [6]
    """
    if _positions is not None:
        return np.frombuffer(_positions.byte_pairs(data, first, is_second), dtype=np.int64)
    content = np.frombuffer(data, dtype=np.uint8)
    here = np.flatnonzero(content == first)
    return here[(here + 1 == len(content)) | is_second[content.take(here + 1, mode="clip")]]


def ids_in_range(ids: Ids, first: int, last: int) -> Index:
    """Return the positions of the ids with first <= id <= last."""
    if _positions is not None and ids.dtype == np.uint32:
        return np.frombuffer(_positions.ids_in_range(np.ascontiguousarray(ids), first, last), dtype=np.int64)
    # For ids below `first`, the unsigned difference wraps around to a large number. One comparison tests both bounds.
    return np.flatnonzero((ids - np.uint32(first)) <= np.uint32(last - first))
