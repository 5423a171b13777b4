"""Steps of a plan to batches of one rank, many at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.errors import ChatmillError, UsageError
from chatmill.load.batch import Batch, BatchArrays, BatchCounts, RowTable, row_digests
from chatmill.load.mix_counts import tally
from chatmill.load.plan import LoadPlan, PlannedStep, Window, fill, join
from chatmill.rows import Index

LOOKED_UP, MADE = 1 << 19, 1 << 15
"""Positions of x that are looked up together, and of which arrays are made together; one batch at least."""
MOST = 64
"""Batches that are looked up together at most, however small."""

BYTES = 30
"""Of a position in the arrays of a batch, at least."""

Output = Callable[[Batch], tuple[Batch, Callable[[], None] | None]]
"""Arrays to what is handed out, and what is to be called then, if anything."""


class ReadyBatch(NamedTuple):
    """A batch that is ready, and what is to be told or done when it is handed out."""

    step: PlannedStep
    batch: Batch
    counts: BatchCounts
    digest: NDArray[np.uint64] | None
    """The sum of the digests of its rows, for whoever listens."""
    given: Index | None
    """What each source has in it, where sources are mixed, for whoever listens."""
    ready: Callable[[], None] | None


@dataclass(frozen=True)
class BatchBuilder:
    """Makes the batches of one rank. It holds nothing of the loader, so that a thread may run it on its own."""

    plan: LoadPlan
    rank: int
    num_rows: int
    """Rows of a batch on this rank."""
    listened: bool
    output: Output

    def __post_init__(self) -> None:
        """Refuse batches that no memory holds, before it is filled."""
        size, room = self.plan.config.block_size, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if (needed := self.num_rows * size * BYTES) > room:
            raise UsageError(
                f"{self.num_rows} rows of {size} tokens take {needed / 2**30:,.0f} GiB, "
                f"the machine has {room / 2**30:,.0f}; lower batch_size or block_size"
            )

    def slabs(self, steps: Iterator[PlannedStep]) -> Iterator[list[ReadyBatch]]:
        """The batches of these steps, some at a time."""
        positions = self.num_rows * self.plan.config.block_size
        size = min(MOST, max(1, LOOKED_UP // positions))
        each = max(1, MADE // positions)
        for chunk in _chunks(steps, size):
            parts = [step.rows(self.rank * self.num_rows, (self.rank + 1) * self.num_rows) for step in chunk]
            together = join([fill(part, self.num_rows) for part in parts])
            sheet = RowTable(self.plan.reader, together.episodes, together.first, self.plan.layout)
            counts = sheet.counts(self.num_rows)
            for at in range(0, len(chunk), each):
                these = slice(at, at + each)
                made = sheet.make(at * self.num_rows, min(at + each, len(chunk)) * self.num_rows)
                yield self._items(chunk[these], parts[these], counts[these], made)

    def _items(
        self, steps: list[PlannedStep], parts: list[Window], counts: list[BatchCounts], made: BatchArrays
    ) -> list[ReadyBatch]:
        digests: list[NDArray[np.uint64] | None] = [None] * len(steps)
        given: list[Index | None] = [None] * len(steps)
        if self.listened:
            for number, batch in enumerate(made.split(self.num_rows)):
                rows = row_digests(batch, step=steps[number].at.step, first_row=self.rank * self.num_rows)
                digests[number] = rows.sum(axis=0, dtype=np.uint64)
                given[number] = tally(self.plan, parts[number], batch)
        arrays, ready = self.output(made.batch)
        batches = made._replace(batch=arrays).split(self.num_rows)
        columns = zip(steps, batches, counts, digests, given, strict=True)
        return [ReadyBatch(*column, ready) for column in columns]


def _chunks(steps: Iterator[PlannedStep], size: int) -> Iterator[list[PlannedStep]]:
    """So many steps at a time. A step that cannot be taken is a fault when it is reached, not when it is looked up."""
    chunk: list[PlannedStep] = []
    try:
        for step in steps:
            chunk.append(step)
            if len(chunk) == size:
                yield chunk
                chunk = []
    except ChatmillError:
        if chunk:
            yield chunk
        raise
    if chunk:
        yield chunk


def as_arrays(batch: Batch) -> tuple[Batch, None]:
    """The output that leaves arrays as they are."""
    return batch, None
