"""Open a dataset and read rows of it: memory-mapped, with work at opening that grows with shards, not episodes.

numpy is all this needs, so that a training image can read what another machine prepared.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from chatmill.errors import DataError
from chatmill.rows import (
    LONG,
    NO_FILE,
    NO_MESSAGE,
    ORIGIN,
    OWN_ID,
    SPAN,
    File,
    Index,
    Part,
    Role,
    Rows,
    Rule,
    Table,
    offsets,
    ragged_index,
)
from chatmill.store.layout import (
    INDEX,
    MASK,
    METADATA,
    ORIGINS,
    SPANS,
    SPLITS,
    STORED_SPAN,
    TARGETS,
    TOKENIZER_STATE,
    TOKENS,
    record_dtypes,
    shard_name,
)
from chatmill.store.metadata import Metadata, is_ours, read_metadata, size_faults
from chatmill.store.shard import Shard, map_file
from chatmill.store.stranger import stranger_splits

MAPPED = 256
"""Files of a split that are mapped at once. Each holds a file descriptor, of which a process often has 1,024."""
FEW = 16
"""Up to so many numbers are looked up one by one, more of them all together."""


def open_dataset(path: str | Path) -> Dataset:
    """A dataset as it lies on disk; `DataError` if a file is missing or has not the size it should have.

    Datasets of the episode specification that other programs wrote open too, without spans and origins.
    """
    folder = Path(path)
    metadata = stored_metadata(folder)
    if metadata is None:
        strangers = stranger_splits(folder)
        return Dataset(folder, None, {name: Episodes(folder, shards, ()) for name, shards in strangers.items()})
    for fault in size_faults(folder, metadata):
        raise DataError(fault)
    return Dataset(folder, metadata, {name: _episodes(folder, metadata, name) for name in metadata.splits})


def is_dataset(path: str | Path) -> bool:
    """Whether a folder holds episodes, by the documented signs."""
    train = Path(path) / "train"
    return (train / INDEX).is_file() or any(train.glob(f"shard_*/{INDEX}"))


def stored_metadata(folder: Path) -> Metadata | None:
    """The metadata of a dataset of ours; None if another program wrote it, and `DataError` if it is damaged."""
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; expected a dataset")
    path = folder / METADATA
    if path.is_file() and is_ours(path.read_bytes()):
        return read_metadata(folder)
    if any((folder / split / shard_name(0) / SPANS).exists() for split in SPLITS):
        return read_metadata(folder)
    return None


def _episodes(folder: Path, metadata: Metadata, split: str) -> Episodes:
    info = metadata.splits[split]
    sizes = record_dtypes(metadata.dtype)
    shards = [
        Shard(
            folder / split / shard_name(number),
            shard.num_episodes,
            shard.num_tokens,
            metadata.dtype,
            {name: file.size // sizes[name].itemsize for name, file in shard.files.items()},
        )
        for number, shard in enumerate(info.shards)
    ]
    return Episodes(folder, shards, info.files)


@dataclass(frozen=True)
class Dataset:
    """An open dataset: `dataset["train"]` are the episodes of a split."""

    path: Path
    metadata: Metadata | None
    """None if another program wrote it."""
    _splits: Mapping[str, Episodes]

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(self._splits)

    @property
    def sha256(self) -> str | None:
        """The hash that stands for all bytes of the dataset; None if another program wrote it."""
        return None if self.metadata is None else self.metadata.sha256

    def __getitem__(self, split: str) -> Episodes:
        if split not in self._splits:
            raise DataError(f"{self.path}: has no split {split}; it has {', '.join(self._splits) or 'none'}")
        return self._splits[split]

    def __contains__(self, split: str) -> bool:
        return split in self._splits

    def tokenizer_state(self) -> Any:
        """What `tokenizer_state.json` holds."""
        path = self.path / TOKENIZER_STATE
        try:
            return json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: cannot be read ({error}); the tokenizer of this dataset is unknown") from None


class Episodes:
    """The rows of one split, numbered from 0 over all its shards."""

    def __init__(self, root: Path, shards: list[Shard], files: tuple[File, ...]) -> None:
        self._root = root
        self._identity = _identity(root)
        self.shards = tuple(shards)
        self.files = files
        """What the file numbers of origins mean."""
        self._first = offsets(np.array([shard.num_episodes for shard in shards], dtype=np.int64))
        self._firsts = self._first.tolist()
        self._forget()

    def __len__(self) -> int:
        return int(self._firsts[-1])

    @cached_property
    def num_tokens(self) -> int:
        return sum(shard.num_tokens for shard in self.shards)

    @cached_property
    def lengths(self) -> Index:
        """Tokens in each episode. Reads the whole index: `lengths_of` is for a few of them."""
        parts: list[Index] = [self.array(number, INDEX)["length"].view(np.int64) for number in range(len(self.shards))]
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def lengths_of(self, numbers: ArrayLike) -> Index:
        """Tokens in each of these episodes."""
        chosen = self._chosen(numbers)
        lengths = np.empty(len(chosen), dtype=np.int64)
        for shard, where, local in self._by_shard(chosen):
            lengths[where] = self.array(shard, INDEX)["length"][local]
        return lengths

    def tokens(self, number: int) -> NDArray[np.unsignedinteger]:
        """The ids of one episode: a view of the mapped file, in the type it is stored in."""
        shard, start, stop = self._find(number)
        return self.array(shard, TOKENS)[start:stop]

    def mask(self, number: int) -> NDArray[np.uint8]:
        """1 where a token of this episode is trained: a view of the mapped file."""
        shard, start, stop = self._find(number)
        if MASK not in self.shards[shard].records:
            return np.ones(stop - start, dtype=np.uint8)
        return self.array(shard, MASK)[start:stop]

    def rows(self, numbers: ArrayLike) -> Rows:
        """These episodes in this order, whole: ids, spans, segments and origins. A number may come twice."""
        chosen = self._chosen(numbers)
        groups = list(self._by_shard(chosen))
        token = _Ranges(len(chosen))
        for shard, where, local in groups:
            entries = self.array(shard, INDEX)[local]
            token.set(where, entries["start"].view(np.int64), entries["length"].view(np.int64))
            self._check(shard, token.start[where], token.count[where], self.shards[shard].num_tokens, "tokens")
        ids = np.empty(token.total, dtype=np.uint32)
        for shard, where, _ in groups:
            token.copy(ids, self.array(shard, TOKENS), where)
        if all(SPANS in self.shards[shard].records for shard, _, _ in groups):
            return self._with_spans(ids, token.count, groups)
        mask = np.ones(token.total, dtype=np.uint8)
        for shard, where, _ in groups:
            if MASK in self.shards[shard].records:
                token.copy(mask, self.array(shard, MASK), where)
        return rows_from_mask(ids, mask, token.count)

    def sweep(self, *, tokens: int = 1 << 22) -> Iterator[Rows]:
        """All episodes in order, as many at a time as hold about so many tokens (one at least)."""
        for number in range(len(self.shards)):
            first, stop = self._firsts[number], self._firsts[number + 1]
            while first < stop:
                lengths = self.lengths_of(np.arange(first, min(stop, first + (1 << 16))))
                count = max(1, int(np.searchsorted(np.cumsum(lengths), tokens, side="right")))
                yield self.rows(np.arange(first, first + count))
                first += count

    def _with_spans(self, ids: NDArray[np.uint32], length: Index, groups: list[_Group]) -> Rows:
        segment, span = _Ranges(len(length)), _Ranges(len(length))
        for shard, where, local in groups:
            origins = self.array(shard, ORIGINS)
            first = lower_bound(origins["row"].view(np.int64), local)
            stop = lower_bound(origins["row"].view(np.int64), local + 1)
            ends = np.where(stop > first, first_spans(origins, stop, self.shards[shard].records[SPANS]), 0)
            begins = np.where(stop > first, first_spans(origins, first, 0), 0)
            self._check(shard, begins, ends - begins, self.shards[shard].records[SPANS], "spans")
            segment.set(where, first, stop - first)
            span.set(where, begins, ends - begins)
        stored = np.empty(span.total, dtype=STORED_SPAN)
        spans = np.empty(span.total, dtype=SPAN)
        spans["target"] = OWN_ID
        origins_ = np.empty(segment.total, dtype=ORIGIN)
        first_span = np.empty(segment.total + 1, dtype=np.int64)
        first_span[-1] = span.total
        for shard, where, _ in groups:
            span.copy(stored, self.array(shard, SPANS), where)
            table = self.array(shard, ORIGINS)
            at, source = segment.index(where)
            chosen = table[source]
            for name in ORIGIN.names or ():
                origins_[name][at] = chosen[name]
            # A segment begins as far into its row's spans here as it does on disk.
            moved = np.repeat(span.at[where] - span.start[where], segment.count[where])
            first_span[at] = chosen["first_span"].view(np.int64) + moved
            if TARGETS in self.shards[shard].records:
                self._set_targets(spans["target"], self.array(shard, TARGETS), span, where)
        for name in STORED_SPAN.names or ():
            spans[name] = stored[name]
        if int(spans["length"].sum(dtype=np.int64)) != len(ids):
            raise DataError(f"{self._root}: spans do not tile the tokens of their rows; run chatmill verify")
        return Rows(ids, spans, first_span, origins_, offsets(segment.count), self.files)

    def _set_targets(self, target: NDArray[np.int32], table: Table, span: _Ranges, where: _Where) -> None:
        numbers = table["span"].view(np.int64)
        start = span.start[where]
        first = lower_bound(numbers, start)
        count = lower_bound(numbers, start + span.count[where]) - first
        found = ragged_index(first, count)
        moved = np.repeat(span.at[where] - start, count)
        target[numbers[found] + moved] = table["target"][found]

    # Where an episode lies.

    def _find(self, number: int) -> tuple[int, int, int]:
        if not 0 <= number < self._firsts[-1]:
            raise IndexError(f"episode {number} of {self._firsts[-1]}")
        shard = bisect_right(self._firsts, number) - 1
        start, length = self.array(shard, INDEX)[number - self._firsts[shard]].item()
        if start + length > self.shards[shard].num_tokens:
            raise self._beyond(shard, "tokens")
        return shard, start, start + length

    def _chosen(self, numbers: ArrayLike) -> Index:
        chosen = np.asarray(numbers, dtype=np.int64)
        if len(chosen) and not 0 <= chosen.min() <= chosen.max() < len(self):
            raise IndexError(f"episodes {chosen.min()} to {chosen.max()} of {len(self)}")
        return chosen

    def _by_shard(self, chosen: Index) -> Iterator[_Group]:
        """Each shard that is needed, which of the chosen episodes lie in it, and their numbers there."""
        if not len(chosen):
            return
        shard_of = np.searchsorted(self._first, chosen, side="right") - 1
        if (shard_of == shard_of[0]).all():
            shard = int(shard_of[0])
            yield shard, slice(None), chosen - self._firsts[shard]
            return
        for shard in np.unique(shard_of).tolist():
            where = np.flatnonzero(shard_of == shard)
            yield shard, where, chosen[where] - self._firsts[shard]

    def _check(self, shard: int, start: Index, count: Index, most: int, what: str) -> None:
        if np.any((start < 0) | (count < 0) | (start > most) | (count > most - start)):
            raise self._beyond(shard, what)

    def _beyond(self, shard: int, what: str) -> DataError:
        return DataError(f"{self.shards[shard].folder}: the index points beyond the {what}; run chatmill verify")

    # Mapped files.

    def _forget(self) -> None:
        self.array: Callable[[int, str], NDArray[Any]] = lru_cache(maxsize=MAPPED)(self._map)
        """One file of a shard as it lies on disk, mapped."""

    def _map(self, number: int, name: str) -> NDArray[Any]:
        shard = self.shards[number]
        if _identity(self._root) != self._identity:
            raise DataError(f"{self._root}: was replaced while it was read; open it again")
        return map_file(shard.folder / name, record_dtypes(shard.dtype)[name], shard.records[name])

    def __getstate__(self) -> dict[str, Any]:
        """What travels to another process: all but the maps, which are made anew there."""
        return {name: value for name, value in vars(self).items() if name not in ("array", "lengths")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._forget()


_Where = slice | NDArray[np.intp]
_Group = tuple[int, _Where, Index]


class _Ranges:
    """For each chosen row a range of some shard's records, and where they go in the result."""

    def __init__(self, count: int) -> None:
        self.start = np.zeros(count, dtype=np.int64)
        self.count = np.zeros(count, dtype=np.int64)

    def set(self, where: _Where, start: Index, count: Index) -> None:
        self.start[where] = start
        self.count[where] = count

    @cached_property
    def at(self) -> Index:
        return offsets(self.count)[:-1]

    @cached_property
    def total(self) -> int:
        return int(self.count.sum())

    def index(self, where: _Where) -> tuple[Index, Index]:
        """The numbers of records in the result, and in the shard."""
        count = self.count[where]
        return ragged_index(self.at[where], count), ragged_index(self.start[where], count)

    def copy(self, out: NDArray[Any], source: NDArray[Any], where: _Where) -> None:
        at, start, count = self.at[where], self.start[where], self.count[where]
        if len(at) and int(count.sum()) < LONG * len(at):
            out[ragged_index(at, count)] = source[ragged_index(start, count)]
            return
        for to, begin, size in zip(at.tolist(), start.tolist(), count.tolist(), strict=True):
            out[to : to + size] = source[begin : begin + size]


