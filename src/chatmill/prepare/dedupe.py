"""Find duplicates and near-duplicates among all records, using the hashes and MinHash signatures from `dedupe_columns`.

Near-duplicates are found with locality-sensitive hashing: records with the same key in a band are candidates, and the
signatures of candidates are compared in pairs. Similar pairs are merged into groups, and one record of each group is
kept. Signatures are read from files when they are needed, so memory use is only a few bytes per record.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from chatmill.prepare.dedupe_columns import NOT_COMPARED, VALUES
from chatmill.prepare.job import Job
from chatmill.prepare.staging import StagedHead
from chatmill.rows import offsets

if TYPE_CHECKING:
    from chatmill.prepare.select import StagedFile

Flags = NDArray[np.bool_]
Numbers = NDArray[np.signedinteger[Any]]
"""Record indexes, as 4-byte integers unless there are too many records."""
Pairs = tuple[Numbers, Numbers]

COMPARED = 32
"""Maximum number of preceding candidates to compare a record with, in addition to the first candidate."""
PAIRS = 2**16
"""Number of pairs for which signatures are in memory at the same time."""
LOWER = np.uint64(2**32 - 1)
MEMBERS = 2**18
"""Number of candidates to pair with each other at a time."""


@dataclass(frozen=True)
class Duplicates:
    """For each record that has rows, in input order: the record that it duplicates, if any."""

    twin: Numbers
    """Index of the record that is kept instead; -1 for a record that is not a duplicate.

    For an exact duplicate, `twin` is the first equal record, which may itself be a near-duplicate of another record.
    """
    near: Flags
    """Whether the record is a near-duplicate, not an exact duplicate."""


def find_duplicates(staged: Sequence[StagedFile], job: Job, excluded: Sequence[Flags] | None = None) -> Duplicates:
    """Find all duplicate records. Of several equal records, the first record of the source with the highest precedence
    is kept.

    `excluded` contains a boolean array for each file, which marks the rows of records to skip.
    """
    # Number records in order of precedence, so that the first record of a group has the smallest number.
    counts = [int(record_begins(file.head()).sum()) for file in staged]
    order = sorted(range(len(staged)), key=lambda at: _precedence(job, staged[at].source))
    files = _Files([staged[at] for at in order], offsets(np.array([counts[at] for at in order], dtype=np.int64)))
    skipped = np.zeros(files.count, dtype=bool)
    for start, at in zip(files.start.tolist(), order, strict=False):
        if excluded is not None:
            skipped[start : start + counts[at]] = excluded[at][record_begins(staged[at].head())]
    twin, near = _exact(files, skipped), np.zeros(files.count, dtype=bool)
    if job.near_dedupe is not None:
        # Mark skipped records like exact duplicates, so that they are not candidates.
        first = _near(files, job.near_dedupe, np.where(skipped, 0, twin))
        near = first >= 0
        twin[near] = first[near]
    if order == sorted(order):
        return Duplicates(twin, near)
    input_start = offsets(np.array(counts, dtype=np.int64))
    to_input = np.empty(files.count, dtype=twin.dtype)
    for start, at in zip(files.start.tolist(), order, strict=False):
        to_input[start : start + counts[at]] = np.arange(input_start[at], input_start[at + 1])
    twin[twin >= 0] = to_input[twin[twin >= 0]]
    in_input_order = np.empty_like(twin), np.empty_like(near)
    for values, out in zip((twin, near), in_input_order, strict=True):
        out[to_input] = values
    return Duplicates(*in_input_order)


def record_begins(unit: StagedHead) -> Flags:
    """Return, for each row, whether it is the first row of its record."""
    begins: Flags = np.diff(unit.record, prepend=-1) != 0
    return begins


def _precedence(job: Job, source: int) -> tuple[int, int]:
    name = job.sources[source].name
    return (job.precedence.index(name) if name in job.precedence else len(job.precedence), source)


@dataclass(frozen=True)
class _Files:
    """Files of rendered rows in order of source precedence; records are numbered across all files."""

    files: Sequence[StagedFile]
    start: NDArray[np.int64]
    """Index of the first record of each file, followed by the total number of records. Only records that have rows are
    counted.
    """

    @property
    def count(self) -> int:
        return int(self.start[-1])

    @property
    def dtype(self) -> Any:
        return np.int32 if self.count < 2**31 else np.int64

    def column(self, name: str, *, band: int | None = None) -> Iterator[tuple[slice, NDArray[Any]]]:
        """Yield, for each file, the range of its record indexes and the values of a column for these records."""
        for at, file in enumerate(self.files):
            if self.start[at] < self.start[at + 1]:
                unit = file.head()
                column = unit.columns[name] if band is None else unit.columns[name][band]
                yield slice(*self.start[at : at + 2].tolist()), column[unit.record[record_begins(unit)]]

    def signatures(self, numbers: Numbers) -> NDArray[np.uint8]:
        """Return the signatures of the given records, which must be in ascending order."""
        out = np.empty((len(numbers), VALUES), dtype=np.uint8)
        border = np.searchsorted(numbers, self.start)
        for at in np.flatnonzero(np.diff(border)).tolist():
            here = slice(border[at], border[at + 1])
            unit = self.files[at].head()
            record = unit.record[record_begins(unit)][numbers[here] - self.start[at]]
            out[here] = unit.columns["signature"][record]
        return out


def _exact(files: _Files, skipped: Flags) -> Numbers:
    """Return, for each record, the index of the first record with the same key; -1 if no earlier record has the same
    key, or if the record is skipped.

    To save memory, keys are compared in 16 passes, one for each value of their first 4 bits.
    """
    keys = np.empty((files.count, 2), dtype="<u8")
    for here, values in files.column("exact"):
        keys[here] = values
    twin: Numbers = np.full(files.count, -1, dtype=files.dtype)
    share = keys.view(np.uint8)[:, 7] >> 4
    for number in range(16):
        chosen = np.flatnonzero((share == number) & ~skipped)
        # Sorting is stable, so the first of equal keys stays first.
        order = chosen[np.lexsort((keys[chosen, 1], keys[chosen, 0]))]
        again = np.append(False, np.all(keys[order[1:]] == keys[order[:-1]], axis=1))[: len(order)]
        first = np.maximum.accumulate(np.where(again, 0, np.arange(len(order))))
        twin[order[again]] = order[first[again]]
    return twin


# Near-duplicates.


def _near(files: _Files, threshold: float, twin: Numbers) -> Numbers:
    """Return, for each record, the index of the first record in its group of near-duplicates; -1 if the group has no
    earlier record.
    """
    # Signatures store one byte of each MinHash value. Different values have the same byte with probability 1/256, so
    # the required share of matches is higher than the threshold.
    needed = np.ceil(VALUES * (threshold + (1 - threshold) / 256) - 1e-9)
    groups = _Groups(files.count, files.dtype)
    bands = max((len(file.head().columns.get("bands", ())) for file in files.files), default=0)
    for band in range(bands):
        pending: list[Pairs] = []
        for pairs in _candidates(files, band, twin):
            pending.append(groups.apart(*pairs))
            if sum(len(one) for one, _ in pending) >= PAIRS:
                _verify(files, pending, groups, needed)
                pending = []
        if pending:
            _verify(files, pending, groups, needed)
    first = groups.first(np.arange(files.count, dtype=files.dtype))
    first[first == np.arange(files.count)] = -1
    return first


def _candidates(files: _Files, band: int, twin: Numbers) -> Iterator[Pairs]:
    """Yield pairs of records with the same band key, except exact duplicates. A record is paired with at most
    `COMPARED` + 1 earlier records.
    """
    # Put the band key in the upper 32 bits and the record index in the lower 32 bits, so that one sort orders by both.
    keyed, filled = np.empty(files.count, dtype=np.uint64), 0
    for here, keys in files.column("bands", band=band):
        numbers = np.flatnonzero((keys != NOT_COMPARED) & (twin[here] < 0))
        own = (keys[numbers].astype(np.uint64) << np.uint64(32)) | (numbers + here.start).astype(np.uint64)
        keyed[filled : filled + len(own)] = own
        filled += len(own)
    keyed = _repeated(keyed[:filled])
    for begin in range(0, len(keyed), MEMBERS):
        at = np.arange(begin, min(begin + MEMBERS, len(keyed)))
        first = np.searchsorted(keyed, keyed[at] & ~LOWER)
        for back in range(1, COMPARED + 1):
            later = at[at - first >= back]
            if not len(later):
                break
            yield _numbers(keyed[later - back]), _numbers(keyed[later])
            if back == 1:
                far = at - first > COMPARED
                yield _numbers(keyed[first[far]]), _numbers(keyed[at[far]])


def _numbers(keyed: NDArray[np.uint64]) -> Numbers:
    return (keyed & LOWER).astype(np.int64)


def _repeated(keyed: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Sort the entries by key and then by record index, and return those whose key occurs more than once."""
    keyed.sort()
    same = np.zeros(len(keyed) + 1, dtype=bool)
    for begin in range(1, len(keyed), MEMBERS):
        part = keyed[begin - 1 : begin + MEMBERS]
        same[begin : begin + len(part) - 1] = part[1:] ^ part[:-1] <= LOWER
    return keyed[same[:-1] | same[1:]]


