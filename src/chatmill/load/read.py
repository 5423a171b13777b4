"""Reading for batches: where episodes lie, their tokens, and the spans that say which of them are trained.

Episodes are numbered over all sources and shards, one after the other. What is read is sliced out of the mapped files
and joined as bytes: no token is touched in Python, and no index of tokens is made.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.errors import DataError
from chatmill.rows import OWN_ID, Index, Part, Table, as_bytes, offsets, ragged_index
from chatmill.store.layout import INDEX, MASK, ORIGINS, SPANS, STORED_SPAN, TARGETS, TOKENS
from chatmill.store.read import Episodes

Where = slice | Index
LARGE, PIECE = 1 << 26, 1 << 10
"""Bytes from which on a table is looked up in pieces, and records of a piece."""


NOT_RISING = "its segments do not follow one another"


class Places(NamedTuple):
    """Where episodes lie: the shard, counted over all sources, their number in it, and their tokens in it."""

    shard: Index
    number: Index
    start: Index
    length: Index

    def take(self, where: Where) -> Places:
        return Places(*(column[where] for column in self))


class Spans(NamedTuple):
    """The spans of some episodes, one episode after the other; none is empty."""

    length: Index
    weight: NDArray[np.float32]
    is_padding: NDArray[np.bool_]
    target: Index | None
    """-1 where tokens are predicted as they are; None if all of them are."""
    first: Index
    """The first span of each episode, and the number of all."""
    first_of_segment: Index
    """The first span of each segment, and the number of all."""


class ArraySlices(NamedTuple):
    """Slices of several arrays, to be copied one after the other: piece i is arrays[which[i]][start[i]:stop[i]]."""

    arrays: list[memoryview]
    which: list[int]
    start: list[int]
    stop: list[int]
    dtype: np.dtype[Any]

    def read(self, first: int = 0, last: int | None = None) -> NDArray[Any]:
        """Some of the pieces, joined."""
        arrays, chosen = self.arrays, slice(first, last)
        columns = zip(self.which[chosen], self.start[chosen], self.stop[chosen], strict=True)
        return np.frombuffer(b"".join([arrays[of][a:b] for of, a, b in columns]), dtype=self.dtype)


class EpisodeReader:
    """Reads the episodes of several splits by one numbering."""

    def __init__(self, parts: Sequence[Episodes]) -> None:
        self._shards = [(part, number) for part in parts for number in range(len(part.shards))]
        infos = [part.shards[number] for part, number in self._shards]
        self._first = offsets(np.array([info.num_episodes for info in infos], dtype=np.int64))
        self._num_tokens = np.array([info.num_tokens for info in infos], dtype=np.int64)
        self._records = [info.records for info in infos]
        # Tokens are joined as bytes.
        filled = [info for info in infos if info.num_tokens] or infos
        self.dtype = filled[0].dtype
        for info in filled:
            if info.dtype != self.dtype:
                raise DataError(
                    f"{info.folder}: has ids of {8 * info.dtype.itemsize} bits, and {filled[0].folder} of "
                    f"{8 * self.dtype.itemsize}; what is read together must have one width, write one of them again"
                )

    def __len__(self) -> int:
        return int(self._first[-1])

    def array(self, shard: int, name: str) -> NDArray[Any]:
        """One file of a shard, mapped."""
        part, number = self._shards[shard]
        return part.array(number, name)

    def locate(self, episodes: Index) -> Places:
        """Where these episodes lie; `DataError` if an index points beyond its tokens."""
        shard = np.searchsorted(self._first, episodes, side="right") - 1
        number = episodes - self._first[shard]
        entries = np.empty((len(episodes), 2), dtype=np.uint64)
        for of, where in _by_shard(shard):
            entries[where] = _records(self.array(of, INDEX), number[where]).view("<u8").reshape(-1, 2)
        start, length, room = entries[:, 0], entries[:, 1], self._num_tokens.view(np.uint64)[shard]
        wrong = (start > room) | (length > room - start)
        if wrong.any():
            raise self._fault(int(shard[wrong.argmax()]), INDEX, "points beyond the tokens")
        return Places(shard, number, start.view(np.int64), length.view(np.int64))

    def tokens(self, shard: Index, start: Index, stop: Index, *, pad: int, longest: int) -> ArraySlices:
        """Tokens of shards one after the other, yet to be copied; shard -1 is padding, from 0 to at most `longest`."""
        found = [of for of in _distinct(shard) if of >= 0]
        views = [self.array(of, TOKENS).data for of in found]
        views.append(np.full(longest, pad, dtype=self.dtype).data)
        # -1, the last of them, is the padding.
        which = np.where(shard < 0, -1, np.searchsorted(found, shard))
        return ArraySlices(views, which.tolist(), start.tolist(), stop.tolist(), self.dtype)

    def spans(self, places: Places, cut: Index) -> Spans:
        """The spans of these episodes without so many tokens of their beginnings.

        An episode of which only the mask is stored has a span for every run of it.
        """
        count = len(places.shard)
        begin, end = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
        segments: list[tuple[Index, Index, Index]] = []
        views = []
        which = np.zeros(count, dtype=np.int64)
        for at, (shard, where) in enumerate(_by_shard(places.shard)):
            here = places.take(where)
            if SPANS in self._records[shard]:
                table = self.array(shard, SPANS)
                begin[where], end[where], several = self._span_ranges(shard, here)
                if several is not None:
                    segments.append((np.arange(count)[where], *several))
            else:
                table, edges = self._of_mask(shard, here)
                begin[where], end[where] = edges[:-1], edges[1:]
            views.append(as_bytes(table).data)
            which[where] = at
        stored = ArraySlices(views, which.tolist(), begin.tolist(), end.tolist(), STORED_SPAN).read()
        first = offsets(end - begin)
        length = stored["length"].astype(np.int64)
        edges = offsets(length)[first]
        if not np.array_equal(edges[1:] - edges[:-1], places.length):
            wrong = int((edges[1:] - edges[:-1] != places.length).argmax())
            raise self._fault(int(places.shard[wrong]), SPANS, "spans do not tile the tokens of their rows")
        spans = Spans(
            length,
            stored["weight"].astype(np.float32),
            stored["part"] == Part.PAD,
            self._targets(places.shard, begin, end),
            first,
            _first_of_segment(first, segments),
        )
        return _without(spans, cut) if cut.any() else spans

    def _span_ranges(self, shard: int, here: Places) -> tuple[Index, Index, tuple[Index, Index] | None]:
        """The spans of these episodes in their shard; and, unless each has one segment, how many and their spans."""
        origins, most = self.array(shard, ORIGINS), self._records[shard][SPANS]
        if len(origins) == self._records[shard][INDEX] and (own := _own_segments(origins, here.number, most)):
            begin, end = own
            if ((begin < 0) | (end < begin) | (end > most)).any():
                raise self._fault(shard, ORIGINS, NOT_RISING)
            return begin, end, None
        low, high = _lower_bounds(origins, "row", here.number), _lower_bounds(origins, "row", here.number + 1)
        begin, end = _first_spans(origins, np.stack([low, high]), most)
        self._check_rising(shard, 0, begin, end, most)
        self._check_rising(shard, low, high)
        inside = _first_spans(origins, ragged_index(low, high - low), most)
        self._check_rising(shard, np.repeat(begin, high - low), inside, np.repeat(end, high - low))
        return begin, end, (high - low, inside - np.repeat(begin, high - low))

    def _check_rising(self, shard: int, *bounds: Index | int) -> None:
        """Of what an episode's segments say, none may come before the one given before it."""
        for low, high in pairwise(bounds):
            if np.any(np.less(high, low)):
                raise self._fault(shard, ORIGINS, NOT_RISING)

    def _of_mask(self, shard: int, here: Places) -> tuple[Table, Index]:
        """Spans of episodes of which no more is known than their mask, and where those of each begin."""
        edges = offsets(here.length)
        mask = np.ones(int(edges[-1]), dtype=np.bool_)
        if MASK in self._records[shard]:
            view, stop = [self.array(shard, MASK).data], here.start + here.length
            mask = ArraySlices(view, [0] * len(stop), here.start.tolist(), stop.tolist(), np.dtype("u1")).read() > 0
        begins = np.zeros(len(mask) + 1, dtype=np.bool_)
        np.not_equal(mask[1:], mask[:-1], out=begins[1:-1])
        begins[edges] = True
        start = np.flatnonzero(begins)
        table = np.zeros(len(start) - 1, dtype=STORED_SPAN)
        table["length"], table["weight"], table["part"] = np.diff(start), mask[start[:-1]], Part.CONTENT
        return table, np.searchsorted(start, edges)

    def _targets(self, shard: Index, begin: Index, end: Index) -> Index | None:
        """What the spans from `begin` to `end` of these shards are predicted as."""
        if not any(TARGETS in self._records[of] for of in _distinct(shard)):
            return None
        first = offsets(end - begin)
        target = np.full(first[-1], int(OWN_ID), dtype=np.int64)
        for of, where in _by_shard(shard):
            if TARGETS in self._records[of]:
                stored = self.array(of, TARGETS)
                index = ragged_index(begin[where], (end - begin)[where])
                nearest = _records(stored, _lower_bounds(stored, "span", index))
                named = nearest["span"] == index.astype(np.uint64)
                place = ragged_index(first[:-1][where], (end - begin)[where])
                target[place[named]] = nearest["target"][named]
        return target

    def _fault(self, shard: int, file: str, what: str) -> DataError:
        part, number = self._shards[shard]
        return part.damaged(number, file, what)


