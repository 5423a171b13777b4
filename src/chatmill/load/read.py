"""Read the locations, tokens and spans of many episodes at once.

Episodes are numbered over all sources and shards. For speed, slices of memory-mapped files are concatenated as bytes.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.errors import DataError
from chatmill.rows import OWN_ID, Index, Part, Table, as_bytes, mask_runs, offsets, ragged_index
from chatmill.store.episodes import Episodes
from chatmill.store.layout import INDEX, MASK, ORIGINS, SPANS, STORED_SPAN, TARGETS, TOKENS
from chatmill.store.mapped import check_mapped, mapped_file, reading

Selection = slice | Index
LARGE_TABLE, RECORDS_PER_LOOKUP = 1 << 26, 1 << 10
"""Records of a mapped table with at least `LARGE_TABLE` bytes are copied `RECORDS_PER_LOOKUP` at a time."""


class Places(NamedTuple):
    """For each episode: its shard, its index in the shard, its first token in the shard, and its length in tokens.
    Shards are numbered over all sources.
    """

    shard: Index
    number: Index
    start: Index
    length: Index


class EpisodeSpans(NamedTuple):
    """The spans of several episodes, concatenated; no span is empty."""

    length: Index
    weight: NDArray[np.float32]
    is_padding: NDArray[np.bool_]
    target: Index | None
    """The target token id of each span, or -1 if the targets are the tokens of the span; None if no span has a target
    id.
    """
    first: Index
    """The first span of each episode, followed by the number of spans."""
    segment_first: Index
    """The first span of each segment, followed by the number of spans."""
    first_segment: Index
    """The first segment of each episode, followed by the number of segments."""
    answer_cut: NDArray[np.bool_]
    """Whether each episode was truncated inside an answer."""


class StoredSpans(NamedTuple):
    """The locations of the spans of several episodes: episode i has the spans tables[which[i]][begin[i]:end[i]]."""

    tables: list[Table]
    which: Index
    begin: Index
    end: Index
    borders: Index
    """The first span of each segment, as an index into the episode's table."""
    first_border: Index
    """The index of each episode's first entry in `borders`, followed by the number of entries."""


class LocatedEpisodes(NamedTuple):
    """The locations of the tokens of several episodes: episode i is arrays[which[i]][start[i]:stop[i]]."""

    arrays: list[NDArray[Any]]
    which: Index
    start: Index
    stop: Index
    cut: Index
    """Number of tokens that are truncated at the start of each episode."""
    dtype: np.dtype[Any]


class StoredEpisodes(NamedTuple):
    """The locations of the tokens and spans of several episodes, and the shards that contain the episodes."""

    tokens: LocatedEpisodes
    shard: Index
    shards: list[int]
    spans: StoredSpans


class ArraySlices(NamedTuple):
    """Slices of several arrays to be concatenated: slice i is arrays[which[i]][start[i]:stop[i]]."""

    arrays: list[memoryview]
    which: list[int]
    start: list[int]
    stop: list[int]
    dtype: np.dtype[Any]

    def read(self, first: int = 0, last: int | None = None) -> NDArray[Any]:
        arrays, chosen = self.arrays, slice(first, last)
        columns = zip(self.which[chosen], self.start[chosen], self.stop[chosen], strict=True)
        return np.frombuffer(b"".join([arrays[of][a:b] for of, a, b in columns]), dtype=self.dtype)


