"""Plan the shards of a dataset, without reading the tokens and spans of staged files.

The modules `select` and `shard_plan` make all decisions that depend on more than one row, such as packing and the
boundaries of shards. Given its plan, a shard can be written without reading the rows of other shards.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from chatmill.fit import pack_lengths
from chatmill.prepare.job import Job
from chatmill.prepare.select import Chosen, Numbers, StagedFile
from chatmill.rows import File, Index, offsets
from chatmill.store.write import FileTable

WINDOW = 2**20
"""Number of rows to pack at a time."""


@dataclass(frozen=True)
class ShardPlan:
    """The conversations of one shard in order: conversation i is row `row[i]` of the file `staged[of[i]]`."""

    split: str
    number: int
    staged: tuple[StagedFile, ...]
    of: Numbers
    row: Numbers
    first: Index | None
    """First conversation of each packed row, followed by the number of conversations; None without packing."""
    sizes: NDArray[np.int32] | None
    """Number of tokens and number of spans of each conversation, as an array of shape (2, n); None without packing."""
    files: Mapping[File, int]
    """The index of each input file within the split."""
    source: str | None = None
    """Source of all conversations, if the dataset stores sources."""


def plan_shards(split: str, chosen: Iterable[Chosen], job: Job) -> Iterator[ShardPlan]:
    """Plan the shards of a split one by one, so that memory use does not grow with the number of shards.

    A shard ends before the row that would exceed its token limit, as in `SplitWriter`, or at the end of a source.
    """
    numbers, count = FileTable(), itertools.count()
    for source, part in by_source(chosen, job):
        batches = map(_unpacked, part) if job.pack is None else _packed(part, job.pack)
        for rows in _cut(batches, job.shard_tokens):
            yield _shard(split, next(count), rows, numbers, source)


def by_source(chosen: Iterable[Chosen], job: Job) -> Iterator[tuple[str | None, Iterator[Chosen]]]:
    """Yield the name and the rows of each source, or None and all rows if the dataset does not store sources."""
    return itertools.groupby(chosen, key=lambda part: job.source_name(part.file.source))


def _cut(batches: Iterable[_PlannedRows], shard_tokens: int) -> Iterator[list[_PlannedRows]]:
    pending, held = list[_PlannedRows](), 0
    for batch in batches:
        start, at = batch.start, 0
        while at < len(start) - 1:
            stop = int(np.searchsorted(start, start[at] + shard_tokens - held, side="right")) - 1
            if stop <= at:
                if pending:
                    yield pending
                    pending, held = [], 0
                    continue
                stop = at + 1
            pending.append(batch.cut(at, stop))
            held += int(start[stop] - start[at])
            at = stop
    if pending:
        yield pending


@dataclass(frozen=True)
class _PlannedRows:
    """The conversations of consecutive rows; `staged`, `of`, `row`, `first` and `sizes` are the same as in
    `ShardPlan`.
    """

    staged: tuple[StagedFile, ...]
    of: Numbers
    row: Numbers
    first: Index | None
    sizes: NDArray[np.int32] | None
    start: Index
    """Number of tokens before each row, followed by the total number."""
    names: tuple[File, ...]
    file: Numbers
    """Input file of each conversation, as an index into `names`."""

    def cut(self, start: int, stop: int) -> _PlannedRows:
        """Return rows [start, stop), with only the staged files that they need."""
        first = None if self.first is None else self.first[start : stop + 1]
        begin, end = (start, stop) if first is None else first[[0, -1]].tolist()
        used, of = np.unique(self.of[begin:end], return_inverse=True)
        return _PlannedRows(
            tuple(self.staged[number] for number in used.tolist()),
            of.astype(np.uint32),
            self.row[begin:end],
            None if first is None else first - first[0],
            None if self.sizes is None else self.sizes[:, begin:end],
            self.start[start : stop + 1],
            self.names,
            self.file[begin:end],
        )


def _unpacked(part: Chosen) -> _PlannedRows:
    unit = part.file.head()
    of, start = np.zeros(len(part.rows), dtype=np.uint32), offsets(np.diff(unit.row_start)[part.rows])
    return _PlannedRows((part.file,), of, part.rows, None, None, start, unit.files, unit.file[part.rows])


def _packed(chosen: Iterable[Chosen], capacity: int) -> Iterator[_PlannedRows]:
    """Pack rows by best fit, `WINDOW` rows at a time."""
    window: list[Chosen] = []
    free = WINDOW
    for part in chosen:
        pending = part.rows
        while len(pending):
            window.append(Chosen(part.file, pending[:free]))
            pending, free = pending[free:], free - len(window[-1].rows)
            if not free:
                yield _packed_window(window, capacity)
                window, free = [], WINDOW
    if window:
        yield _packed_window(window, capacity)


def _packed_window(window: Sequence[Chosen], capacity: int) -> _PlannedRows:
    names: dict[File, int] = {}
    each, files = list[NDArray[np.int64]](), list[Numbers]()
    for part in window:
        unit = part.file.head()
        each.append(np.stack([np.diff(unit.row_start), np.diff(unit.first_span)])[:, part.rows])
        own = np.array([names.setdefault(file, len(names)) for file in unit.files], dtype=np.uint32)
        files.append(own[unit.file[part.rows]])
    sizes = np.concatenate(each, axis=1, dtype=np.int32)
    bins = pack_lengths(sizes[0], capacity)
    sizes = sizes[:, bins.order]
    return _PlannedRows(
        tuple(part.file for part in window),
        np.repeat(np.arange(len(window), dtype=np.uint32), [len(part.rows) for part in window])[bins.order],
        np.concatenate([part.rows for part in window])[bins.order],
        bins.first,
        sizes,
        offsets(np.add.reduceat(sizes[0], bins.first[:-1], dtype=np.int64)),
        tuple(names),
        np.concatenate(files)[bins.order],
    )


def _shard(
    split: str, number: int, batches: Sequence[_PlannedRows], numbers: FileTable, source: str | None
) -> ShardPlan:
    staged: dict[StagedFile, int] = {}
    of, first, files, before = list[Numbers](), list[Index](), dict[File, int](), 0
    sizes = [batch.sizes for batch in batches if batch.sizes is not None]
    for batch in batches:
        own = np.array([staged.setdefault(file, len(staged)) for file in batch.staged], dtype=np.uint32)
        of.append(own[batch.of])
        if batch.first is not None:
            first.append(batch.first[:-1] + before)
        before += len(batch.of)
        numbered = numbers.number(batch.names, batch.file)
        used, at = np.unique(batch.file, return_index=True)
        files |= {
            batch.names[name]: int(numbered[place]) for name, place in zip(used.tolist(), at.tolist(), strict=True)
        }
    return ShardPlan(
        split,
        number,
        tuple(staged),
        np.concatenate(of),
        np.concatenate([batch.row for batch in batches]),
        np.append(np.concatenate(first), before) if first else None,
        np.concatenate(sizes, axis=1) if sizes else None,
        files,
        source,
    )
