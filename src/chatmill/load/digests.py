"""Digests of the rows of a batch, for an audit log: of what the arrays hold, and of where the row stands.

`checksummed_rows` hashes two checksums of a row, which take a fraction of the time that a row takes to build;
`hashed_rows` hashes all its bytes, as logs of earlier versions have it. Digests of several rows, ranks or steps are
combined by adding them, modulo 2^64 in each column.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from chatmill.load.batch import Batch
from chatmill.rows import Index

try:
    from chatmill._native import _batch
except ImportError:
    _batch = None  # type: ignore[assignment]

Digests = NDArray[np.uint64]
RowDigests = Callable[[Batch, Sequence[int], int], Digests]
"""Digests (rows, 2) of the rows of several steps, given these and the place of the first row in its global batch."""
SHIFT = 4
"""Keys by which the second checksum of a row is ahead of the first."""


def checksummed_rows(batch: Batch, steps: Sequence[int], first_row: int) -> Digests:
    """Hash the checksums of each row with its step, its place and its episodes."""
    rows, most = batch.episode_ids.shape
    table = np.empty((rows, 4 + most), dtype="<i8")
    table[:, :2], table[:, 2:4], table[:, 4:] = checksums(batch).view("i8"), _places(rows, steps, first_row), batch[-1]
    stops = 8 * (4 + np.count_nonzero(batch.episode_ids >= 0, axis=1))
    content, width = table.reshape(-1).view(np.uint8).data, table.itemsize * table.shape[1]
    edges = zip(range(0, rows * width, width), stops.tolist(), strict=True)
    return _joined([hashlib.blake2b(content[at : at + size], digest_size=16).digest() for at, size in edges])


def hashed_rows(batch: Batch, steps: Sequence[int], first_row: int) -> Digests:
    """Hash all of each row with its episodes, its step and its place."""
    digests, places = [], _places(len(batch.x), steps, first_row)
    for row, episodes, place in zip(_words(batch), batch.episode_ids, places, strict=True):
        digest = hashlib.blake2b(row.data, digest_size=16)
        digest.update(np.concatenate([episodes[episodes >= 0], [-1], place]).astype("<i8").data)
        digests.append(digest.digest())
    return _joined(digests)


DIGESTS: dict[str | None, RowDigests] = {None: hashed_rows, "checksums": checksummed_rows}
"""The digests that a log may have, by the name that its `dataset_load` line has for them."""


def checksums(batch: Batch) -> NDArray[np.uint64]:
    """Two sums of products of the 32-bit words of each row; (rows, 2).

    The words of a row are those of x, y and weights, with a zero if they are odd. Each is added to a key modulo 2^32,
    those of the first half are multiplied with those of the second, and the products summed modulo 2^64. The second
    sum takes other keys. A row that differs has the same sum for one of 2^32 choices of the keys, independently: this
    is the hash family NH of Black et al., UMAC (1999).
    """
    rows, size = batch.x.shape
    sums = np.empty((rows, 2), dtype=np.uint64)
    half = (3 * size + 1) // 2
    keys = _keys(2 * half + SHIFT)
    if _batch is not None and all(array.flags.c_contiguous for array in batch[:4]):
        _batch.checksums(sums, batch.x, batch.y, batch.weights, keys)
        return sums
    words = np.pad(_words(batch), ((0, 0), (0, 2 * half - 3 * size)))
    for column in range(2):
        factors = (words + keys[column * SHIFT :][: 2 * half]).astype(np.uint64)
        sums[:, column] = (factors[:, :half] * factors[:, half:]).sum(axis=1, dtype=np.uint64)
    return sums


def _places(rows: int, steps: Sequence[int], first_row: int) -> Index:
    """The step of each row, and its place in the global batch of that step; (rows, 2)."""
    places = np.empty((len(steps), rows // len(steps), 2), dtype=np.int64)
    places[:, :, 0] = np.array(steps)[:, np.newaxis]
    places[:, :, 1] = np.arange(first_row, first_row + places.shape[1])
    return places.reshape(-1, 2)


@lru_cache(maxsize=8)
def _keys(count: int) -> NDArray[np.uint32]:
    """The keys of the words of a row: the output of SHAKE-128, which no row depends on."""
    return np.frombuffer(hashlib.shake_128(b"chatmill row digest").digest(4 * count), dtype="<u4")


def _words(batch: Batch) -> NDArray[np.uint32]:
    """x, y and weights as one array of 32-bit words: -100 as such is larger than any token id."""
    return np.concatenate(
        (batch.x.astype("<u4"), batch.y.astype("<u4"), batch.weights.astype("<f4").view("<u4")), axis=1
    )


def _joined(digests: list[bytes]) -> Digests:
    return np.frombuffer(b"".join(digests), dtype="<u8").reshape(-1, 2)
