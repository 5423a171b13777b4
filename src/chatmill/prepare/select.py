"""Select the rows of the train and val splits: apply deduplication, `max_samples` and the validation fraction.

Only the head of each staged file is read, which contains all arrays except tokens and spans (see `staging`).
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from chatmill.ledger import Ledger
from chatmill.prepare.dedupe import find_duplicates, record_begins
from chatmill.prepare.exclude import NOTHING, Excluded
from chatmill.prepare.job import Job
from chatmill.prepare.staging import Staged, StagedHead
from chatmill.records.split import hash_places, shuffle_split, smallest_hash_share, smallest_shuffle_share
from chatmill.remote import objects
from chatmill.remote.urls import Place
from chatmill.rows import File, Index

NO_FILE = File("", "")
Flags = NDArray[np.bool_]
Numbers = NDArray[np.uint32]
"""Row or file indices, as uint32 to save memory."""


@dataclass(frozen=True, eq=False)
class StagedFile:
    path: Place
    only_val: bool
    lines_before: int
    head_copy: Path | None = None
    """If the file is in an object store, a local copy of all its arrays except tokens and spans (see `staging`)."""
    head_size: int = 0
    """If the file is in an object store, the number of bytes before its tokens and spans."""
    source: int = 0
    """Index of the source in the job."""
    unit: int = 0
    """Index of the unit that wrote the file."""
    file: File = NO_FILE
    """Input file of the unit that wrote the file."""

    def open(self) -> Staged:
        """Open the whole staged file. A file in an object store is first downloaded to a temporary file."""
        if isinstance(self.path, Path):
            return Staged(self.path, lines_before=self.lines_before)
        with tempfile.NamedTemporaryFile(prefix="chatmill-") as copy:
            copy.write(objects.read(self.path))
            copy.flush()
            return Staged(Path(copy.name), lines_before=self.lines_before)

    def head(self) -> StagedHead:
        path = self.head_copy or self.path
        assert isinstance(path, Path)
        return StagedHead(path, lines_before=self.lines_before)


@dataclass(frozen=True)
class Chosen:
    """The rows of one staged file that belong to one split."""

    file: StagedFile
    rows: Numbers


REASONS = ("duplicate", "near_duplicate", "max_samples", "excluded")
"""Reasons for removing a record after it was rendered to rows."""


@dataclass(frozen=True)
class RemovedRecords:
    """The records of one staged file that are not written to the dataset, as arrays in file order."""

    file: int
    """Index of the staged file."""
    row: Numbers
    """Index of the first row of each record in the staged file."""
    reason: NDArray[np.uint8]
    """For each record, the index of its reason in `REASONS`."""
    twin: Index
    """For each duplicate, the index of the record that is kept instead, among all records with rows; -1 for other
    records.
    """


@dataclass(frozen=True)
class Selection:
    chosen: Mapping[str, list[Chosen]]
    """The rows of each split, in input order."""
    removed: Sequence[RemovedRecords]


def choose(staged: Sequence[StagedFile], job: Job, ledger: Ledger, excluded: Excluded = NOTHING) -> Selection:
    """Apply `--exclude`, deduplication and `max_samples`, and return the rows of each split.

    Excluded records are removed before deduplication, so no record is removed as a duplicate of an excluded record.
    """
    excluded_rows = excluded.flags(staged) if excluded.lines else None
    duplicates = find_duplicates(staged, job, excluded_rows) if job.removes_duplicates else None
    shuffled = _shuffled(staged, job) if job.split == "shuffle" and any(map(job.val_share, job.sources)) else None
    chosen: dict[str, list[Chosen]] = {"train": [], "val": []}
    left = {n: source.max_samples for n, source in enumerate(job.sources) if source.max_samples is not None}
    removed: list[RemovedRecords] = []
    first = first_with_rows = 0
    for number, file in enumerate(staged):
        unit = file.head()
        if file.only_val:
            val = np.ones(len(unit), dtype=bool)
        elif shuffled is not None:
            val = shuffled[first + unit.record]
        else:
            val = hash_places(unit.key[:, 0]) < job.val_share(job.sources[file.source])
        kept = np.ones(len(unit), dtype=bool)
        if duplicates is not None or file.source in left or excluded_rows is not None:
            begins = record_begins(unit)
            count = int(begins.sum())
            # 0 for records that are kept, else 1 + the index of the reason.
            reason, twin = np.zeros(count, dtype=np.uint8), np.full(count, -1, dtype=np.int64)
            if duplicates is not None:
                here = slice(first_with_rows, first_with_rows + count)
                twin = duplicates.twin[here]
                reason[twin >= 0] = 1
                reason[(twin >= 0) & duplicates.near[here]] = 2
                first_with_rows += count
            if excluded_rows is not None:
                reason[excluded_rows[number][begins]] = 4
            if file.source in left:
                others = np.flatnonzero(reason == 0)
                reason[others[left[file.source] :]] = 3
                left[file.source] -= min(left[file.source], len(others))
            if reason.any():
                those = np.flatnonzero(reason)
                rows = np.flatnonzero(begins)[those].astype(np.uint32)
                removed.append(RemovedRecords(number, rows, reason[those] - 1, twin[those].astype(np.int64)))
                of_row = reason[np.cumsum(begins) - 1]
                kept = of_row == 0
                _count_removed(unit, of_row, ledger)
        for name, chosen_rows in (("train", kept & ~val), ("val", kept & val)):
            if chosen_rows.any():
                chosen[name].append(Chosen(file, np.flatnonzero(chosen_rows).astype(np.uint32)))
        first += unit.extra["records"]
    if unmatched := excluded.unmatched(staged, excluded_rows):
        ledger.add("noted", "exclude_without_record", rows=unmatched)
    return Selection(chosen, removed)


def _count_removed(unit: StagedHead, reason: NDArray[np.uint8], ledger: Ledger) -> None:
    length = np.diff(unit.row_start)
    for number, name in enumerate(REASONS, 1):
        those = reason == number
        if those.any():
            tokens, trained = int(length[those].sum()), int(unit.trained[those].sum())
            ledger.add("dropped", name, rows=int(those.sum()), tokens=tokens, trained=trained)


def smallest_shares(staged: Sequence[StagedFile], job: Job) -> tuple[float, float] | None:
    """Return the smallest validation fractions that give each split at least one record: the first fraction for
    splitting by hash, the second for splitting by shuffle. Return None if no fraction gives each split a record.
    """
    first, last, before = 1.0, 0.0, 0
    has_rows = np.zeros(sum(file.head().extra["records"] for file in staged), dtype=bool)
    for file in staged:
        unit = file.head()
        has_rows[before + unit.record] = True
        before += unit.extra["records"]
        if len(unit):
            places = hash_places(unit.key[:, 0])
            first, last = min(first, places.min()), max(last, places.max())
    by_hash, exact = smallest_hash_share(first, last), smallest_shuffle_share(has_rows, seed=job.seed)
    return None if by_hash is None or exact is None else (by_hash, exact)


def _shuffled(staged: Sequence[StagedFile], job: Job) -> Flags:
    """For each record, return whether it belongs to the validation split. The shuffle is the same as in primer caches.

    All records are shuffled together; if any source sets `val_split`, the records of each source are shuffled
    separately.
    """
    alone = any(source.val_split is not None for source in job.sources)
    parts = [np.zeros(0, dtype=bool)]
    for number, files in itertools.groupby(staged, key=lambda file: file.source if alone else 0):
        count = sum(file.head().extra["records"] for file in files)
        val = np.zeros(count, dtype=bool)
        val[shuffle_split(count, job.val_share(job.sources[number]), seed=job.seed).val] = True
        parts.append(val)
    return np.concatenate(parts)