class EpisodeReader:
    """Reads the episodes of one split of several sources, numbered consecutively."""

    def __init__(self, parts: Sequence[Episodes]) -> None:
        self._parts = tuple(parts)
        self._shards = [(part, number) for part in parts for number in range(len(part.shards))]
        infos = [part.shards[number] for part, number in self._shards]
        self._first = offsets(np.array([info.num_episodes for info in infos], dtype=np.int64))
        self._num_tokens = np.array([info.num_tokens for info in infos], dtype=np.int64)
        self._records = [info.records for info in infos]
        # All tokens must have the same width, because they are concatenated as bytes.
        filled = [info for info in infos if info.num_tokens] or infos
        self.dtype = filled[0].dtype
        for info in filled:
            if info.dtype != self.dtype:
                raise DataError(
                    f"{info.folder}: has token ids of {8 * info.dtype.itemsize} bits, but {filled[0].folder} has "
                    f"token ids of {8 * self.dtype.itemsize} bits; rebuild one of them"
                )

    @property
    def shards(self) -> list[tuple[Episodes, int]]:
        """All shards of all sources, each as an `Episodes` object and the index of the shard in that object."""
        return self._shards

    def shard_of(self, episodes: Index) -> Index:
        return np.searchsorted(self._first, episodes, side="right") - 1

    def array(self, shard: int, name: str) -> NDArray[Any]:
        part, number = self._shards[shard]
        return part.array(number, name)

    def locate(self, episodes: Index) -> Places:
        """Return the locations of the given episodes. Raise `DataError` if an entry in the index file points past the
        last token.
        """
        shard = self.shard_of(episodes)
        number = episodes - self._first[shard]
        entries = np.empty((len(episodes), 2), dtype=np.uint64)
        with reading():
            for of, where in _by_shard(shard):
                index = self.array(of, INDEX)
                entries[where] = _records(index, number[where]).view("<u8").reshape(-1, 2)
                check_mapped(index)
        start, length, room = entries[:, 0], entries[:, 1], self._num_tokens.view(np.uint64)[shard]
        if (wrong := (start > room) | (length > room - start)).any():
            raise self._damaged(int(shard[wrong.argmax()]), INDEX, "an entry points past the last token")
        return Places(shard, number, start.view(np.int64), length.view(np.int64))

    def last_tokens(self, episodes: Index, capacity: int) -> StoredEpisodes:
        """Return the locations of the tokens and spans of the given episodes. If an episode is longer than `capacity`,
        only its last `capacity` tokens are included.
        """
        for part in self._parts:
            part.drop_evicted()
        places = self.locate(episodes)
        cut = np.maximum(places.length - capacity, 0)
        start, stop = places.start + cut, places.start + places.length
        shards = sorted(set(places.shard.tolist()))
        arrays, which = [self.array(shard, TOKENS) for shard in shards], np.searchsorted(shards, places.shard)
        with reading():
            try:
                spans = self._stored_spans(places)
            finally:
                self.check(shards)
        located = LocatedEpisodes(arrays, which, start, stop, cut, self.dtype)
        return StoredEpisodes(located, places.shard, shards, spans)

    def has_targets(self, shards: Iterable[int]) -> bool:
        """Return whether one of the given shards has a file of target token ids."""
        return any(TARGETS in self._records[shard] for shard in shards)

    def check(self, shards: Iterable[int]) -> None:
        """Raise `DataError` if a file of the given shards has changed since it was memory-mapped."""
        for shard in shards:
            part, number = self._shards[shard]
            part.check([number])

    def spans(self, episodes: StoredEpisodes) -> EpisodeSpans:
        """Return the spans of the given episodes, without truncated tokens."""
        tables, which, begin, end, borders, first_border = episodes.spans
        views = [as_bytes(table).data for table in tables]
        with reading():
            try:
                records = ArraySlices(views, which.tolist(), begin.tolist(), end.tolist(), STORED_SPAN).read()
                target = self._targets(episodes.shard, begin, end)
            finally:
                self.check(episodes.shards)
        first = offsets(end - begin)
        length = records["length"].astype(np.int64)
        cut = episodes.tokens.cut
        if (wrong := np.diff(offsets(length)[first]) != cut + episodes.tokens.stop - episodes.tokens.start).any():
            raise self.untiled(episodes, int(wrong.argmax()))
        segment_first = borders + np.repeat(first[:-1] - begin, np.diff(first_border))
        # Omit a segment without spans, which starts at the same position as the next segment.
        segment_first = np.unique(np.append(segment_first, first[-1]))
        first_segment = np.searchsorted(segment_first, first)
        weight, is_padding = records["weight"].astype(np.float32), records["part"] == Part.PAD
        whole = np.zeros(len(begin), dtype=bool)
        spans = EpisodeSpans(length, weight, is_padding, target, first, segment_first, first_segment, whole)
        return _without(spans, cut) if cut.any() else spans

    def untiled(self, episodes: StoredEpisodes, which: int) -> DataError:
        """Return the error for an episode whose spans do not cover its tokens exactly."""
        return self._damaged(int(episodes.shard[which]), SPANS, "spans do not exactly cover the tokens of their rows")

    def _stored_spans(self, places: Places) -> StoredSpans:
        """Return the locations of all spans. An episode that is stored with a mask but without spans gets one span for
        each run of equal mask values.
        """
        count = len(places.shard)
        begin, end, which = np.zeros((3, count), dtype=np.int64)
        several: list[tuple[Selection, Index, Index]] = []
        tables: list[Table] = []
        for number, (shard, where) in enumerate(_by_shard(places.shard)):
            here = Places(*(column[where] for column in places))
            if SPANS in self._records[shard]:
                table = self.array(shard, SPANS)
                begin[where], end[where], segments = self._span_ranges(shard, here)
                if segments is not None:
                    several.append((where, *segments))
            else:
                table, edges = self._spans_of_mask(shard, here)
                begin[where], end[where] = edges[:-1], edges[1:]
            tables.append(table)
            which[where] = number
        return StoredSpans(tables, which, begin, end, *_borders(begin, several))

    def _span_ranges(self, shard: int, here: Places) -> tuple[Index, Index, tuple[Index, Index] | None]:
        """Return the range of spans of each episode in the shard and, if episodes have several segments, the number of
        segments and their first spans.
        """
        origins, most = self.array(shard, ORIGINS), self._records[shard][SPANS]
        if len(origins) == self._records[shard][INDEX] and (own := _own_segments(origins, here.number, most)):
            begin, end = own
            self._check_rising(shard, 0, begin, end, most)
            return begin, end, None
        low, high = _lower_bounds(origins, "row", here.number), _lower_bounds(origins, "row", here.number + 1)
        begin, end = _first_spans(origins, np.stack([low, high]), most)
        self._check_rising(shard, 0, begin, end, most)
        self._check_rising(shard, low, high)
        inside = _first_spans(origins, ragged_index(low, high - low), most)
        self._check_rising(shard, np.repeat(begin, high - low), inside, np.repeat(end, high - low))
        return begin, end, (high - low, inside)

    def _check_rising(self, shard: int, *bounds: Index | int) -> None:
        for low, high in pairwise(bounds):
            if np.any(np.less(high, low)):
                raise self._damaged(shard, ORIGINS, "segments are out of order")

    def _spans_of_mask(self, shard: int, here: Places) -> tuple[Table, Index]:
        """Return the spans of episodes that are stored with a mask but without spans, and the first span of each
        episode.
        """
        edges = offsets(here.length)
        mask = np.ones(int(edges[-1]), dtype=np.bool_)
        if MASK in self._records[shard]:
            view, stop = [self.array(shard, MASK).data], here.start + here.length
            mask = ArraySlices(view, [0] * len(stop), here.start.tolist(), stop.tolist(), np.dtype("u1")).read() > 0
        start = mask_runs(mask, edges)
        table = np.zeros(len(start) - 1, dtype=STORED_SPAN)
        table["length"], table["weight"], table["part"] = np.diff(start), mask[start[:-1]], Part.CONTENT
        return table, np.searchsorted(start, edges)

    def _targets(self, shard: Index, begin: Index, end: Index) -> Index | None:
        """Return the target ids of the spans `begin` to `end` of each episode, or None if no shard has a file of
        targets.
        """
        if not self.has_targets(set(shard.tolist())):
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

    def _damaged(self, shard: int, file: str, what: str) -> DataError:
        part, number = self._shards[shard]
        return part.damaged(number, file, what)


