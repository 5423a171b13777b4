"""Write the shards of a remote dataset, on any machine, from rendered units in an object store.

The needed rows are first copied to a temporary folder, so memory use does not grow with the size of the shards.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from chatmill.prepare.assemble import by_file, write_shard
from chatmill.prepare.select import Numbers, StagedFile
from chatmill.prepare.shard_plan import ShardPlan
from chatmill.prepare.staging import StagedHead, save
from chatmill.remote import objects
from chatmill.remote.threads import in_threads
from chatmill.remote.urls import Url
from chatmill.rows import SPAN, Rows
from chatmill.store.layout import shard_name
from chatmill.store.metadata import ShardInfo
from chatmill.store.remote_publish import RemoteTarget, Uploads


def write_remote_shards(plans: Sequence[ShardPlan], target: RemoteTarget, *, vocab_size: int) -> list[ShardInfo]:
    """Write the files of the given shards, and upload each file with its hash as its name."""
    infos = []
    with tempfile.TemporaryDirectory(prefix="chatmill-") as name, Uploads(target) as uploads:
        folder = Path(name)
        for plan in _copied(plans, folder):
            infos.append(write_shard(plan, folder / plan.split, vocab_size=vocab_size))
            uploads.add_shard(folder / plan.split / shard_name(plan.number), infos[-1])
        uploads.wait()
    return infos


def _copied(plans: Sequence[ShardPlan], folder: Path) -> Iterator[ShardPlan]:
    """Copy the needed rows to local files, and yield the shard plans with these files instead of the staged objects."""
    parts: dict[StagedFile, list[Numbers]] = {}
    for plan in plans:
        for here in by_file(plan.of):
            parts.setdefault(plan.staged[plan.of[here[0]]], []).append(plan.row[here])
    wanted = {file: np.sort(np.concatenate(rows)) for file, rows in parts.items()}
    copies = {file: folder / f"{number}.rows" for number, file in enumerate(wanted)}
    in_threads(lambda file: _copy_rows(file, wanted[file], copies[file]), list(wanted))
    for plan in plans:
        row = np.empty_like(plan.row)
        for here in by_file(plan.of):
            row[here] = np.searchsorted(wanted[plan.staged[plan.of[here[0]]]], plan.row[here])
        yield replace(plan, staged=tuple(StagedFile(copies[file], file.only_val, 0) for file in plan.staged), row=row)


def _copy_rows(file: StagedFile, wanted: Numbers, path: Path) -> None:
    """Copy the rows with the given indices from a staged object to a local file; the indices must be in ascending
    order.
    """
    assert isinstance(file.path, Url)
    head = StagedHead(objects.read(file.path, 0, file.head_size), lines_before=file.lines_before)
    first, stop = int(wanted[0]), int(wanted[-1]) + 1
    tokens, spans = (
        np.frombuffer(objects.read(file.path, *head.bytes_of(name, *start[[first, stop]].tolist())), dtype=dtype)
        for name, start, dtype in (("ids", head.row_start, head.token_dtype), ("spans", head.first_span, SPAN))
    )
    span = head.first_span[first : stop + 1]
    each = np.arange(stop - first + 1, dtype=np.int64)
    rows = Rows(tokens.astype(np.uint32), spans, span - span[0], head.origins[first:stop], each, head.files)
    save(path, rows.take(wanted - first), head.record[wanted], tokens=head.token_dtype, extra=None)
