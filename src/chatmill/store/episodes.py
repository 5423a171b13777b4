"""The episodes of a dataset split, read from memory-mapped files.

This module requires only numpy, so that datasets can be read where only the packages for training are installed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from chatmill.errors import DataError
from chatmill.remote.urls import Place
from chatmill.rows import ORIGIN, OWN_ID, SPAN, File, Ids, Index, Part, Role, Rows, Rule, Table, offsets, rows_from_mask
from chatmill.store import layout
from chatmill.store.folder import StoredFiles
from chatmill.store.layout import INDEX, MASK, ORIGINS, SEGMENT, SPANS, STORED_SPAN, TARGETS, TOKENS, Shard
from chatmill.store.mapped import MappedFile, check_mapped, reading
from chatmill.store.remote_files import RemoteFiles

LARGEST = np.array([len(Role) - 1, len(Part) - 1, len(Rule) - 1], dtype=np.uint8)
"""The largest valid role, part and rule of a span, after adding `NONE_TO_ZERO`."""
NONE_TO_ZERO = np.array([1, 0, 0], dtype=np.uint8)
"""Added to a span's role, part and rule bytes, so that `Role.NONE` (255) becomes the smallest role."""
MAPPED = 1 << 15
"""Maximum number of mapped files before unused maps are released; Linux allows 65,530 maps per process."""


