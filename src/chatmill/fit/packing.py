"""Pack several rows into one with the best-fit decreasing algorithm.

`pack_lengths` assigns lengths to bins; `pack` packs `Rows`. The loader pads each packed row.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.errors import DataError
from chatmill.rows import Index, Rows, offsets, ragged_index

WINDOW = 2**20
"""Default number of rows in a window; each window is packed separately."""

Seed = int | tuple[int, ...]
"""One integer, or a tuple of integers that form one seed, such as (seed, epoch, window)."""


@dataclass(frozen=True, eq=False)
class Bins:
    """The assignment of rows to bins: bin b contains the rows order[first[b]:first[b + 1]], in ascending order."""

    order: Index
    first: Index

    def __len__(self) -> int:
        return len(self.first) - 1


def pack_lengths(lengths: NDArray[Any] | Sequence[int], capacity: int, *, seed: Seed | None = None) -> Bins:
    """Assign rows to bins of at most `capacity` tokens by exact best-fit decreasing.

    [3] [2] [4], capacity 5  ->  [4] [3 2]        order 2 0 1, first 0 1 3

    Rows are placed longest first; rows of equal length keep their order. Each row goes into the fullest bin with enough
    space (the oldest of equally full bins) or into a new bin. Bins are returned in the order in which they were opened.
    A seed permutes the bins but not their contents. A row longer than the capacity raises `DataError`; truncate it or
    split it into blocks first.

    >>> from chatmill.fit import pack_lengths
    >>> bins = pack_lengths([3, 2, 4], 5)
    >>> bins.order.tolist(), bins.first.tolist()
    ([2, 0, 1], [0, 1, 3])
    """
    length = np.asarray(lengths)
    if length.dtype.kind != "i":
        length = length.astype(np.int64)
    _check(length, capacity)
    if not len(length):
        return Bins(np.empty(0, dtype=np.int64), np.zeros(1, dtype=np.int64))
    value, count = np.unique(length, return_counts=True)
    steps = _best_fit(zip(value[::-1].tolist(), count[::-1].tolist(), strict=True), capacity, int(value[0]))
    first_bin, bins, each = np.array(steps, dtype=np.int64).T
    # Use the narrowest type, because numpy radix-sorts 16-bit integers but not 64-bit ones.
    longest_first = np.argsort((capacity - length).astype(np.min_scalar_type(capacity)), kind="stable")
    bin_of = np.empty(len(length), dtype=np.int64)
    bin_of[longest_first] = np.repeat(ragged_index(first_bin, bins), np.repeat(each, bins))
    del longest_first
    if seed is not None:
        bin_of = _permutation(seed, int(bin_of.max()) + 1)[bin_of]
    first = offsets(np.bincount(bin_of))
    return Bins(_grouped(bin_of), first)


def pack(rows: Rows, capacity: int, *, seed: Seed | None = None, window: int = WINDOW) -> Rows:
    """Pack rows into rows of at most `capacity` tokens. Rows are not split, and their segments stay separate.

    aaa | bb | cccc, capacity 5  ->  cccc | aaa bb        positions 0123 | 012 01, segments 0000 | 000 11

    Rows are packed in groups of `window` consecutive rows, which limits memory. The index of a window is part of the
    seed for the permutation of its bins.
    """
    if window < 1:
        raise DataError(f"window is {window}; expected at least 1")
    lengths = rows.lengths
    _check(lengths, capacity)
    if not len(rows):
        return rows
    order, sizes = [], []
    seeds = seed if isinstance(seed, tuple) else (seed,)
    for number, start in enumerate(range(0, len(rows), window)):
        window_seed = None if seed is None else (*seeds, number)
        bins = pack_lengths(lengths[start : start + window], capacity, seed=window_seed)
        order.append(bins.order + start)
        sizes.append(np.diff(bins.first))
    moved = rows.take(np.concatenate(order))
    return replace(moved, first_segment=moved.first_segment[offsets(np.concatenate(sizes))])


def _check(lengths: Index, capacity: int) -> None:
    if capacity < 1:
        raise DataError(f"capacity is {capacity}; expected at least 1")
    wrong = np.flatnonzero((lengths < 1) | (lengths > capacity))
    if not len(wrong):
        return
    row, length = wrong[0], lengths[wrong[0]]
    if length < 1:
        raise DataError(f"row {row} has {length} tokens, but packing requires at least 1; drop the row first")
    what = f"row {row} has {length} tokens, more than the capacity of {capacity}"
    raise DataError(f"{what}; truncate it or split it into blocks first")


def _best_fit(runs: Iterable[tuple[int, int]], capacity: int, shortest: int) -> list[tuple[int, int, int]]:
    """Place rows in bins, longest rows first. Each run is a group of rows of equal length, given as (length, number of
    rows).

    Each step in the result is a tuple (first bin, number of bins, rows per bin). After a row is placed, its bin is also
    the best fit for the next row of the same length, until the bin has no space left for such a row. Equally full bins
    receive the same number of rows of one length, so one step fills a range of bins:

        bins 7 to 9 with space for 5, six rows of 2  ->  (7, 3, 2)        space for 1 remains in each
    """
    steps = []
    free: list[int] = []  # Distinct amounts of free space in bins, in ascending order.
    ranges: dict[int, list[tuple[int, int]]] = {}  # A heap of bin ranges for each amount of free space.
    opened = 0

    def put_back(space: int, start: int, stop: int) -> None:
        if space < shortest or start == stop:
            return
        if space not in ranges:
            ranges[space] = []
            insort(free, space)
        heappush(ranges[space], (start, stop))

    for length, count in runs:
        while count:
            best = bisect_left(free, length)
            if best < len(free):
                space = free[best]
                start, stop = heappop(ranges[space])
                if not ranges[space]:
                    del ranges[space], free[best]
            else:
                space = capacity
                start = opened
                stop = opened = opened + -(-count // (capacity // length))
            each = space // length
            full = start + min(stop - start, count // each)
            if full > start:
                steps.append((start, full - start, each))
                put_back(space - each * length, start, full)
                count -= (full - start) * each
            if count and full < stop:
                # The next bin has space for all remaining rows.
                steps.append((full, 1, count))
                put_back(space - count * length, full, full + 1)
                full, count = full + 1, 0
            put_back(space, full, stop)
    return steps


def _grouped(group: Index) -> Index:
    """Return the stable argsort of `group`, several times faster than `np.argsort`; overwrites `group`."""
    group *= len(group)
    group += np.arange(len(group), dtype=np.int64)
    group.sort()
    group %= len(group)
    return group


def _permutation(seed: Seed, count: int) -> Index:
    """Return a permutation that does not depend on the numpy version: numpy never changes the raw PCG64 stream."""
    if min(seed if isinstance(seed, tuple) else (seed,)) < 0:
        raise DataError(f"seed is {seed}; expected at least 0")
    return np.argsort(np.random.PCG64(seed).random_raw(count), kind="stable")
