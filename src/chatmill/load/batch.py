"""Batches: the only place where x and y are shifted against each other.

`weight[i]` belongs to predicting token i, so y[i] is token i+1 and it is trained if token i+1 is.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

IGNORE_INDEX = -100
"""The target that no loss is computed for."""


def shift(
    ids: NDArray[np.int64],
    trained: NDArray[np.bool_],
    *,
    segments: NDArray[np.int64] | None = None,
    ignore_index: int = IGNORE_INDEX,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """x, y and the loss mask of y, each (rows, length - 1), from ids, mask and segments of (rows, length).

        ids       a b c d e        x  a b c d
        trained   0 0 1 1 1        y  - c - e      - is `ignore_index`
        segments  0 0 0 1 1

    The first token of a segment is never predicted from the segment before it, whatever its weight.
    """
    loss_mask = trained[:, 1:]
    if segments is not None:
        loss_mask = loss_mask & (segments[:, 1:] == segments[:, :-1])
    return ids[:, :-1], np.where(loss_mask, ids[:, 1:], ignore_index), loss_mask
