"""Compute the row digests of a batch for the audit log.

`sha256_rows` hashes only the data that determines a row, which is a third of the row's bytes. `blake2b_rows` hashes all
bytes; audit logs of earlier versions contain its digests. `_batch.c` computes the same digests as `sha256_rows` while
it writes the rows. Digests of rows, ranks or steps are combined by addition, modulo 2^64 in each column.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from chatmill.load.batch import IGNORE_INDEX, Batch
from chatmill.rows import Index

Digests = NDArray[np.uint64]
RowDigests = Callable[[Batch, Sequence[int], int], Digests]
"""Computes digests of shape (rows, 2) from a batch, its steps, and the position of its first row in a global batch."""
ONE = int(np.float32(1).view(np.uint32))
"""The bits of 1.0, the weight of most trained tokens."""


def sha256_rows(batch: Batch, steps: Sequence[int], first_row: int) -> Digests:
    """Hash each row together with its step, its position in the global batch, and its episodes.

    A trained position nearly always has the next token as its label, and weight 1. The hash covers the tokens, one bit
    for each position (whether the position has a label), and the exceptions: labels other than the next token, and
    weights other than 1.
    """
    tokens, labels = batch.x, batch.y
    has_label = labels != IGNORE_INDEX
    is_other = has_label.copy()
    is_other[:, :-1] &= labels[:, :-1] != tokens[:, 1:]
    bits = batch.weights.astype("<f4", copy=False).view("<u4")
    other_labels = _Sparse(is_other, labels)
    other_weights = _Sparse(bits != np.where(has_label, np.uint32(ONE), np.uint32(0)), bits)
    packed, ids = np.packbits(has_label, axis=1), tokens.astype("<u4")
    digests = []
    for row, place in enumerate(_places(len(ids), steps, first_row)):
        episodes = batch.episode_ids[row]
        parts = episodes[episodes >= 0], other_labels.of_row(row), other_weights.of_row(row)
        head = np.concatenate([[ids.shape[1], *(len(part) for part in parts)], place, *parts]).astype("<i8")
        digest = hashlib.sha256(head.data)
        digest.update(packed[row].data)
        digest.update(ids[row].data)
        digests.append(digest.digest()[:16])
    return _joined(digests)


class _Sparse:
    def __init__(self, chosen: NDArray[np.bool_], values: NDArray[np.generic]) -> None:
        rows, columns = np.nonzero(chosen)
        self._pairs = np.stack([columns, values[rows, columns].astype(np.int64)], axis=1)
        self._first = np.searchsorted(rows, np.arange(len(chosen) + 1)).tolist()

    def of_row(self, row: int) -> Index:
        """Return the (column, value) pairs of a row's exceptions as one flat array."""
        pairs: Index = self._pairs[self._first[row] : self._first[row + 1]]
        return pairs.ravel()


def blake2b_rows(batch: Batch, steps: Sequence[int], first_row: int) -> Digests:
    """Hash all bytes of each row, its episodes, its step, and its position in the global batch."""
    digests, places = [], _places(len(batch.x), steps, first_row)
    for row, episodes, place in zip(_words(batch), batch.episode_ids, places, strict=True):
        digest = hashlib.blake2b(row.data, digest_size=16)
        digest.update(np.concatenate([episodes[episodes >= 0], [-1], place]).astype("<i8").data)
        digests.append(digest.digest())
    return _joined(digests)


DIGESTS: dict[str | None, RowDigests] = {None: blake2b_rows, "sha256": sha256_rows}
"""Kinds of digests, by the value of `row_digest` in the `dataset_load` line of a log."""


def _places(rows: int, steps: Sequence[int], first_row: int) -> Index:
    """Return the step of each row and its position in the global batch, as an array of shape (rows, 2)."""
    places = np.empty((len(steps), rows // len(steps), 2), dtype=np.int64)
    places[:, :, 0] = np.array(steps)[:, np.newaxis]
    places[:, :, 1] = np.arange(first_row, first_row + places.shape[1])
    return places.reshape(-1, 2)


def _words(batch: Batch) -> NDArray[np.uint32]:
    """Return x, y and weights as one array of 32-bit words; the label -100 becomes 2^32 - 100."""
    return np.concatenate(
        (batch.x.astype("<u4"), batch.y.astype("<u4"), batch.weights.astype("<f4").view("<u4")), axis=1
    )


def _joined(digests: list[bytes]) -> Digests:
    return np.frombuffer(b"".join(digests), dtype="<u8").reshape(-1, 2)
