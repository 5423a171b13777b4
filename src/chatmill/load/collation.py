"""A batch of rows that lie in memory, such as those a run makes itself; shifted where all batches are."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.load.batch import Batch, shift
from chatmill.rows import Rows


def collate(rows: Rows, *, pad_token_id: int, length: int | None = None) -> Batch:
    """All rows as one batch, each filled up to `length` tokens, or to the longest of them; padding stands behind."""
    lengths = rows.lengths
    there = np.arange(length or int(lengths.max(initial=2))) < lengths[:, None]
    padding = np.diff(rows.first_segment)[:, None]

    def spread(values: NDArray[Any], fill: Any) -> NDArray[Any]:
        out = np.empty(there.shape, dtype=values.dtype)
        out[...] = fill
        out[there] = values
        return out

    weights = spread(rows.weights(), 0)
    segments = spread(rows.segments().astype(np.int32), padding)
    x, _, loss_mask = shift(spread(rows.ids.astype(np.int64), pad_token_id), weights > 0, segments=segments)
    _, y, _ = shift(spread(rows.targets(), pad_token_id), weights > 0, segments=segments)
    behind = np.arange(there.shape[1]) - lengths[:, None]
    positions = np.where(there, spread(rows.positions(), 0), behind).astype(np.int32)
    episode_ids = np.where(np.arange(max(1, int(padding.max(initial=0)))) < padding, np.arange(len(rows))[:, None], -1)
    return Batch(
        x,
        y,
        loss_mask,
        np.where(loss_mask, weights[:, 1:], np.float32(0)),
        positions[:, :-1],
        segments[:, :-1],
        episode_ids.astype(np.int64),
    )
