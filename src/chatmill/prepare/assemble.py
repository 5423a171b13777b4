"""Assembly: from staged units, in their order, to the shards of a dataset.

What depends on more than one row is decided here: duplicates, the split, blocks, bins and shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from chatmill.errors import DataError
from chatmill.fit.bins import pack_lengths
from chatmill.fit.blocks import stream_blocks
from chatmill.ledger import Ledger
from chatmill.prepare.job import Job
from chatmill.prepare.staging import Staged
from chatmill.prepare.unit import Unit, trained_tokens
from chatmill.records import shuffle_split
from chatmill.rows import ORIGIN, SPAN, File, Index, Part, Rows, offsets, ragged_index
from chatmill.store.metadata import SplitInfo
from chatmill.store.write import SplitWriter

WINDOW = 2**20
"""Rows whose packing is planned together."""
SLAB = 2**20
"""Tokens that are brought together at a time; memory is a few times this, whatever the size of the data."""

Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Chosen:
    """Rows of one unit that go to one split."""

    unit: Staged
    rows: Index


def assemble(
    units: Sequence[Unit],
    folder: Path,
    job: Job,
    *,
    vocab_size: int,
    staging: Path,
    ledger: Ledger,
    on_tokens: Callable[[int], None] = lambda tokens: None,
) -> dict[str, SplitInfo]:
    """Write `train`, and `val` if one is asked for, under `staging`; an empty one of them is an error."""
    to_val = _split(units, folder, job, ledger)
    splits = {}
    for name in ("train", "val") if job.wants_val else ("train",):
        with SplitWriter(staging / name, vocab_size=vocab_size, shard_tokens=job.shard_tokens) as writer:
            for rows in _made(_chosen(units, folder, to_val, name), job, ledger):
                writer.append(rows)
                padding = rows.spans["part"][rows.first_span[:-1]] == Part.PAD
                ledger.add(
                    "stored",
                    rows=len(rows.origins) - int(padding.sum()),
                    tokens=len(rows.ids),
                    trained=trained_tokens(rows),
                )
                on_tokens(len(rows.ids))
            splits[name] = writer.close()
        if splits[name].num_episodes == 0:
            raise DataError(f"the split {name} would be empty; {_why_empty(name, job)}")
    return splits


def _why_empty(name: str, job: Job) -> str:
    if name == "val" and job.val_split:
        return "give more records, or a larger --val-split"
    return "no record is left to be trained on; look at the ledger with `chatmill render`"


def _split(units: Sequence[Unit], folder: Path, job: Job, ledger: Ledger) -> list[tuple[Flags, Flags]]:
    """For each row of each unit, whether it goes to `val`, and whether it stays at all."""
    duplicate = _duplicates(units, folder) if job.dedupe else None
    shuffled = _shuffled(units, folder, job) if job.split == "shuffle" and job.val_split else None
    out = []
    first_row = first_record = 0
    for unit in units:
        staged = Staged(unit.path(folder))
        if unit.only_val:
            val = np.ones(len(staged), dtype=bool)
        elif shuffled is not None:
            val = shuffled[first_record + staged.record]
        else:
            # The upper 53 bits of the key, as a number from 0 to 1.
            val = (staged.origins["key"][:, 0] >> np.uint64(11)) * 2.0**-53 < job.val_split
        kept = np.ones(len(staged), dtype=bool)
        if duplicate is not None:
            kept = ~duplicate[first_row : first_row + len(staged)]
            if not kept.all():
                gone = staged.rows.take(np.flatnonzero(~kept))
                ledger.add("dropped", "duplicate", rows=len(gone), tokens=len(gone.ids), trained=trained_tokens(gone))
        out.append((val, kept))
        first_row += len(staged)
        first_record += staged.extra["records"]
    return out


def _shuffled(units: Sequence[Unit], folder: Path, job: Job) -> Flags:
    """Whether each record is one of the first of a shuffled list: the split of the primer cache."""
    count = sum(Staged(unit.path(folder)).extra["records"] for unit in units)
    val = np.zeros(count, dtype=bool)
    val[shuffle_split(count, job.val_split, seed=job.seed).val] = True
    return val


def _duplicates(units: Sequence[Unit], folder: Path) -> Flags:
    """Whether an earlier row is of the same conversation, but of another record.

    Keys are compared a sixteenth of them at a time, so that there is little besides the 16 bytes of each.
    """
    staged = [Staged(unit.path(folder)) for unit in units]
    keys = np.concatenate([unit.origins["key"][unit.rows.first_segment[:-1]] for unit in staged])
    records = np.concatenate([unit.record for unit in staged])
    first = np.cumsum([0, *(unit.extra["records"] for unit in staged)])
    records += np.repeat(first[:-1], [len(unit) for unit in staged])
    out = np.zeros(len(keys), dtype=bool)
    share = (keys[:, 0] >> np.uint64(60)).astype(np.uint8)
    for number in range(16):
        chosen = np.flatnonzero(share == number)
        order = chosen[np.lexsort((records[chosen], keys[chosen, 1], keys[chosen, 0]))]
        new = np.ones(len(order), dtype=bool)
        new[1:] = np.any(keys[order[1:]] != keys[order[:-1]], axis=1)
        winner = records[order][np.maximum.accumulate(np.where(new, np.arange(len(order)), 0))]
        out[order] = records[order] != winner
    return out


def _chosen(units: Sequence[Unit], folder: Path, to_val: Sequence[tuple[Flags, Flags]], name: str) -> Iterator[Chosen]:
    for unit, (val, kept) in zip(units, to_val, strict=True):
        rows = np.flatnonzero(kept & (val == (name == "val")))
        if len(rows):
            yield Chosen(Staged(unit.path(folder)), rows)


def _made(chosen: Iterable[Chosen], job: Job, ledger: Ledger) -> Iterator[Rows]:
    if job.pack is not None:
        yield from _packed(chosen, job.pack)
    elif job.fit == "blocks":
        assert job.max_tokens is not None
        yield from stream_blocks(_plain(chosen), job.max_tokens, ledger=ledger)
    else:
        yield from _plain(chosen)


def _plain(chosen: Iterable[Chosen]) -> Iterator[Rows]:
    for part in chosen:
        rows = part.unit.rows
        yield rows if len(part.rows) == len(rows) else rows.take(part.rows)


def _packed(chosen: Iterable[Chosen], capacity: int) -> Iterator[Rows]:
    """Best-fit rows, planned a window at a time and brought together a slab at a time."""
    window: list[Chosen] = []
    for part in chosen:
        start = 0
        while start < len(part.rows):
            room = WINDOW - sum(len(other.rows) for other in window)
            window.append(Chosen(part.unit, part.rows[start : start + room]))
            start += room
            if sum(len(other.rows) for other in window) == WINDOW:
                yield from _pack_window(window, capacity)
                window = []
    if window:
        yield from _pack_window(window, capacity)


def _pack_window(window: Sequence[Chosen], capacity: int) -> Iterator[Rows]:
    lengths = np.concatenate([part.unit.rows.lengths[part.rows] for part in window])
    unit_of = np.repeat(np.arange(len(window)), [len(part.rows) for part in window])
    row_of = np.concatenate([part.rows for part in window])
    bins = pack_lengths(lengths, capacity)
    until = np.cumsum(np.add.reduceat(lengths[bins.order], bins.first[:-1]))
    first = 0
    while first < len(bins):
        before = until[first - 1] if first else 0
        last = max(first + 1, int(np.searchsorted(until, before + SLAB, side="right")))
        items = bins.order[bins.first[first] : bins.first[last]]
        rows = _brought_together([part.unit for part in window], unit_of[items], row_of[items])
        row_start = bins.first[first : last + 1] - bins.first[first]
        yield replace(rows, first_segment=rows.first_segment[row_start])
        for part in window:
            part.unit.release()
        first = last


def _brought_together(units: Sequence[Staged], unit_of: Index, row_of: Index) -> Rows:
    """Rows out of several units, in the order given; every token is copied once."""
    token, segment, span = (np.empty((len(unit_of), 2), dtype=np.int64) for _ in range(3))
    groups = [(units[number].rows, np.flatnonzero(unit_of == number)) for number in np.unique(unit_of).tolist()]
    for rows, here in groups:
        for side in (0, 1):
            row = row_of[here] + side
            token[here, side] = rows.row_start[row]
            segment[here, side] = rows.first_segment[row]
            span[here, side] = rows.first_span[rows.first_segment[row]]
    first_segment, first_span = offsets(segment[:, 1] - segment[:, 0]), offsets(span[:, 1] - span[:, 0])
    origins, spans = np.empty(first_segment[-1], dtype=ORIGIN), np.empty(first_span[-1], dtype=SPAN)
    span_counts = np.empty(first_segment[-1], dtype=np.int64)
    files: dict[File, int] = {}
    for rows, here in groups:
        count = segment[here, 1] - segment[here, 0]
        source, place = ragged_index(segment[here, 0], count), ragged_index(first_segment[here], count)
        origins[place] = rows.origins[source]
        # A staged row is always of a file: padding comes later.
        numbers = np.array([files.setdefault(file, len(files)) for file in rows.files], dtype=np.uint32)
        origins["file"][place] = numbers[rows.origins["file"][source]]
        span_counts[place] = np.diff(rows.first_span)[source]
        count = span[here, 1] - span[here, 0]
        spans[ragged_index(first_span[here], count)] = rows.spans[ragged_index(span[here, 0], count)]
    tokens = zip(unit_of.tolist(), token.tolist(), strict=True)
    ids = np.concatenate([units[number].rows.ids[start:stop] for number, (start, stop) in tokens])
    return Rows(ids, spans, offsets(span_counts), origins, first_segment, tuple(files))