def _distinct(shard: Index) -> list[int]:
    """Every shard that occurs, rising."""
    return sorted(set(shard.tolist()))


def _by_shard(shard: Index) -> Iterator[tuple[int, Where]]:
    """Each shard that occurs, and where: a slice if it is everywhere, else places."""
    if not len(shard):
        return
    if bool((shard == shard[0]).all()):
        yield int(shard[0]), slice(None)
        return
    order = np.argsort(shard, kind="stable")
    ordered = shard[order]
    edges = np.flatnonzero(np.diff(ordered, prepend=-1, append=-1))
    for begin, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        yield int(ordered[begin]), order[begin:end]


def _own_segments(origins: Table, episodes: Index, most: int) -> tuple[Index, Index] | None:
    """Where the spans of these episodes begin and end if each is one segment, and that with its own number."""
    around = _records(origins, np.stack([episodes - 1, episodes, episodes + 1]))
    before, row, after = around["row"].astype(np.int64)
    last = row == len(origins) - 1
    if not bool(((row == episodes) & ((before < row) | (row == 0)) & ((after > row) | last)).all()):
        return None
    _, begin, end = around["first_span"].astype(np.int64)
    return begin, np.where(last, most, end)


def _records(table: Table, numbers: Index) -> Table:
    """Records of a mapped table, whole: an index on a field that is not aligned in the file is slow.

    Of a very large table no more is read than these, and no page of it stays in the memory of this process.
    """
    records, flat = as_bytes(table), numbers.ravel()
    mapping = getattr(table.base, "obj", table.base)
    if table.nbytes < LARGE or not isinstance(mapping, mmap.mmap):
        return records.take(flat, mode="clip").view(table.dtype).reshape(numbers.shape)
    found = np.empty(len(flat), dtype=records.dtype)
    mapping.madvise(mmap.MADV_RANDOM)
    for at in range(0, len(flat), PIECE):
        found[at : at + PIECE] = records.take(flat[at : at + PIECE], mode="clip")
        mapping.madvise(mmap.MADV_DONTNEED)
    return found.view(table.dtype).reshape(numbers.shape)


