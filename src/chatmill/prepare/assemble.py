"""Assembly: write the shards of a dataset from staged rows, in order.

Everything that depends on more than one row happens here: deduplication, split, blocks, packing and shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from chatmill.errors import DataError
from chatmill.fit import pack_lengths, stream_blocks
from chatmill.ledger import Ledger
from chatmill.prepare.job import Job
from chatmill.prepare.staging import Staged
from chatmill.prepare.unit import trained_tokens
from chatmill.records.split import hash_places, shuffle_split, smallest_hash_share, smallest_shuffle_share
from chatmill.rows import ORIGIN, SPAN, File, Index, Part, Rows, as_bytes, copy_ranges, offsets
from chatmill.store.metadata import SplitInfo
from chatmill.store.write import SplitWriter

WINDOW = 2**20
"""Rows whose packing is planned together."""
CHUNK_TOKENS = 2**22
"""Tokens that are gathered at a time; memory is a few times this, whatever the size of the data."""
MAPPED = 256
"""Staged files that are mapped at once. Each holds a file descriptor, and the limit is often 1,024."""

Flags = NDArray[np.bool_]
Numbers = NDArray[np.uint32]
"""Row numbers within one staged file, in a narrow type because there may be very many of them."""


@dataclass(frozen=True)
class StagedFile:
    path: Path
    only_val: bool
    lines_before: int

    def open(self) -> Staged:
        return Staged(self.path, lines_before=self.lines_before)


@dataclass(frozen=True)
class Chosen:
    """Rows of one staged file that go to one split."""

    file: StagedFile
    rows: Numbers


def assemble(
    staged: Sequence[StagedFile],
    job: Job,
    *,
    vocab_size: int,
    staging: Path,
    ledger: Ledger,
    on_tokens: Callable[[int], None] = lambda tokens: None,
) -> dict[str, SplitInfo]:
    """Write `train`, and `val` if the job has one, under `staging`; an empty split is an error."""
    chosen = _split(staged, job, ledger)
    splits = {}
    for name in ("train", "val") if job.wants_val else ("train",):
        with SplitWriter(staging / name, vocab_size=vocab_size, shard_tokens=job.shard_tokens) as writer:
            for rows in _fitted(chosen[name], job, ledger):
                writer.append(rows)
                conversations = int(np.count_nonzero(rows.spans["part"][rows.first_span[:-1]] != Part.PAD))
                ledger.add("stored", rows=conversations, tokens=len(rows.ids), trained=trained_tokens(rows))
                on_tokens(len(rows.ids))
            splits[name] = writer.close()
    for name, split in splits.items():
        if split.num_episodes == 0:
            raise DataError(f"the split {name} would be empty; {_why_empty(name, splits, staged, job, ledger)}")
    return splits


def _why_empty(
    name: str, splits: Mapping[str, SplitInfo], staged: Sequence[StagedFile], job: Job, ledger: Ledger
) -> str:
    if any(split.num_episodes for split in splits.values()) and job.val_split:
        if name == "val" and (shares := _smallest_shares(staged, job)) is not None:
            by_hash, exact = (f"--val-split {share:.16g}" for share in shares)
            if job.split == "shuffle":
                return f"the smallest share that fills it is {exact}"
            shuffle = f"{exact} with exact shares (--split shuffle --seed {job.seed})"
            return f"the smallest share that fills it is {by_hash}, or {shuffle}"
        return f"give more records, or a {'larger' if name == 'val' else 'smaller'} --val-split"
    lost = [f"{entry.rows} {reason}" for bucket, reason, entry in ledger if bucket in ("rejected", "dropped")]
    return f"no record is left to train on ({', '.join(lost) or 'there are none'})"


def _smallest_shares(staged: Sequence[StagedFile], job: Job) -> tuple[float, float] | None:
    """The smallest shares that give both splits a record, by hash and by shuffle; None if no share does."""
    first, last, before = 1.0, 0.0, 0
    has_rows = np.zeros(sum(file.open().extra["records"] for file in staged), dtype=bool)
    for file in staged:
        unit = file.open()
        has_rows[before + unit.record] = True
        before += unit.extra["records"]
        if len(unit):
            places = hash_places(unit.origins["key"][:, 0])
            first, last = min(first, places.min()), max(last, places.max())
    by_hash, exact = smallest_hash_share(first, last), smallest_shuffle_share(has_rows, seed=job.seed)
    return None if by_hash is None or exact is None else (by_hash, exact)


def _split(staged: Sequence[StagedFile], job: Job, ledger: Ledger) -> dict[str, list[Chosen]]:
    """The rows of each split in input order, without duplicates if the job says so."""
    duplicate = _duplicates(staged) if job.dedupe else None
    shuffled = _shuffled(staged, job) if job.split == "shuffle" and job.val_split else None
    chosen: dict[str, list[Chosen]] = {"train": [], "val": []}
    first = first_with_rows = 0
    for file in staged:
        unit = file.open()
        if file.only_val:
            val = np.ones(len(unit), dtype=bool)
        elif shuffled is not None:
            val = shuffled[first + unit.record]
        else:
            val = hash_places(unit.origins["key"][:, 0]) < job.val_split
        kept = np.ones(len(unit), dtype=bool)
        if duplicate is not None:
            begins = _begins(unit)
            kept = ~duplicate[first_with_rows + np.cumsum(begins) - 1]
            first_with_rows += int(begins.sum())
            if not kept.all():
                gone = unit.rows().take(np.flatnonzero(~kept))
                ledger.add("dropped", "duplicate", rows=len(gone), tokens=len(gone.ids), trained=trained_tokens(gone))
        for name, those in (("train", kept & ~val), ("val", kept & val)):
            if those.any():
                chosen[name].append(Chosen(file, np.flatnonzero(those).astype(np.uint32)))
        first += unit.extra["records"]
    return chosen


def _shuffled(staged: Sequence[StagedFile], job: Job) -> Flags:
    """Whether each record is for validation, by the split of the primer cache."""
    count = sum(file.open().extra["records"] for file in staged)
    val = np.zeros(count, dtype=bool)
    val[shuffle_split(count, job.val_split, seed=job.seed).val] = True
    return val


def _begins(unit: Staged) -> Flags:
    """Whether each row is the first row of its record."""
    begins: Flags = np.diff(unit.record, prepend=-1) != 0
    return begins


def _duplicates(staged: Sequence[StagedFile]) -> Flags:
    """For each record that has rows, whether an earlier record is the same conversation.

    Keys are compared a sixteenth at a time, so that memory is little more than the 16 bytes of each key.
    """
    count = sum(int(_begins(file.open()).sum()) for file in staged)
    keys, filled = np.empty((count, 2), dtype="<u8"), 0
    for file in staged:
        unit = file.open()
        own = unit.origins["key"][_begins(unit)]
        keys[filled : filled + len(own)] = own
        filled += len(own)
    out = np.zeros(count, dtype=bool)
    share = keys.view(np.uint8)[:, 7] >> 4
    for number in range(16):
        chosen = np.flatnonzero(share == number)
        # Sorting is stable: of equal keys the first in input order comes first.
        order = chosen[np.lexsort((keys[chosen, 1], keys[chosen, 0]))]
        again = np.all(keys[order[1:]] == keys[order[:-1]], axis=1)
        out[order[1:][again]] = True
    return out


def _fitted(chosen: Iterable[Chosen], job: Job, ledger: Ledger) -> Iterator[Rows]:
    if job.pack is not None:
        yield from _packed(chosen, job.pack)
    elif job.fit == "blocks":
        assert job.max_tokens is not None
        yield from stream_blocks(_unpacked(chosen), job.max_tokens, ledger=ledger)
    else:
        yield from _unpacked(chosen)


def _unpacked(chosen: Iterable[Chosen]) -> Iterator[Rows]:
    for part in chosen:
        rows = part.file.open().rows()
        yield rows if len(part.rows) == len(rows) else rows.take(part.rows)


def _packed(chosen: Iterable[Chosen], capacity: int) -> Iterator[Rows]:
    """Rows packed best-fit: planned `WINDOW` rows at a time, gathered `CHUNK_TOKENS` at a time."""
    window: list[Chosen] = []
    free = WINDOW
    for part in chosen:
        pending = part.rows
        while len(pending):
            window.append(Chosen(part.file, pending[:free]))
            pending, free = pending[free:], free - len(window[-1].rows)
            if not free:
                yield from _pack_window(window, capacity)
                window, free = [], WINDOW
    if window:
        yield from _pack_window(window, capacity)


def _pack_window(window: Sequence[Chosen], capacity: int) -> Iterator[Rows]:
    part_of = np.repeat(np.arange(len(window), dtype=np.uint32), [len(part.rows) for part in window])
    row_of = np.concatenate([part.rows for part in window])
    tokens, spans = np.concatenate([_sizes(part.file.open(), part.rows) for part in window], axis=1)
    opened = lru_cache(MAPPED)(StagedFile.open)
    bins = pack_lengths(tokens, capacity)
    until = np.cumsum(np.add.reduceat(tokens[bins.order], bins.first[:-1]), dtype=np.int64)
    first = 0
    while first < len(bins):
        before = until[first - 1] if first else 0
        last = max(first + 1, int(np.searchsorted(until, before + CHUNK_TOKENS, side="right")))
        items = bins.order[bins.first[first] : bins.first[last]]
        out = _Gather(tokens[items], spans[items])
        by_part = np.argsort(part_of[items], kind="stable")
        for here in np.split(by_part, np.flatnonzero(np.diff(part_of[items[by_part]])) + 1):
            out.put(here, opened(window[part_of[items[here[0]]]].file), row_of[items[here]])
        yield out.rows(bins.first[first : last + 1] - bins.first[first])
        first = last


def _sizes(unit: Staged, rows: Numbers) -> NDArray[np.int32]:
    """Tokens and spans of each of these rows, in a narrow type because there may be very many of them."""
    return np.stack([np.diff(unit.row_start)[rows], np.diff(unit.first_span)[rows]]).astype(np.int32)


class _Gather:
    """Rows of one conversation each from several staged files: every token is copied once, to its place."""

    def __init__(self, tokens: NDArray[np.int32], spans: NDArray[np.int32]) -> None:
        self._start, self._first_span = offsets(tokens), offsets(spans)
        self._ids = np.empty(self._start[-1], dtype=np.uint32)
        self._spans = np.empty(self._first_span[-1], dtype=SPAN)
        self._origins = np.empty(len(tokens), dtype=ORIGIN)
        self._files: dict[File, int] = {}

    def put(self, here: Index, unit: Staged, rows: Numbers) -> None:
        """Copy these rows of a staged file to the positions `here`."""
        copy_ranges(unit.ids, unit.row_start[rows], unit.row_start[rows + 1], self._ids, self._start[here])
        first, last = unit.first_span[rows], unit.first_span[rows + 1]
        copy_ranges(as_bytes(unit.spans), first, last, as_bytes(self._spans), self._first_span[here])
        as_bytes(self._origins)[here] = as_bytes(unit.origins).take(rows)
        # Every staged row has a file; padding is added later.
        numbers = np.array([self._files.setdefault(file, len(self._files)) for file in unit.files], dtype=np.uint32)
        self._origins["file"][here] = numbers[unit.origins["file"][rows]]
        unit.release()

    def rows(self, first_segment: Index) -> Rows:
        return Rows(self._ids, self._spans, self._first_span, self._origins, first_segment, tuple(self._files))
