"""Steps of a plan to batches of one rank, many at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.load.batch import Batch, Counts, lay_out, row_digests
from chatmill.load.plan import Plan, Step, fill, join
from chatmill.load.tally import tally
from chatmill.rows import Index

SLAB = 1 << 17
"""Positions of x that are made together: many small batches cost little more than one."""
MOST = 32
"""Batches that are made together at most, however small."""

Output = Callable[[Batch], tuple[Batch, Callable[[], None] | None]]
"""Arrays to what is handed out, and what is to be called then, if anything."""


class Item(NamedTuple):
    """A batch that is ready, and what is to be told or done when it is handed out."""

    step: Step
    batch: Batch
    counts: Counts
    digest: NDArray[np.uint64] | None
    """The sum of the digests of its rows, for whoever listens."""
    given: Index | None
    """What each source has in it, where sources are mixed, for whoever listens."""
    ready: Callable[[], None] | None


@dataclass(frozen=True)
class Maker:
    """Makes the batches of one rank. It holds nothing of the loader, so that a thread may run it on its own."""

    plan: Plan
    rank: int
    num_rows: int
    """Rows of a batch on this rank."""
    listened: bool
    output: Output

    def slabs(self, steps: Iterator[Step]) -> Iterator[list[Item]]:
        size = min(MOST, max(1, SLAB // (self.num_rows * self.plan.config.block_size)))
        while chunk := list(islice(steps, size)):
            yield self.make(chunk)

    def make(self, steps: list[Step]) -> list[Item]:
        size, first_row = self.num_rows, self.rank * self.num_rows
        parts = [step.rows(first_row, first_row + size) for step in steps]
        together = join([fill(part, size) for part in parts])
        made = lay_out(self.plan.reader, together.episodes, together.first, self.plan.layout)
        digests: list[NDArray[np.uint64] | None] = [None] * len(steps)
        given: list[Index | None] = [None] * len(steps)
        if self.listened:
            for number, batch in enumerate(made.split(size)):
                rows = row_digests(batch, step=steps[number].at.step, first_row=first_row)
                digests[number] = rows.sum(axis=0, dtype=np.uint64)
                given[number] = tally(self.plan, parts[number], batch)
        counts = made.counts(size)
        arrays, ready = self.output(made.batch)
        columns = zip(steps, made._replace(batch=arrays).split(size), counts, digests, given, strict=True)
        return [Item(*column, ready) for column in columns]


def as_arrays(batch: Batch) -> tuple[Batch, None]:
    """The output that leaves arrays as they are."""
    return batch, None
