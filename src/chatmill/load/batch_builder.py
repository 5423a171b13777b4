"""Build the batches of one rank from planned steps, several at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.errors import ChatmillError, UsageError
from chatmill.load.batch import Batch, BatchCounts, BuiltRows, HashedRows, split_batches
from chatmill.load.digests import RowDigests, sha256_rows
from chatmill.load.plan import LoadPlan, PlannedStep, Window, join, pad_rows
from chatmill.load.stored_rows import look_up, row_table
from chatmill.rows import Index

LOOKUP_POSITIONS, CHUNK_POSITIONS = 1 << 21, 1 << 15
"""Maximum number of positions per call to `look_up`, and per call to `build`. A single batch is never split."""
LOOKUP_BATCHES = 256
"""Maximum number of batches per call to `look_up`."""
BYTES_PER_POSITION = 30
"""Minimum size of the arrays of a batch, in bytes per position."""

Output = Callable[[Batch, Sequence[int]], tuple[list[Batch], Callable[[], None] | None]]
"""Function that splits arrays into batches, as `split_batches` does, and converts them to the loader's output type.

The second return value is None, or a function to call when the loader returns a batch.
"""


class ReadyBatch(NamedTuple):
    """A finished batch, with the values that the loader reports to its listener."""

    step: PlannedStep
    batch: Batch
    counts: BatchCounts
    digest: NDArray[np.uint64] | None
    """The sum of the batch's row digests, or None without a listener."""
    source_counts: Index | None
    """Number of rows, tokens or trained tokens from each source; None without a listener or without a mix."""
    on_return: Callable[[], None] | None


@dataclass(frozen=True)
class BatchBuilder:
    """Builds the batches of one rank; shares no state with the loader, so that it can run in a thread."""

    plan: LoadPlan
    rank: int
    num_rows: int
    """Number of rows per batch on this rank."""
    row_digests: RowDigests | None = None
    """Function that computes the row digests for a listener."""
    output: Output = lambda batch, widths: (split_batches(batch, widths), None)

    def __post_init__(self) -> None:
        """Raise `UsageError` if a batch does not fit in memory."""
        size, memory = self.plan.config.block_size, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if (needed := self.num_rows * size * BYTES_PER_POSITION) > memory:
            raise UsageError(
                f"{self.num_rows} rows of {size} tokens need {needed / 2**30:,.0f} GiB, but the machine has "
                f"{memory / 2**30:,.0f} GiB; lower batch_size or block_size"
            )

    def batches(self, steps: Iterator[PlannedStep]) -> Iterator[ReadyBatch]:
        for chunk in self.chunks(steps):
            yield from chunk

    def chunks(self, steps: Iterator[PlannedStep]) -> Iterator[list[ReadyBatch]]:
        """Yield the batches of the given steps, in lists of batches that were built together."""
        config, size = self.plan.config, self.num_rows
        positions = size * config.block_size
        per_lookup = min(LOOKUP_BATCHES, max(1, LOOKUP_POSITIONS // positions))
        per_chunk = max(1, CHUNK_POSITIONS // positions)
        for group in _groups(steps, per_lookup):
            parts = [step.rows(self.rank * size, (self.rank + 1) * size) for step in group]
            rows = look_up(self.plan, join([pad_rows(part, size) for part in parts]))
            for at in range(0, len(group), per_chunk):
                chunk = slice(at, at + per_chunk)
                hashed = HashedRows([step.at.step for step in group[chunk]], self.rank * size)
                with_digests = hashed if self.row_digests is sha256_rows else None
                built = rows.build(at * size, min(at + per_chunk, len(group)) * size, with_digests)
                yield self._ready(group[chunk], parts[chunk], built, hashed)

    def _ready(
        self, steps: list[PlannedStep], parts: list[Window], built: BuiltRows, hashed: HashedRows
    ) -> list[ReadyBatch]:
        batch, by_batch = built.batch, (len(steps), self.num_rows)
        widths = built.num_segments.reshape(by_batch).max(axis=1, initial=1).tolist()
        counts = [BatchCounts(*columns) for columns in built.counts.reshape(*by_batch, -1).sum(axis=1).tolist()]
        digests: Sequence[NDArray[np.uint64] | None] = [None] * len(steps)
        source_counts: list[Index | None] = [None] * len(steps)
        if self.row_digests is not None:
            rows = self.row_digests(batch, *hashed) if built.digests is None else built.digests
            digests = list(rows.reshape(*by_batch, 2).sum(axis=1, dtype=np.uint64))
            if self.plan.config.mix is not None:
                singles = zip(parts, split_batches(batch, widths), strict=True)
                source_counts = [count_sources(self.plan, part, single) for part, single in singles]
        converted, on_return = self.output(batch, widths)
        columns = zip(steps, converted, counts, digests, source_counts, strict=True)
        return [ReadyBatch(*column, on_return) for column in columns]


def trained_weights(plan: LoadPlan, step: PlannedStep, size: int) -> tuple[Index, NDArray[np.float64]]:
    """For each group of `size` rows of a step, return the number of trained positions and the sum of their weights."""
    rows = pad_rows(step.rows(0, step.num_rows), plan.config.batch_size)
    return row_table(plan, rows).trained_weights(size)


def count_sources(plan: LoadPlan, rows: Window, batch: Batch) -> Index:
    """Count the rows, tokens or trained tokens of each source in a batch, depending on `mix_by`."""
    count, first = len(plan.sources), plan.first_of_source
    source = np.searchsorted(first, rows.episodes, side="right") - 1
    if plan.config.mix_by == "rows":
        return np.bincount(source, minlength=count)
    if plan.config.mix_by == "tokens":
        kept = np.minimum(plan.reader.locate(rows.episodes).length, plan.capacity)
        return np.bincount(source, weights=kept, minlength=count).astype(np.int64)
    # Number the sources from 1, so that 0 means no source. Padding after the last segment needs an extra column.
    of_segment = np.pad(np.searchsorted(first, batch.episode_ids, side="right"), ((0, 0), (0, 1)))
    of_token = np.take_along_axis(of_segment, batch.segments.astype(np.int64), axis=1)
    return np.bincount(of_token[batch.loss_mask], minlength=count + 1)[1:]


def _groups(steps: Iterator[PlannedStep], most: int) -> Iterator[list[PlannedStep]]:
    """Yield lists of 1, 2, 4 … steps, with at most `most` steps per list. If planning fails, yield the steps planned so
    far, then raise the error.
    """
    group: list[PlannedStep] = []
    size = 1
    # Keep a local reference, because a loader that was not closed may outlive the globals at interpreter exit.
    fault = ChatmillError
    try:
        for step in steps:
            group.append(step)
            if len(group) == size:
                yield group
                group, size = [], min(2 * size, most)
    except fault:
        if group:
            yield group
        raise
    if group:
        yield group
