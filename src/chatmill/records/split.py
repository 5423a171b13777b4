"""Split records into train and validation, by a hash of each record or by a seeded shuffle."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.errors import UsageError


class Split(NamedTuple):
    """Indices of the training and validation records; each record is in exactly one of the lists."""

    train: list[int]
    val: list[int]


def shuffle_split(count: int, val_frac: float, *, seed: int) -> Split:
    """Shuffle records 0 to count-1 with `seed`; the first floor(count * val_frac) are used for validation.

    5 records, 0.4, shuffled to 3 1 0 4 2  ->  val 3 1, train 0 4 2
    The product is a float: 0.29 of 100 is 28.999… and gives 28.
    """
    if not 0 <= val_frac < 1:
        raise UsageError(f"the validation fraction is {val_frac}; expected a number of at least 0 and below 1")
    if count < 0 or seed < 0:
        # Python's generator treats the seed -1 like 1.
        raise UsageError(f"cannot split {count} records with seed {seed}; expected non-negative numbers")
    order = list(range(count))
    random.Random(seed).shuffle(order)
    stop = math.floor(count * val_frac)
    return Split(train=order[stop:], val=order[:stop])


def hash_places(keys: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Map the hash of each record to a number in [0, 1).

    Records with a number below the validation fraction belong to the validation split.
    """
    # Keep 53 bits, which a float represents exactly.
    return np.asarray((keys >> np.uint64(11)) * 2.0**-53, dtype=np.float64)


def smallest_hash_share(first: float, last: float) -> float | None:
    """Return the smallest validation fraction, rounded up, that leaves no split empty, or None if there is none.

    `first` and `last` are the smallest and the largest number that `hash_places` returns for the records.
    """
    return _rounded_up(first, lambda share: first < share <= last)


def smallest_shuffle_share(has_rows: NDArray[np.bool_], *, seed: int) -> float | None:
    """Like `smallest_hash_share`, but for `shuffle_split`; `has_rows` is True for each record that has rows."""
    count = len(has_rows)
    order = shuffle_split(count, 0.0, seed=seed).train
    size = next((at + 1 for at, record in enumerate(order) if has_rows[record]), 0)
    if has_rows.sum() < 2:
        return None
    return _rounded_up(size / count, lambda share: math.floor(count * share) == size)


def _rounded_up(number: float, fits: Callable[[float], bool]) -> float | None:
    """Round a number up to three significant digits, or to more digits if `fits(result)` is false.

    Return None if `fits` is false for every result.
    """
    first = 2 - math.floor(math.log10(number)) if number > 0 else 3
    for digits in range(first, first + 15):
        scale: int = 10**digits
        whole = math.ceil(number * scale)
        for share in (whole / scale, (whole + 1) / scale):
            if 0 < share < 1 and fits(share):
                return share
    return None
