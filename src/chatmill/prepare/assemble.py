"""Assembly: write the shards of a dataset from staged rows, as planned by `select` and `shard_plan`.

Shards are written one after the other, or by several processes that call `write_shard`. With `--fit blocks`, shards are
always written one after the other, because the start of a block depends on all tokens before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from chatmill.errors import DataError, one_line
from chatmill.fit import stream_blocks
from chatmill.ledger import Ledger
from chatmill.prepare.job import Job
from chatmill.prepare.select import Chosen, Numbers, StagedFile, smallest_shares
from chatmill.prepare.shard_plan import ShardPlan, by_source, plan_shards
from chatmill.prepare.staging import Staged
from chatmill.prepare.unit import trained_tokens
from chatmill.rows import ORIGIN, SPAN, File, Index, Part, Rows, as_bytes, copy_ranges, offsets
from chatmill.store.metadata import ShardInfo, SplitInfo
from chatmill.store.write import SplitWriter

CHUNK_TOKENS = 2**24
"""Number of tokens to gather at a time, to limit memory use. Gathering a chunk of packed rows opens most of the staged
files.
"""
MAPPED = 256
"""Maximum number of staged files mapped at once. Each mapped file uses a file descriptor, and processes are often
limited to 1,024.
"""
ANY_SIZE = 2**62


def assemble(
    staged: Sequence[StagedFile],
    chosen: Mapping[str, Sequence[Chosen]],
    job: Job,
    *,
    vocab_size: int,
    staging: Path,
    ledger: Ledger,
    on_tokens: Callable[[int], None] = lambda tokens: None,
    on_shard: Callable[[Path, ShardInfo], None] = lambda folder, info: None,
) -> dict[str, SplitInfo]:
    """Write the selected rows of each split to a folder in `staging`; raise `DataError` if a split is empty.

    `on_shard` is called with the folder of each completed shard.
    """
    splits = {}
    for name in split_names(job):
        with SplitWriter(
            staging / name, vocab_size=vocab_size, shard_tokens=job.shard_tokens, on_shard=on_shard
        ) as writer:
            for source, rows in _rows(name, chosen[name], job, ledger):
                writer.append(rows, source=source)
                conversations = int(np.count_nonzero(rows.spans["part"][rows.first_span[:-1]] != Part.PAD))
                ledger.add("stored", rows=conversations, tokens=len(rows.ids), trained=trained_tokens(rows))
                on_tokens(len(rows.ids))
            splits[name] = writer.close()
    check_filled(splits, staged, job, ledger)
    return splits


def assemble_by_shard(
    staged: Sequence[StagedFile],
    chosen: Mapping[str, Sequence[Chosen]],
    job: Job,
    *,
    write: Callable[[Iterable[ShardPlan]], Generator[ShardInfo, None, None]],
    ledger: Ledger,
    on_tokens: Callable[[int], None],
) -> dict[str, SplitInfo]:
    """Build the splits as `assemble` does, but in parallel: `write` must write the planned shards, and yield their
    `ShardInfo` in the same order. `--fit blocks` is not supported.
    """
    numbers: dict[str, dict[File, int]] = {name: {} for name in split_names(job)}
    shards: dict[str, list[ShardInfo]] = {name: [] for name in numbers}
    started: deque[str] = deque()

    def plans() -> Iterator[ShardPlan]:
        for name in numbers:
            for plan in plan_shards(name, chosen[name], job):
                numbers[name] |= plan.files
                started.append(name)
                yield plan

    with closing(write(plans())) as written:
        for info in written:
            shards[started.popleft()].append(info)
            ledger.add("stored", rows=info.num_segments, tokens=info.num_tokens, trained=info.num_trained_tokens)
            on_tokens(info.num_tokens)
    splits = {
        name: SplitInfo(tuple(shards[name]), tuple(sorted(files, key=files.__getitem__)))
        for name, files in numbers.items()
    }
    check_filled(splits, staged, job, ledger)
    return splits


def split_names(job: Job) -> tuple[str, ...]:
    return ("train", "val") if job.wants_val else ("train",)


def write_shard(plan: ShardPlan, folder: Path, *, vocab_size: int) -> ShardInfo:
    """Write one shard of a split to `folder`, with the same bytes that `assemble` writes."""
    with SplitWriter(
        folder, vocab_size=vocab_size, shard_tokens=ANY_SIZE, first=plan.number, files=plan.files
    ) as writer:
        for rows in rows_of(plan):
            writer.append(rows, source=plan.source)
        [info] = writer.close().shards
    return info


def check_filled(splits: Mapping[str, SplitInfo], staged: Sequence[StagedFile], job: Job, ledger: Ledger) -> None:
    """Raise `DataError` if a split is empty, or if the training split has no rows of a source in the mix."""
    for name, split in splits.items():
        if split.num_episodes == 0:
            raise DataError(f"the split {name} would be empty; {_why_empty(name, splits, staged, job, ledger)}")
    filled = {shard.source for shard in splits["train"].shards}
    for mix in job.default_mix().values():
        if empty := [one_line(name) for name in mix if name not in filled]:
            raise DataError(
                f"no records of {', '.join(empty)} are left to train on, but the recipe mixes "
                f"{', '.join(map(one_line, mix))}; remove the source from the recipe, or change its filters"
            )


def _why_empty(
    name: str, splits: Mapping[str, SplitInfo], staged: Sequence[StagedFile], job: Job, ledger: Ledger
) -> str:
    own_shares = any(source.val_split is not None for source in job.sources)
    if any(split.num_episodes for split in splits.values()) and (job.val_split or own_shares):
        if own_shares:
            return f"use more records, or a {'larger' if name == 'val' else 'smaller'} val_split for the sources"
        if name == "val" and (shares := smallest_shares(staged, job)) is not None:
            by_hash, exact = (f"--val-split {share:.16g}" for share in shares)
            if job.split == "shuffle":
                return f"use at least {exact}"
            return f"use at least {by_hash}, or at least {exact} with --split shuffle --seed {job.seed}"
        return f"use more records, or a {'larger' if name == 'val' else 'smaller'} --val-split"
    lost = [
        f"{entry.rows} {reason}" for bucket, reason, entry in ledger if bucket in ("rejected", "filtered", "dropped")
    ]
    return f"no records are left to train on ({', '.join(lost) or 'the input has none'})"


def _rows(name: str, chosen: Sequence[Chosen], job: Job, ledger: Ledger) -> Iterator[tuple[str | None, Rows]]:
    """Yield the rows of a split in order, each chunk with the name of its source, or None if the dataset stores no
    sources.
    """
    if job.fit != "blocks":
        for plan in plan_shards(name, chosen, job):
            yield from ((plan.source, rows) for rows in rows_of(plan))
        return
    assert job.max_tokens is not None
    for source, parts in by_source(chosen, job):
        whole = (_taken(part.file.open(), part.rows) for part in parts)
        yield from ((source, rows) for rows in stream_blocks(whole, job.max_tokens, ledger=ledger))


def rows_of(plan: ShardPlan) -> Iterator[Rows]:
    """Yield the rows of a shard in order, in chunks."""
    if plan.first is not None and plan.sizes is not None:
        yield from _packed(plan, plan.first, plan.sizes)
        return
    for run in np.split(np.arange(len(plan.of)), np.flatnonzero(np.diff(plan.of)) + 1):
        yield _taken(plan.staged[plan.of[run[0]]].open(), plan.row[run])


def _taken(unit: Staged, rows: Numbers) -> Rows:
    """Return the given rows of a staged file; `rows` must be in ascending order. Consecutive rows are not copied."""
    if int(rows[-1]) - int(rows[0]) + 1 == len(rows):
        return unit.rows()[int(rows[0]) : int(rows[-1]) + 1]
    return unit.rows().take(rows)


def _packed(plan: ShardPlan, first: Index, sizes: NDArray[np.int32]) -> Iterator[Rows]:
    """Yield packed rows in chunks of about `CHUNK_TOKENS` tokens."""
    opened = lru_cache(MAPPED)(StagedFile.open)
    until = offsets(sizes[0])[first[1:]]
    at = 0
    while at < len(until):
        before = until[at - 1] if at else 0
        stop = max(at + 1, int(np.searchsorted(until, before + CHUNK_TOKENS, side="right")))
        items = slice(int(first[at]), int(first[stop]))
        of, row = plan.of[items], plan.row[items]
        out = _Gather(*sizes[:, items])
        for here in by_file(of):
            out.put(here, opened(plan.staged[of[here[0]]]), row[here])
        yield out.rows(first[at : stop + 1] - first[at])
        at = stop


def by_file(of: Numbers) -> list[Index]:
    """For each file number in `of`, return an array of the positions at which the number occurs."""
    order = np.argsort(of, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(of[order])) + 1)


class _Gather:
    """Gathers single-conversation rows from several staged files, copying each token only once."""

    def __init__(self, tokens: NDArray[np.int32], spans: NDArray[np.int32]) -> None:
        self._start, self._first_span = offsets(tokens), offsets(spans)
        self._ids = np.empty(self._start[-1], dtype=np.uint32)
        self._spans = np.empty(self._first_span[-1], dtype=SPAN)
        self._origins = np.empty(len(tokens), dtype=ORIGIN)
        self._files: dict[File, int] = {}

    def put(self, here: Index, unit: Staged, rows: Numbers) -> None:
        """Copy the given rows of a staged file to the output positions `here`."""
        copy_ranges(unit.ids, unit.row_start[rows], unit.row_start[rows + 1], self._ids, self._start[here])
        first, last = unit.first_span[rows], unit.first_span[rows + 1]
        copy_ranges(as_bytes(unit.spans), first, last, as_bytes(self._spans), self._first_span[here])
        as_bytes(self._origins)[here] = as_bytes(unit.origins).take(rows)
        # Every staged row comes from an input file; padding, which has no input file, is added later.
        numbers = np.array([self._files.setdefault(file, len(self._files)) for file in unit.files], dtype=np.uint32)
        self._origins["file"][here] = numbers[unit.file[rows]]
        unit.release()

    def rows(self, first_segment: Index) -> Rows:
        return Rows(self._ids, self._spans, self._first_span, self._origins, first_segment, tuple(self._files))
