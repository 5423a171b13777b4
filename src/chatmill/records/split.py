"""The validation split of the primer specification: by position in a seeded shuffle."""

from __future__ import annotations

import math
import random
from typing import NamedTuple

from chatmill.errors import UsageError


class Split(NamedTuple):
    """Indices of records, each in exactly one of the two lists."""

    train: list[int]
    val: list[int]


def shuffle_split(count: int, val_frac: float, *, seed: int) -> Split:
    """Shuffle records 0 to count-1 by `seed`: the first floor(count * val_frac) validate, all others train.

    5 records, 0.4, shuffled to 3 1 0 4 2  ->  val 3 1, train 0 4 2
    The product is computed in floating point: 0.29 of 100 is 28.999… and gives 28.
    """
    if not 0 <= val_frac < 1:
        raise UsageError(f"a share of {val_frac} for validation cannot be; expected one from 0 to below 1")
    if count < 0 or seed < 0:
        # Python's generator reads -1 as 1, so that two seeds would give one order.
        raise UsageError(f"{count} records with seed {seed} cannot be split; expected whole numbers from 0 on")
    order = list(range(count))
    random.Random(seed).shuffle(order)
    stop = math.floor(count * val_frac)
    return Split(train=order[stop:], val=order[:stop])
