"""Preview a build: process the first records of each source of a recipe, and report what would happen to them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from chatmill.answers import mask_answers
from chatmill.errors import DataError, RecordError
from chatmill.format import Renderer, requires_user, resolve_format
from chatmill.ledger import Ledger
from chatmill.prepare.exclude import read_excluded
from chatmill.prepare.filters import allowed_predicates, check_languages
from chatmill.prepare.job import Job
from chatmill.prepare.pipeline import units_of
from chatmill.prepare.progress import source_title
from chatmill.prepare.removed import write_removed
from chatmill.prepare.select import Selection, StagedFile, choose
from chatmill.prepare.unit import Unit, job_renderer, run_unit
from chatmill.prepare.unroll import render_unrolled, unrolled
from chatmill.records import FilePart, InputFiles, ReadLog, Record, read_blocks
from chatmill.rows import File

RECORDS = 1000
"""Maximum number of records to read per source."""
EXAMPLES = 3
"""Number of removed records to show per reason."""
WHOLE = 2**62
"""Unit size that is larger than any file, so that no file is split."""


@dataclass(frozen=True)
class RemovedExample:
    file: str
    line: int
    record: Record | None
    twin: dict[str, Any] | None
    """For a duplicate: source, file and line of the record that is kept instead."""


@dataclass
class SourceSample:
    """What a build would do with the first records of a source."""

    name: str
    files: list[tuple[FilePart, int]] = field(default_factory=list)
    """Each file, with its shape and its size in bytes."""
    read_whole: bool = True
    """Whether all records of the source were read."""
    ledger: Ledger = field(default_factory=Ledger)
    """Counts for the records that were read, before deduplication."""
    faults: list[RecordError] = field(default_factory=list)
    first: Record | None = None
    trained: tuple[bool, ...] = ()
    """For each message of the first record, whether it has trained tokens; empty if the record cannot be rendered."""
    removed: dict[str, int] = field(default_factory=dict)
    """For each reason, the number of records that filters, deduplication and `max_samples` remove."""
    examples: dict[str, list[RemovedExample]] = field(default_factory=dict)
    rows: int = 0
    """Number of rows kept, before packing."""
    tokens: int = 0
    trained_tokens: int = 0

    @property
    def records(self) -> int:
        return self.ledger.total("read").rows


def check_recipe(job: Job, *, records: int = RECORDS, allow_code: Sequence[str] = ()) -> list[SourceSample]:
    """Read at most `records` records of each source, and render, filter and deduplicate them as in a build.

    Duplicates are found only among the records that were read. Errors for invalid records are collected in the result,
    regardless of `job.on_error`. Rows are written to a temporary folder, which is removed at the end; no other files
    are written.
    """
    job.check()
    check_languages(job)
    predicates = allowed_predicates(job, allow_code)
    inputs = InputFiles([source.inputs for source in job.sources])
    excluded = read_excluded(job.exclude)
    units = units_of(job, inputs, WHOLE, predicates, excluded)
    job = replace(
        job, format=resolve_format(job.format, job.tokenizer, chat_template=job.chat_template), on_error="skip"
    )
    renderer = job_renderer(job)
    samples = [SourceSample(source_title(source)) for source in job.sources]
    held: dict[tuple[str, int], Record] = {}
    staged: list[StagedFile] = []
    with TemporaryDirectory(prefix="chatmill-check-") as name:
        folder = Path(name)
        for unit in units:
            sample = samples[unit.source]
            sample.files.append((unit.part, unit.size))
            left = records - sample.records
            if left <= 0:
                sample.read_whole = False
                continue
            reader = FirstRecords(left, hold=True)
            done = run_unit(unit, job, renderer, folder, read=reader)
            sample.read_whole = sample.read_whole and reader.reached_end
            sample.ledger.merge(done.ledger)
            sample.faults += done.faults
            held |= {(unit.name, record.line): record for record in reader.records}
            if sample.first is None and reader.records:
                sample.first = reader.records[0]
                sample.trained = _trained_messages(sample.first, unit, job, renderer)
            of_unit = partial(StagedFile, source=unit.source, unit=unit.number, file=File(unit.part.source, unit.name))
            staged += [of_unit(folder / unit.staged_name(n), unit.only_val, 0) for n in range(done.files)]
        selection = choose(staged, job, Ledger(), excluded)
        _count_kept(samples, selection)
        _add_removed(samples, units, staged, selection, folder / "removed.jsonl", held)
    if not any(sample.records for sample in samples):
        raise DataError("the input has no records; expected at least one")
    return samples


class FirstRecords:
    """Like `read_blocks`, but reads at most `most` records, including invalid records."""

    def __init__(self, most: int, *, hold: bool = False) -> None:
        self._most, self._read, self._faults, self._hold = most, 0, 0, hold
        self.records: list[Record] = []
        """The records that were read, if `hold` is true."""
        self.reached_end = False

    def __call__(
        self,
        part: FilePart,
        *,
        on_fault: Callable[[RecordError], None],
        on_end: Callable[[int], None],
        log: ReadLog,
    ) -> Iterator[list[Record]]:
        def count_fault(fault: RecordError) -> None:
            if self._left:
                self._faults += 1
                on_fault(fault)
            else:
                raise _EnoughError

        try:
            for block in read_blocks(part, on_fault=count_fault, on_end=on_end, as_columns=False, log=log):
                if not self._left:
                    return
                records = list(block)[: self._left]
                self._read += len(records)
                self.records += records if self._hold else ()
                yield records
                if len(records) < len(block):
                    return
        except _EnoughError:
            return
        self.reached_end = True

    @property
    def _left(self) -> int:
        return self._most - self._read - self._faults


class _EnoughError(Exception):
    """Raised to stop reading when the maximum number of records has been read."""


def _trained_messages(record: Record, unit: Unit, job: Job, renderer: Renderer) -> tuple[bool, ...]:
    """Return, for each message of a record, whether it has trained tokens. Return an empty tuple if the record cannot
    be rendered.
    """
    ledger, train_on = Ledger(), unit.train_on
    try:
        if job.unroll:
            rows = render_unrolled(
                renderer,
                list(unrolled([record], renderer, train_on=train_on, on_reject=_raise, ledger=ledger)),
                ledger,
            )
        else:
            rows = renderer.render(list(renderer.renderable([record], _raise)), train_on=train_on, ledger=ledger)
    except RecordError:
        return ()
    if requires_user(renderer):
        rows = mask_answers(rows)
    trained = set(rows.spans["message"][rows.spans["weight"] > 0].tolist())
    return tuple(number in trained for number in range(len(record.messages)))


def _raise(fault: RecordError) -> None:
    raise fault


def _count_kept(samples: Sequence[SourceSample], selection: Selection) -> None:
    for parts in selection.chosen.values():
        for part in parts:
            sample, head = samples[part.file.source], part.file.head()
            sample.rows += len(part.rows)
            sample.tokens += int(np.diff(head.row_start)[part.rows].sum())
            sample.trained_tokens += int(head.trained[part.rows].sum())


def _add_removed(
    samples: Sequence[SourceSample],
    units: Sequence[Unit],
    staged: Sequence[StagedFile],
    selection: Selection,
    path: Path,
    held: dict[tuple[str, int], Record],
) -> None:
    """Count the removed records of each source, and store the first `EXAMPLES` of them for each reason."""
    filtered = any(sample.ledger.total("filtered").rows for sample in samples)
    if write_removed(path, staged, selection, filtered=filtered) is None:
        return
    source_of = {(unit.part.source, unit.name): unit.source for unit in units}
    for line in path.read_text().splitlines():
        entry = json.loads(line)
        sample, reason = samples[source_of[entry["source"], entry["file"]]], entry["reason"]
        sample.removed[reason] = sample.removed.get(reason, 0) + 1
        examples = sample.examples.setdefault(reason, [])
        if len(examples) < EXAMPLES:
            record = held.get((entry["file"], entry["line"]))
            examples.append(RemovedExample(entry["file"], entry["line"], record, entry.get("twin")))
