"""Reading for batches: where episodes lie, and their tokens, weights, targets and segments, copied slice by slice.

Episodes are numbered over all sources and shards, one after the other. Memory is that of what is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.errors import DataError
from chatmill.rows import OWN_ID, Index, Part, Table, as_bytes, offsets, ragged_index
from chatmill.store.layout import INDEX, MASK, ORIGINS, SPANS, TARGETS, TOKENS
from chatmill.store.read import Episodes


class Places(NamedTuple):
    """Where episodes lie: the shard, counted over all sources, and the tokens in it."""

    shard: Index
    local: Index
    """The episode's number in its shard."""
    start: Index
    length: Index


class Spans(NamedTuple):
    """The spans of some episodes, one episode after the other."""

    length: Index
    weight: NDArray[np.float32]
    is_padding: NDArray[np.bool_]
    target: Index
    """-1 where tokens are predicted as they are."""
    begins_segment: NDArray[np.bool_]
    first: Index
    """Where the spans of each episode begin, and where the last ones end."""


class Reader:
    """Reads the episodes of several splits by one numbering."""

    def __init__(self, parts: Sequence[Episodes]) -> None:
        self.shards = [(part, number) for part in parts for number in range(len(part.shards))]
        infos = [part.shards[number] for part, number in self.shards]
        self._first = offsets(np.array([info.num_episodes for info in infos], dtype=np.int64))
        self._tokens = np.array([info.num_tokens for info in infos], dtype=np.int64)
        self.has_spans = [SPANS in info.records for info in infos]
        self.has_targets = any(TARGETS in info.records for info in infos)
        self.one_segment = [info.records.get(ORIGINS, info.num_episodes) == info.num_episodes for info in infos]

    def __len__(self) -> int:
        return int(self._first[-1])

    def locate(self, episodes: Index) -> Places:
        """Where these episodes lie; `DataError` if the index points beyond the tokens."""
        shard = np.searchsorted(self._first, episodes, side="right") - 1
        local = episodes - self._first[shard]
        entries = np.empty((len(episodes), 2), dtype=np.int64)
        for number, where in _groups(shard):
            entries[where] = self.array(number, INDEX).view("<i8").reshape(-1, 2)[local[where]]
        start, length = entries[:, 0], entries[:, 1]
        room = self._tokens[shard]
        wrong = (start < 0) | (length < 0) | (start > room) | (length > room - start)
        if wrong.any():
            part, number = self.shards[int(shard[wrong.argmax()])]
            raise DataError(f"{part.shards[number].folder}: the index points beyond the tokens; run chatmill verify")
        return Places(shard, local, start, length)

    def array(self, shard: int, name: str) -> NDArray[Any]:
        """One file of a shard, mapped."""
        part, number = self.shards[shard]
        return part.array(number, name)

    def copy(self, name: str, places: Places, start: Index, length: Index, to: Index, out: NDArray[Any]) -> None:
        """Copy so much of each episode, from `start` in its shard, to its place in a flat array."""
        shards = places.shard.tolist()
        file: NDArray[Any] | None = None
        last = -1
        for shard, a, n, b in zip(shards, start.tolist(), length.tolist(), to.tolist(), strict=True):
            if shard != last:
                file, last = self.array(shard, name), shard
            assert file is not None
            out[b : b + n] = file[a : a + n]

    def spans(self, places: Places) -> Spans:
        """The span tables of these episodes. An episode of a shard that has none is made of its mask."""
        count = len(places.shard)
        parts: list[tuple[Index, Spans]] = []
        for shard, where in _groups(places.shard):
            numbers = np.arange(count)[where]
            read = self._stored if self.has_spans[shard] else self._from_mask
            parts.append((numbers, read(shard, *(column[where] for column in places[1:]))))
        if len(parts) == 1:
            return parts[0][1]
        return _interleaved(parts, count)

    def _stored(self, shard: int, local: Index, start: Index, length: Index) -> Spans:
        origins, table = self.array(shard, ORIGINS), self.array(shard, SPANS)
        if self.one_segment[shard] and bool(np.all(length > 0)):
            # As many segments as episodes, and none without: each has its own.
            begin, end = local, local + 1
        else:
            row = origins["row"]
            begin, end = _lower_bounds(row, local), _lower_bounds(row, local + 1)
        segments = ragged_index(begin, end - begin)
        edges = np.append(segments, end[-1:] if len(end) else 0)
        first_span = _first_span(origins, len(table))
        span_begin, span_end = first_span(segments), first_span(segments + 1)
        counts = span_end - span_begin
        if np.any(counts < 0) or np.any(span_end > len(table)):
            raise self._untiled(shard)
        del edges
        index = ragged_index(span_begin, counts)
        chosen = as_bytes(table).take(index).view(table.dtype)
        begins = np.zeros(len(index), dtype=np.bool_)
        begins[offsets(counts)[:-1][counts > 0]] = True
        first = offsets(counts)[offsets(end - begin)]
        spans = Spans(
            chosen["length"].astype(np.int64),
            chosen["weight"].astype(np.float32),
            chosen["part"] == Part.PAD,
            self._targets(shard, index),
            begins,
            first,
        )
        if not np.array_equal(offsets(spans.length)[first], offsets(length)):
            raise self._untiled(shard)
        return spans

    def _targets(self, shard: int, index: Index) -> Index:
        target = np.full(len(index), int(OWN_ID), dtype=np.int64)
        part, number = self.shards[shard]
        if TARGETS in part.shards[number].records and len(index):
            stored = self.array(shard, TARGETS)
            at = _lower_bounds(stored["span"], index)
            found = at < len(stored)
            found[found] = stored["span"][at[found]] == index[found]
            target[found] = stored["target"][at[found]]
        return target

    def _from_mask(self, shard: int, local: Index, start: Index, length: Index) -> Spans:
        part, number = self.shards[shard]
        if MASK in part.shards[number].records:
            mask = np.empty(int(length.sum()), dtype=np.bool_)
            places = Places(np.full(len(local), shard), local, start, length)
            self.copy(MASK, places, start, length, offsets(length)[:-1], mask)
        else:
            mask = np.ones(int(length.sum()), dtype=np.bool_)
        row_start = offsets(length)
        begins = np.zeros(len(mask) + 1, dtype=np.bool_)
        begins[1:-1] = mask[1:] != mask[:-1]
        begins[row_start] = True
        at = np.flatnonzero(begins)
        first = np.searchsorted(at, row_start)
        opens = np.zeros(len(at) - 1, dtype=np.bool_)
        opens[first[:-1][length > 0]] = True
        none = np.zeros(len(at) - 1, dtype=np.bool_)
        return Spans(
            np.diff(at),
            mask[at[:-1]].astype(np.float32),
            none,
            np.full(len(at) - 1, int(OWN_ID), dtype=np.int64),
            opens,
            first,
        )

    def _untiled(self, shard: int) -> DataError:
        part, number = self.shards[shard]
        return DataError(
            f"{part.shards[number].folder}: spans do not tile the tokens of their rows; run chatmill verify"
        )