def lower_bound(column: NDArray[Any], values: Index) -> Index:
    """For each value the first place of a rising column that is not below it; reads O(log n) of the column each.

    `np.searchsorted` would copy the whole column first, because it lies strided in the mapped file.
    """
    size = len(column)
    # Where each row is one conversation, a row's number is its segment's number.
    guess = np.minimum(values, size)
    if size and np.all((guess == size) | (column[np.minimum(guess, size - 1)] >= values)):
        below = np.maximum(guess, 1) - 1
        if np.all((guess == 0) | (column[below] < values)):
            return guess
    if len(values) <= FEW:
        return np.array([bisect_left(column, value) for value in values.tolist()], dtype=np.int64)
    found = np.zeros(len(values), dtype=np.int64)
    for bit in reversed(range(size.bit_length())):
        probe = found + (1 << bit)
        fits = probe <= size
        fits &= column[np.minimum(probe, size) - 1] < values
        found += fits.astype(np.int64) << bit
    return found


def first_spans(origins: Table, segments: Index, end: int) -> Index:
    """The first span of each segment; `end` for the number after the last segment."""
    if not len(origins):
        return np.full(len(segments), end, dtype=np.int64)
    first = origins["first_span"][np.minimum(segments, len(origins) - 1)].astype(np.int64)
    return np.where(segments < len(origins), first, end)


def rows_from_mask(ids: NDArray[np.uint32], mask: NDArray[np.uint8], lengths: Index) -> Rows:
    """Rows of which no more is known than their mask: a span is a run of equal mask within a row."""
    begins = np.zeros(len(ids) + 1, dtype=np.bool_)
    trained = mask > 0
    if len(ids):
        begins[1:-1] = trained[1:] != trained[:-1]
    row_start = offsets(lengths)
    begins[row_start] = True
    start = np.flatnonzero(begins)
    spans = np.zeros(len(start) - 1, dtype=SPAN)
    spans["length"] = np.diff(start)
    spans["message"], spans["target"] = NO_MESSAGE, OWN_ID
    spans["role"], spans["part"], spans["rule"] = Role.NONE, Part.CONTENT, Rule.GIVEN
    spans["weight"] = trained[start[:-1]]
    origins = np.zeros(len(lengths), dtype=ORIGIN)
    origins["file"] = NO_FILE
    first_span = np.searchsorted(start, row_start)
    return Rows(ids, spans, first_span, origins, np.arange(len(lengths) + 1, dtype=np.int64))


def _identity(folder: Path) -> tuple[int, int]:
    found = folder.stat()
    return found.st_dev, found.st_ino
