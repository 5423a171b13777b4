"""Packing: several rows share a longer one, chosen by best fit decreasing.

`pack_lengths` plans over lengths alone; `pack` applies the plan to `Rows`. The loader pads what is left of a row.
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
"""Rows that are packed together."""

Seed = int | tuple[int, ...]
"""A number, or several that make one seed, such as (seed, epoch, window)."""


@dataclass(frozen=True, eq=False)
class Bins:
    """Which rows share a bin: bin b holds the rows order[first[b]:first[b + 1]], in ascending order."""

    order: Index
    first: Index

    def __len__(self) -> int:
        return len(self.first) - 1


def pack_lengths(lengths: NDArray[Any] | Sequence[int], capacity: int, *, seed: Seed | None = None) -> Bins:
    """Assign rows to bins of at most `capacity` tokens by best fit decreasing, exactly.

    [3] [2] [4], capacity 5  ->  [4] [3 2]        order 2 0 1, first 0 1 3

    Rows are placed longest first, ties by number, each into the fullest bin with room for it, ties by age, or into a
    new bin. Bins are in the order in which they were opened; a seed permutes them and changes nothing else.
    A row longer than the capacity is an error: truncate or block it first.

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
    # In the narrowest type: numpy radix-sorts 16 bits, and compares 64.
    longest_first = np.argsort((capacity - length).astype(np.min_scalar_type(capacity)), kind="stable")
    bin_of = np.empty(len(length), dtype=np.int64)
    bin_of[longest_first] = np.repeat(ragged_index(first_bin, bins), np.repeat(each, bins))
    del longest_first
    if seed is not None:
        bin_of = _permutation(seed, int(bin_of.max()) + 1)[bin_of]
    first = offsets(np.bincount(bin_of))
    return Bins(_grouped(bin_of), first)


def pack(rows: Rows, capacity: int, *, seed: Seed | None = None, window: int = WINDOW) -> Rows:
    """Pack rows into rows of at most `capacity` tokens. Each row stays whole, and its segments stay apart.

    aaa | bb | cccc, capacity 5  ->  cccc | aaa bb        positions 0123 | 012 01, segments 0000 | 000 11

    Each `window` consecutive rows are packed on their own, which bounds the memory of the plan; their bins are permuted
    by (seed, number of the window).
    """
    if window < 1:
        raise DataError(f"a window of {window} rows; it must hold at least one")
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
        raise DataError(f"the capacity is {capacity} tokens; it must be at least 1")
    wrong = np.flatnonzero((lengths < 1) | (lengths > capacity))
    if not len(wrong):
        return
    row, length = wrong[0], lengths[wrong[0]]
    if length < 1:
        raise DataError(f"row {row} has {length} tokens; a row to pack holds at least 1, drop it first")
    raise DataError(f"row {row} has {length} tokens, more than the capacity of {capacity}; truncate or block it first")


def _best_fit(runs: Iterable[tuple[int, int]], capacity: int, shortest: int) -> list[tuple[int, int, int]]:
    """Place runs of (length, count), longest first; returns steps of (first bin, number of bins, rows for each).

    The best bin for one row is the best for the next of that length too, until it has no room: it has become fuller,
    and no other was as full. So equally full bins take the same number of rows, and one step fills a range of them:

        bins 7 to 9 with room for 5, six rows of 2  ->  (7, 3, 2)        room for 1 in each is left
    """
    steps = []
    free: list[int] = []  # ascending: every amount of space that some bin still has
    ranges: dict[int, list[tuple[int, int]]] = {}  # for each of them a heap of ranges of bins
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
                # Fewer rows than the next bin could take: it takes them all.
                steps.append((full, 1, count))
                put_back(space - count * length, full, full + 1)
                full, count = full + 1, 0
            put_back(space, full, stop)
    return steps


def _grouped(group: Index) -> Index:
    """A stable argsort, in place: several times as fast, and without memory of its own."""
    group *= len(group)
    group += np.arange(len(group), dtype=np.int64)
    group.sort()
    group %= len(group)
    return group


def _permutation(seed: Seed, count: int) -> Index:
    """A permutation that is the same in every version of numpy, which guarantees only the raw stream of PCG64."""
    if min(seed if isinstance(seed, tuple) else (seed,)) < 0:
        raise DataError(f"the seed is {seed}; it must be 0 or more")
    return np.argsort(np.random.PCG64(seed).random_raw(count), kind="stable")