class Episodes:
    """The episodes of one split, numbered from 0 over all its shards."""

    def __init__(self, stored: StoredFiles | RemoteFiles, shards: list[Shard], files: tuple[File, ...]) -> None:
        self.stored = stored
        self.shards = tuple(shards)
        self._eviction = 0
        self.files = files
        """The input files; origins refer to them by index."""
        self._first = offsets(np.array([shard.num_episodes for shard in shards], dtype=np.int64))
        self._firsts = self._first.tolist()
        self.unmap()

    def __len__(self) -> int:
        return int(self._firsts[-1])

    @cached_property
    def num_tokens(self) -> int:
        return sum(shard.num_tokens for shard in self.shards)

    @cached_property
    def lengths(self) -> Index:
        """Number of tokens in each episode; reads the whole index, so use `lengths_of` for a few episodes."""
        parts: list[Index] = [self.array(number, INDEX)["length"].view(np.int64) for number in range(len(self.shards))]
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def lengths_of(self, numbers: ArrayLike) -> Index:
        """Return the number of tokens in each of these episodes."""
        chosen = np.asarray(numbers, dtype=np.int64)
        if len(chosen) and not 0 <= chosen.min() <= chosen.max() < len(self):
            raise IndexError(f"episodes {chosen.min()} to {chosen.max()}; expected 0 to {len(self) - 1}")
        lengths = np.empty(len(chosen), dtype=np.int64)
        shard_of = np.searchsorted(self._first, chosen, side="right") - 1
        with reading():
            for shard in np.unique(shard_of).tolist():
                here, index = shard_of == shard, self.array(shard, INDEX)
                lengths[here] = index["length"][chosen[here] - self._firsts[shard]]
                check_mapped(index)
        return lengths

    def tokens(self, number: int) -> NDArray[np.unsignedinteger]:
        """Return the token ids of one episode as a view of the mapped file, with the stored dtype."""
        run = self._run(*self._find(number))
        return self.array(run.shard, TOKENS)[run.start : run.stop]

    def mask(self, number: int) -> NDArray[np.uint8]:
        """Return the loss mask of one episode: 1 for each trained token, and 0 for all other tokens."""
        return self._mask(self._run(*self._find(number)))

    def rows(self, numbers: ArrayLike) -> Rows:
        """Return the episodes with these indices, which can be in any order and can repeat."""
        chosen = np.asarray(numbers, dtype=np.int64)
        with reading():
            runs = list(self._runs(chosen.tolist()))
            try:
                ids = _joined([self.array(run.shard, TOKENS)[run.start : run.stop] for run in runs], np.uint32)
                if not self.shards or SPANS in self.shards[0].records:
                    return self._with_spans(ids, runs)
                mask = _joined([self._mask(run) for run in runs], np.uint8)
                return rows_from_mask(ids, mask, self.lengths_of(chosen))
            finally:
                self.check(run.shard for run in runs)

    def sweep(self, *, tokens: int = 1 << 22) -> Iterator[Rows]:
        """Yield all episodes in order, in chunks of at most `tokens` tokens; a longer episode is a separate chunk."""
        first = 0
        while first < len(self):
            lengths = self.lengths_of(np.arange(first, min(len(self), first + (1 << 16))))
            count = max(1, int(np.searchsorted(np.cumsum(lengths), tokens, side="right")))
            yield self.rows(np.arange(first, first + count))
            first += count

    def _mask(self, run: _EpisodeRun) -> NDArray[np.uint8]:
        if MASK not in self.shards[run.shard].records:
            return np.ones(run.stop - run.start, dtype=np.uint8)
        return self.array(run.shard, MASK)[run.start : run.stop]

    def _with_spans(self, ids: Ids, runs: list[_EpisodeRun]) -> Rows:
        origins: list[Any] = []
        stored: list[Any] = []
        targets: list[tuple[Table, int]] = []
        # For each run of episodes: its number of segments, and the offsets to add to its row and span indexes.
        shifts: list[tuple[int, int, int]] = []
        shards = [run.shard for run in runs]
        num_rows = num_spans = 0
        for run in runs:
            segments, first, stop = self._segments(run)
            origins.append(segments)
            stored.append(self.array(run.shard, SPANS)[first:stop])
            shifts.append((len(segments), num_rows - run.first, num_spans - first))
            if TARGETS in self.shards[run.shard].records:
                targets.append((_between(self.array(run.shard, TARGETS), first, stop), num_spans - first))
            num_rows += run.episodes
            num_spans += stop - first
        # Concatenate records as bytes, because numpy would cast them field by field.
        table = np.frombuffer(b"".join(origins), dtype=SEGMENT)
        raw = np.frombuffer(b"".join(stored), dtype=np.uint8).reshape(-1, STORED_SPAN.itemsize)
        spans = _copied(raw.reshape(-1).view(STORED_SPAN), SPAN)
        if int(spans["length"].sum(dtype=np.int64)) != len(ids):
            raise self.damaged(shards[0], SPANS, "spans do not exactly cover the tokens of their rows")
        if (raw[:, -3:] + NONE_TO_ZERO > LARGEST).any():
            name, wrong = next(
                (name, wrong) for name in layout.UNKNOWN if (wrong := layout.UNKNOWN[name][spans[name]]).any()
            )
            at = _run_of([len(part) for part in stored], wrong)
            raise self.damaged(shards[at], SPANS, f"a span has an undefined {name}")
        spans["target"] = OWN_ID
        for changed, shift in targets:
            spans["target"][changed["span"].astype(np.int64) + shift] = changed["target"]
        counts, row_shifts, span_shifts = np.array(shifts, dtype=np.int64).reshape(-1, 3).T
        row = table["row"].astype(np.int64) + np.repeat(row_shifts, counts)
        first_span = np.empty(len(table) + 1, dtype=np.int64)
        first_span[:-1] = table["first_span"].astype(np.int64) + np.repeat(span_shifts, counts)
        first_span[-1] = num_spans
        if len(row) and (row[0] < 0 or row[-1] >= num_rows or (row[1:] < row[:-1]).any()):
            wrong = (np.diff(row, prepend=0) < 0) | (row >= num_rows)
            what = "a segment is out of order"
            raise self.damaged(shards[_run_of(counts, wrong)], ORIGINS, what)
        if (wrong := first_span[1:] < first_span[:-1]).any():
            what = "the spans of a segment are out of order"
            raise self.damaged(shards[_run_of(counts, wrong)], ORIGINS, what)
        # NO_FILE is the largest integer, so adding 1 wraps it around to 0.
        if (wrong := table["file"] + np.uint32(1) > len(self.files)).any():
            right = (
                f"an index below {len(self.files)}" if self.files else "none, because the dataset names no input files"
            )
            what = f"a segment has an invalid file index; expected {right}"
            raise self.damaged(shards[_run_of(counts, wrong)], ORIGINS, what)
        first_segment = np.searchsorted(row, np.arange(num_rows + 1))
        return Rows(ids, spans, first_span, _copied(table, ORIGIN), first_segment, self.files)

    # Locate episodes in shards.

    def _find(self, number: int) -> tuple[int, int]:
        if not 0 <= number < self._firsts[-1]:
            raise IndexError(f"episode {number}; expected 0 to {self._firsts[-1] - 1}")
        shard = bisect_right(self._firsts, number) - 1
        return shard, number - self._firsts[shard]

    def _runs(self, chosen: list[int]) -> Iterator[_EpisodeRun]:
        """Split the selected episodes into runs of consecutive episodes whose tokens are contiguous in one shard."""
        at = 0
        while at < len(chosen):
            number = stop = chosen[at]
            while at < len(chosen) and chosen[at] == stop:
                at, stop = at + 1, stop + 1
            while number < stop:
                shard, episode = self._find(number)
                run = self._run(shard, episode, min(stop - number, self.shards[shard].num_episodes - episode))
                yield run
                number += run.episodes

    def _run(self, shard: int, episode: int, count: int = 1) -> _EpisodeRun:
        """Return up to `count` episodes from `episode` on, as long as their tokens are contiguous."""
        index, most = self.array(shard, INDEX), self.shards[shard].num_tokens
        start, length = index[episode].item()
        stop = start + length
        if stop <= most and count > 1:
            entries = index[episode : episode + count]
            ends = entries["start"] + entries["length"]
            gaps = np.flatnonzero((entries["start"][1:] != ends[:-1]) | (entries["length"][1:] > most))
            count = int(gaps[0]) + 1 if len(gaps) else count
            stop = stop if count == 1 else int(ends[count - 1])
        if stop > most:
            raise self.damaged(shard, INDEX, "an entry points past the last token")
        return _EpisodeRun(shard, episode, count, start, stop)

    def _segments(self, run: _EpisodeRun) -> tuple[Table, int, int]:
        """Return the segments of a run of episodes, and the start and stop of their spans."""
        origins, most = self.array(run.shard, ORIGINS), self.shards[run.shard].records[SPANS]
        row, first_span = origins["row"], origins["first_span"]
        begin = layout.lower_bound(row, run.first)
        end = layout.lower_bound(row, run.first + run.episodes, begin)
        if begin == end:
            return origins[:0], 0, 0
        first = int(first_span[begin])
        stop = int(first_span[end]) if end < len(origins) else most
        if not first <= stop <= most:
            raise self.damaged(run.shard, ORIGINS, "an entry points past the last span")
        return origins[begin:end], first, stop

    def damaged(self, shard: int, file: str, what: str) -> DataError:
        """Return the error to raise if a file has invalid content."""
        self.check([shard])
        place = self.shards[shard].folder / file
        return DataError(f"{place}: {what}; the file was changed; run chatmill verify {self.stored.path} --full")

    def check(self, shards: Iterable[int]) -> None:
        """Raise `DataError` if a file of these shards has changed since it was mapped; call this after reading."""
        for number in set(shards):
            for file in self._mapped.get(number, ()):
                file.check()

    def drop_evicted(self) -> None:
        """Unmap all files if the cache has evicted one of them, because a mapped file still takes up disk space."""
        if (eviction := self.stored.last_eviction()) != self._eviction:
            self._eviction = eviction
            if any(file.is_removed() for files in self._mapped.values() for file in files):
                self.unmap()

    # Mapped files.

    def unmap(self) -> None:
        """Unmap all files; they are mapped again on the next read."""
        self.array: Callable[[int, str], NDArray[Any]] = lru_cache(maxsize=None)(self._map)
        """Function that returns a memory-mapped file of a shard: `array(shard, name)`."""
        self._mapped: dict[int, list[MappedFile]] = {}

    def _map(self, number: int, name: str) -> NDArray[Any]:
        path, dtype, start = self._place(number, name)
        if MappedFile.live >= MAPPED:
            self.unmap()
        try:
            file = self.stored.map(path)
        except MemoryError:
            # The process has run out of address space or memory maps.
            self.unmap()
            try:
                file = self.stored.map(path)
            except MemoryError:
                raise DataError(
                    f"{path}: cannot be mapped (out of memory); raise ulimit -v or vm.max_map_count"
                ) from None
        self._mapped.setdefault(number, []).append(file)
        return layout.as_records(file, dtype, self.shards[number].records[name], start)

    def _place(self, number: int, name: str) -> tuple[Place, np.dtype[Any], int]:
        """Return the file that stores the records `name` of a shard, their dtype, and their offset in bytes."""
        shard = self.shards[number]
        return shard.folder / name, layout.record_dtypes(shard.dtype)[name], 0

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle, without the memory maps and the cached lengths."""
        return {name: value for name, value in vars(self).items() if name not in ("array", "lengths", "_mapped")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.unmap()


class _EpisodeRun(NamedTuple):
    """Consecutive episodes of a shard, and the start and stop of their tokens."""

    shard: int
    first: int
    episodes: int
    start: int
    stop: int


def _joined(parts: list[NDArray[Any]], dtype: DTypeLike) -> NDArray[Any]:
    return np.concatenate(parts, dtype=dtype) if parts else np.empty(0, dtype=dtype)


def _run_of(counts: ArrayLike, wrong: NDArray[np.bool_]) -> int:
    """Return the index of the run that contains the first invalid record; `counts` is the number of records per run."""
    return int(np.searchsorted(np.cumsum(counts), wrong.argmax(), side="right"))


def _copied(table: Table, dtype: np.dtype[Any]) -> Table:
    """Copy a structured array to another dtype; fields that the array does not have are left uninitialized."""
    out = np.empty(len(table), dtype=dtype)
    for name in dtype.names or ():
        if name in (table.dtype.names or ()):
            out[name] = table[name]
    return out


def _between(targets: Table, first: int, stop: int) -> Table:
    """Return the targets of the spans in the range [first, stop)."""
    begin = layout.lower_bound(targets["span"], first)
    return targets[begin : layout.lower_bound(targets["span"], stop, begin)]
