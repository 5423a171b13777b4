"""Packing: rows that share a longer row, chosen by best fit decreasing.

`pack_lengths` decides over lengths alone; `pack` carries the decision out on `Rows`. Padding what is left
of a row is the loader's work.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.errors import DataError
from chatmill.fit.gather import GatherPlan, gather
from chatmill.rows import Index, Rows, offsets, ragged_index

WINDOW = 2**20
"""Rows that one plan looks at."""

Seed = int | tuple[int, ...]
"""Several numbers are one seed, such as (seed, epoch, window)."""


@dataclass(frozen=True, eq=False)
class Bins:
    """Which rows stand together: bin b holds the rows order[first[b]:first[b + 1]], by rising number."""

    order: Index
    first: Index

    def __len__(self) -> int:
        return len(self.first) - 1


def pack_lengths(lengths: NDArray[Any] | Sequence[int], capacity: int, *, seed: Seed | None = None) -> Bins:
    """Assign rows to bins of at most `capacity` tokens by best fit decreasing, exactly.

    [3] [2] [4], capacity 5  ->  [4] [3 2]        order 2 0 1, first 0 1 3

    The longest row goes first, of equals the one with the lower number, each into the fullest bin that has
    room for it, of equally full bins the one opened first, else into a new bin. Bins stand in the order in
    which they were opened; a seed permutes them and changes nothing else.
    A row longer than the capacity is an error: truncate or block it first.
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
    # In the narrowest type: numpy counts 16 bits where it has to compare 64.
    longest_first = np.argsort((capacity - length).astype(np.min_scalar_type(capacity)), kind="stable")
    bin_of = np.empty(len(length), dtype=np.int64)
    bin_of[longest_first] = np.repeat(ragged_index(first_bin, bins), np.repeat(each, bins))
    del longest_first
    if seed is not None:
        bin_of = _permutation(seed, int(bin_of.max()) + 1)[bin_of]
    first = offsets(np.bincount(bin_of))
    return Bins(_grouped(bin_of), first)


def pack(rows: Rows, capacity: int, *, seed: Seed | None = None, window: int = WINDOW) -> Rows:
    """Rows of at most `capacity` tokens that hold every given row once, whole, each segment still its own.

    aaa | bb | cccc, capacity 5  ->  cccc | aaa bb        positions 0123 | 012 01, segments 0000 | 000 11

    Each `window` consecutive rows are packed by themselves, so that the plan of any number of rows stays
    small; their bins are permuted by (seed, number of the window).
    """
    if window < 1:
        raise DataError(f"a window of {window} rows; it must hold at least one")
    lengths = rows.lengths
    _check(lengths, capacity)
    if not len(rows):
        return rows
    order, sizes = [], []
    for number, start in enumerate(range(0, len(rows), window)):
        bins = pack_lengths(lengths[start : start + window], capacity, seed=_extended(seed, number))
        order.append(bins.order + start)
        sizes.append(np.diff(bins.first))
    chosen = np.concatenate(order)
    segment_count = np.diff(rows.first_segment)[chosen]
    segments = ragged_index(rows.first_segment[chosen], segment_count)
    plan = GatherPlan(
        rows.segment_start[segments],
        rows.segment_start[segments + 1],
        np.arange(len(segments) + 1, dtype=np.int64),
        segments,
        offsets(segment_count)[offsets(np.concatenate(sizes))],
    )
    return gather(rows, plan)


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
    """Place runs of (length, how many), longest first; give steps of (first bin, how many bins, rows for each).

    A bin that is the best for one row is still the best for the next of that length until it has no room:
    it has become fuller, and no other was as full. So bins that are equally full take the same number of
    rows, and one step fills a range of them:

        bins 7 to 9 with room for 5, six rows of 2  ->  (7, 3, 2)        room for 1 in each is left
    """
    steps = []
    room: list[int] = []  # rising: every amount of room that some bin still has
    having: dict[int, list[tuple[int, int]]] = {}  # for each of them a heap of ranges of bins
    opened = 0

    def leave(space: int, start: int, stop: int) -> None:
        if space < shortest or start == stop:
            return
        if space not in having:
            having[space] = []
            insort(room, space)
        heappush(having[space], (start, stop))

    for length, count in runs:
        while count:
            best = bisect_left(room, length)
            if best < len(room):
                space = room[best]
                start, stop = heappop(having[space])
                if not having[space]:
                    del having[space], room[best]
            else:
                space = capacity
                start = opened
                stop = opened = opened + -(-count // (capacity // length))
            each = space // length
            full = start + min(stop - start, count // each)
            if full > start:
                steps.append((start, full - start, each))
                leave(space - each * length, start, full)
                count -= (full - start) * each
            if count and full < stop:
                # Fewer rows than the next bin could take: it takes them all.
                steps.append((full, 1, count))
                leave(space - count * length, full, full + 1)
                full, count = full + 1, 0
            leave(space, full, stop)
    return steps


def _grouped(group: Index) -> Index:
    """The numbers 0, 1, 2 … sorted by their group, rising within each, in its place.

    A stable argsort, several times as fast, and without memory of its own.
    """
    group *= len(group)
    group += np.arange(len(group), dtype=np.int64)
    group.sort()
    group %= len(group)
    return group


def _permutation(seed: Seed, count: int) -> Index:
    """A permutation that depends on these numbers alone.

    Only the raw stream of PCG64 is promised to stay the same in every version of numpy, so it is sorted here.
    """
    if min(seed if isinstance(seed, tuple) else (seed,)) < 0:
        raise DataError(f"the seed is {seed}; it must be 0 or more")
    return np.argsort(np.random.PCG64(seed).random_raw(count), kind="stable")


def _extended(seed: Seed | None, number: int) -> Seed | None:
    if seed is None:
        return None
    return (*seed, number) if isinstance(seed, tuple) else (seed, number)