def _by_shard(shard: Index) -> Iterator[tuple[int, Selection]]:
    """Yield each distinct shard number in `shard` with its positions in the array, or with a full slice if all numbers
    are equal.
    """
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
    """Return the range of spans of each episode if every given episode i consists only of segment i, otherwise None."""
    around = _records(origins, np.stack([episodes - 1, episodes, episodes + 1]))
    before, row, after = around["row"].astype(np.int64)
    last = row == len(origins) - 1
    if not bool(((row == episodes) & ((before < row) | (row == 0)) & ((after > row) | last)).all()):
        return None
    _, begin, end = around["first_span"].astype(np.int64)
    return begin, np.where(last, most, end)


def _records(table: Table, numbers: Index) -> Table:
    """Copy whole records of a mapped table, because indexing the unaligned fields of a mapped file is slow.

    If the table is large, release its memory pages after copying.
    """
    records, flat = as_bytes(table), numbers.ravel()
    file = mapped_file(table)
    if table.nbytes < LARGE_TABLE or file is None:
        return records.take(flat, mode="clip").view(table.dtype).reshape(numbers.shape)
    copied = np.empty(len(flat), dtype=records.dtype)
    file.advise(mmap.MADV_RANDOM)
    for at in range(0, len(flat), RECORDS_PER_LOOKUP):
        some = slice(at, at + RECORDS_PER_LOOKUP)
        copied[some] = records.take(flat[some], mode="clip")
        file.advise(mmap.MADV_DONTNEED)
    return copied.view(table.dtype).reshape(numbers.shape)