def _groups(shard: Index) -> Iterator[tuple[int, Any]]:
    """Each shard that occurs, and where: a slice if it is all of them, else their numbers."""
    if not len(shard):
        return
    if shard[0] == shard[-1] and (shard == shard[0]).all():
        yield int(shard[0]), slice(None)
        return
    by_shard = np.argsort(shard, kind="stable")
    ordered = shard[by_shard]
    begins = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1]))
    for begin, end in zip(begins.tolist(), [*begins[1:].tolist(), len(shard)], strict=True):
        yield int(ordered[begin]), by_shard[begin:end]


def _interleaved(parts: list[tuple[Index, Spans]], count: int) -> Spans:
    """Spans that were read shard by shard, in the order of the episodes."""
    counts = np.empty(count, dtype=np.int64)
    begin = np.empty(count, dtype=np.int64)
    at = 0
    for numbers, spans in parts:
        counts[numbers] = np.diff(spans.first)
        begin[numbers] = spans.first[:-1] + at
        at += len(spans.length)
    index = ragged_index(begin, counts)
    columns = [np.concatenate([spans[column] for _, spans in parts])[index] for column in range(5)]
    return Spans(*columns, offsets(counts))


def _first_span(origins: Table, end: int) -> Callable[[Index], Index]:
    """The first span of each segment; `end` for the number after the last segment."""

    def first(segments: Index) -> Index:
        if not len(origins):
            return np.full(len(segments), end, dtype=np.int64)
        known = origins["first_span"][np.minimum(segments, len(origins) - 1)].astype(np.int64)
        return np.where(segments < len(origins), known, end)

    return first


def _lower_bounds(column: NDArray[Any], values: Index) -> Index:
    """For each value the first place of a rising column that is not below it; looks at O(log n) places for each.

    `np.searchsorted` would copy the whole column first, because it lies strided in the mapped file.
    """
    low = np.zeros(len(values), dtype=np.int64)
    high = np.full(len(values), len(column), dtype=np.int64)
    while np.any(open_ := low < high):
        middle = (low + high) // 2
        below = column[np.minimum(middle, len(column) - 1)].astype(np.int64) < values
        low = np.where(open_ & below, middle + 1, low)
        high = np.where(open_ & ~below, middle, high)
    return low