def _verify(files: _Files, pending: Sequence[Pairs], groups: _Groups, needed: float) -> None:
    """Merge the groups of each pair of records whose signatures agree in at least `needed` values."""
    one, other = (np.concatenate([np.empty(0, dtype=np.int64), *column]) for column in zip(*pending, strict=True))
    for begin in range(0, len(one), PAIRS):
        pairs = groups.apart(one[begin : begin + PAIRS], other[begin : begin + PAIRS])
        numbers, places = np.unique(np.concatenate(pairs), return_inverse=True)
        signatures = files.signatures(numbers)
        first, second = np.split(places, 2)
        common = np.concatenate(
            [
                np.count_nonzero(signatures[first[at : at + 4096]] == signatures[second[at : at + 4096]], axis=1)
                for at in range(0, max(len(first), 1), 4096)
            ]
        )
        groups.unite(*(numbers[common >= needed] for numbers in pairs))


class _Groups:
    """Union-find over records; each group is represented by its first record."""

    def __init__(self, count: int, dtype: Any) -> None:
        self._earlier: Numbers = np.arange(count, dtype=dtype)
        """Parent of each record: itself, or an earlier record of its group."""

    def first(self, numbers: Numbers) -> Numbers:
        earlier = self._earlier[numbers]
        while np.any((further := self._earlier[earlier]) != earlier):
            earlier = further
        self._earlier[numbers] = earlier
        return earlier

    def apart(self, one: Numbers, other: Numbers) -> Pairs:
        """Return the pairs of records that are in different groups."""
        differ = self.first(one) != self.first(other)
        return one[differ], other[differ]

    def unite(self, one: Numbers, other: Numbers) -> None:
        while len(one):
            first, second = self.first(one), self.first(other)
            np.minimum.at(self._earlier, np.maximum(first, second), np.minimum(first, second))
            one, other = self.apart(one, other)