def _first_spans(origins: Table, segments: Index, end: int) -> Index:
    """Return the index of the first span of each segment; return `end` for a segment index past the last segment."""
    if not len(origins):
        return np.full(segments.shape, end, dtype=np.int64)
    return np.where(segments < len(origins), _records(origins, segments)["first_span"].astype(np.int64), end)


def _borders(begin: Index, several: list[tuple[Selection, Index, Index]]) -> tuple[Index, Index]:
    """Return the index of the first span of each segment and the index of the first segment of each episode.

    `several` contains, for each group of episodes, the number of segments of each episode and the first span of each
    segment.
    """
    if not several:
        return begin, np.arange(len(begin) + 1)
    counts = np.ones(len(begin), dtype=np.int64)
    for episodes, number, _ in several:
        counts[episodes] = number
    edges = offsets(counts)
    borders = np.repeat(begin, counts)
    for episodes, number, first in several:
        borders[ragged_index(edges[:-1][episodes], number)] = first
    return borders, edges


def _without(spans: EpisodeSpans, cut: Index) -> EpisodeSpans:
    """Remove the first `cut` tokens of each episode, and the spans and segments that become empty."""
    edges = offsets(spans.length)
    begins = edges[spans.first[:-1]] + cut
    start = np.repeat(begins, np.diff(spans.first))
    length = np.minimum(spans.length, np.maximum(edges[1:] - start, 0))
    kept = length > 0
    new = offsets(kept)
    first, segment_first = new[spans.first], np.unique(new[spans.segment_first])
    weight, is_padding = spans.weight[kept], spans.is_padding[kept]
    target = None if spans.target is None else spans.target[kept]
    first_segment = np.searchsorted(segment_first, first)
    # Compare the spans on both sides of the truncation; truncating between two segments does not split an answer.
    is_trained, last = spans.weight > 0, len(spans.weight) - 1
    left, right = (np.clip(np.searchsorted(edges, begins - back, side="right") - 1, 0, last) for back in (1, 0))
    answer_cut = (cut > 0) & is_trained[left] & is_trained[right] & ~np.isin(begins, edges[spans.segment_first])
    return EpisodeSpans(length[kept], weight, is_padding, target, first, segment_first, first_segment, answer_cut)


def _lower_bounds(table: Table, column: str, values: Index) -> Index:
    """Return, for each value, the index of the first record with at least this value in a sorted column, by binary
    search.

    `np.searchsorted` would first copy the whole column, because columns of a mapped file are strided.
    """
    low, high = np.zeros(len(values), dtype=np.int64), np.full(len(values), len(table), dtype=np.int64)
    while np.any(low < high):
        middle = (low + high) // 2
        below = (low < high) & (_records(table, middle)[column].astype(np.int64) < values)
        low, high = np.where(below, middle + 1, low), np.where(below, high, middle)
    return low