def _first_spans(origins: Table, segments: Index, end: int) -> Index:
    """The first span of each segment; `end` for the number after the last segment."""
    if not len(origins):
        return np.full(segments.shape, end, dtype=np.int64)
    found = _records(origins, segments)["first_span"]
    return np.where(segments < len(origins), found.astype(np.int64), end)


def _first_of_segment(first: Index, several: list[tuple[Index, Index, Index]]) -> Index:
    """The first span of each segment: that of its episode, but for those that are told to have several (or none)."""
    if not several:
        begins: Index = first[:-1][first[1:] > first[:-1]]
        return np.append(begins, first[-1])
    counts = (first[1:] > first[:-1]).astype(np.int64)
    for episodes, number, _ in several:
        counts[episodes] = number
    edges = offsets(counts)
    found = np.repeat(first[:-1], counts)
    for episodes, number, inside in several:
        found[ragged_index(edges[:-1][episodes], number)] += inside
    # A segment without a span begins where the next one does, and counts for nothing.
    return np.unique(np.append(found, first[-1]))


def _without(spans: Spans, cut: Index) -> Spans:
    """The same without so many tokens of each episode's beginning, and without spans and segments that this empties."""
    owner = np.repeat(np.arange(len(cut)), np.diff(spans.first))
    edges = offsets(spans.length)
    gone = edges[spans.first[:-1]] + cut
    length = np.minimum(spans.length, np.maximum(edges[1:] - gone[owner], 0))
    kept = length > 0
    new = offsets(kept)
    of_segment = np.unique(new[spans.first_of_segment])
    target = None if spans.target is None else spans.target[kept]
    return Spans(length[kept], spans.weight[kept], spans.is_padding[kept], target, new[spans.first], of_segment)


def _lower_bounds(table: Table, column: str, values: Index) -> Index:
    """For each value the first record whose rising column is not below it; looks at O(log n) records for each.

    `np.searchsorted` would copy the whole column first, because it lies strided in the mapped file.
    """
    low, high = np.zeros(len(values), dtype=np.int64), np.full(len(values), len(table), dtype=np.int64)
    while np.any(low < high):
        middle = (low + high) // 2
        below = (low < high) & (_records(table, middle)[column].astype(np.int64) < values)
        low, high = np.where(below, middle + 1, low), np.where(below, high, middle)
    return low
