"""A batch: the arrays that a training step takes, and the digests that an audit log keeps of its rows."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from operator import add
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

IGNORE_INDEX = -100
"""The label of a position without loss, as in `torch.nn.functional.cross_entropy`."""


class Batch(NamedTuple):
    """Rows to train on: numpy arrays or torch tensors, all (rows, block_size) except the last.

    Each conversation of a row is a segment; the row's padding is one more.

    >>> import numpy as np
    >>> from chatmill.rows import rows_from_mask
    >>> rows = rows_from_mask(np.array([5, 6, 7, 8], dtype=np.uint32), np.array([0, 0, 1, 1]), [4])
    >>> batch = chatmill.collate(rows, pad_token_id=0)
    >>> batch.x.tolist(), batch.y.tolist()
    ([[5, 6, 7]], [[-100, 7, 8]])
    """

    x: Any
    """int64: input tokens."""
    y: Any
    """int64: the label of each token of x, which is the token after it; -100 where no loss is computed."""
    loss_mask: Any
    """bool: where a loss is computed."""
    weights: Any
    """float32: the weight of each label in the loss; 0 where none is computed."""
    positions: Any
    """int32: 0, 1, 2 … from the first token of each segment."""
    segments: Any
    """int32: 0, 1, 2 … for the segments of a row, padding included."""
    episode_ids: Any
    """int64 (rows, most segments of a row): the global number of each segment's episode; -1 for none."""

    def each(self, change: Callable[[Any], Any]) -> Batch:
        """Apply a function to every array."""
        return Batch(*map(change, self))

    def to_torch(self, device: Any = None) -> Batch:
        """The batch as torch tensors, on `device` if given."""
        import torch

        return self.each(lambda array: torch.from_numpy(array).to(device))

    def split(self, parts: int) -> list[Batch]:
        """Cut the batch into `parts` batches of equally many rows, as gradient accumulation takes them."""
        size, remainder = divmod(len(self.x), parts)
        if remainder:
            raise ValueError(f"{len(self.x)} rows in {parts} parts; expected a divisor")
        return [Batch(*(array[at * size : (at + 1) * size] for array in self)) for at in range(parts)]


class BatchCounts(NamedTuple):
    """Counts over the rows of one or several batches."""

    rows: int = 0
    """Rows that are not all padding."""
    tokens: int = 0
    """Tokens in them, without padding."""
    trained: int = 0
    """Positions of y with a loss."""
    cut_episodes: int = 0
    """Episodes longer than a row, of which only the last tokens are kept."""
    cut_tokens: int = 0

    def plus(self, other: BatchCounts) -> BatchCounts:
        return BatchCounts(*map(add, self, other))


def segments_from_end(episode_ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Number each segment within its episode, counted from the end: truncation removes an episode's first segments.

    7 7 7 4 9 9 -1  ->  -3 -2 -1 -1 -2 -1 -1
    """
    reversed_ids = episode_ids[:, ::-1]
    columns = np.arange(reversed_ids.shape[1])
    begins = np.ones(reversed_ids.shape, dtype=np.bool_)
    np.not_equal(reversed_ids[:, 1:], reversed_ids[:, :-1], out=begins[:, 1:])
    last = np.maximum.accumulate(np.where(begins, columns, 0), axis=1)
    return (last - columns - 1)[:, ::-1]


def row_digests(batch: Batch, *, step: int, first_row: int) -> NDArray[np.uint64]:
    """Hash each row with its step, its place in the global batch and its episodes; (rows, 2).

    Digests of several rows, ranks or steps are combined by adding them, modulo 2^64 in each column.
    """
    # -100 as uint32 is larger than any token id, so 32 bits hold every label.
    parts = (batch.x.astype("<u4"), batch.y.astype("<u4"), batch.weights.astype("<f4").view("<u4"))
    digests = np.empty((len(batch.x), 2), dtype=np.uint64)
    for number, (row, episodes) in enumerate(zip(np.concatenate(parts, axis=1), batch.episode_ids, strict=True)):
        digest = hashlib.blake2b(row.data, digest_size=16)
        digest.update(np.append(episodes[episodes >= 0], (-1, step, first_row + number)).astype("<i8").data)
        digests[number] = np.frombuffer(digest.digest(), dtype="<u8")
    return digests
