"""`prepare_preview`: build a small dataset from the first records of each source, to inspect before a full build."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from chatmill.errors import RecordError
from chatmill.format import Renderer
from chatmill.ledger import Ledger
from chatmill.prepare.job import Job
from chatmill.prepare.pipeline import prepare_dataset
from chatmill.prepare.recipe_check import WHOLE, FirstRecords
from chatmill.prepare.unit import Done, Unit, run_unit
from chatmill.records import ReadLog
from chatmill.store.metadata import Metadata

RECORDS = 10_000
"""Default number of records to read per source."""


@dataclass(frozen=True)
class Preview:
    metadata: Metadata
    read_whole: bool
    """Whether all records of every source were read."""


def prepare_preview(
    job: Job,
    target: Path,
    *,
    records: int = RECORDS,
    allow_code: Sequence[str] = (),
    on_fault: Callable[[RecordError], None] = lambda fault: None,
) -> Preview:
    """Build a dataset of the first `records` records of each source of a job.

    Invalid records are always skipped, regardless of `job.on_error`, and passed to `on_fault`. The validation split
    contains only sources with `only_val`, because a validation fraction of a few records may be empty.
    """
    sources = tuple(replace(source, val_split=None) for source in job.sources)
    engine = _FirstRecordsEngine(records)
    metadata = prepare_dataset(
        replace(job, sources=sources, val_split=0.0, on_error="skip"),
        target,
        engine=engine,
        unit_bytes=WHOLE,
        allow_code=allow_code,
        on_fault=on_fault,
    )
    return Preview(metadata, engine.read_whole)


class _FirstRecordsEngine:
    """An engine that runs in this process and reads only the first records of each source."""

    def __init__(self, records: int) -> None:
        self._records = records
        self.read_whole = True

    def run(self, units: Sequence[Unit], job: Job, renderer: Renderer, folder: Path) -> Generator[Done, None, None]:
        left = [self._records] * len(job.sources)
        for unit in units:
            if left[unit.source] <= 0:
                self.read_whole = False
                yield Done(unit.number, 0, 0, Ledger(), (), ReadLog().bytes_read())
                continue
            reader = FirstRecords(left[unit.source])
            done = run_unit(unit, job, renderer, folder, read=reader)
            left[unit.source] -= done.ledger.total("read").rows
            self.read_whole = self.read_whole and reader.reached_end
            yield done
