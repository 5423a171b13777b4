"""Read all records of the inputs in several processes and count them, for `chatmill check`.

Workers read parts of files and return only counts, the first record and the errors. The counts are added up in the
order of the parts, so the result does not depend on the number of workers.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial

import msgspec
import numpy as np

from chatmill.errors import RecordError
from chatmill.ledger import Ledger
from chatmill.prepare.engine import LocalEngine
from chatmill.prepare.rejects import note_keys
from chatmill.records import BytesRead, ChatColumns, FilePart, InputFiles, ReadLog, Record, read_blocks
from chatmill.records.read import OnError, plan_files
from chatmill.records.record import ROLES
from chatmill.records.shapes import ShapeOptions
from chatmill.remote.objects import RemoteError
from chatmill.remote.urls import Place

PART_BYTES = 16 * 2**20
"""Size of a part in bytes, if its file can be split."""


@dataclass
class Survey:
    """Counts of the records in one or more parts of the input, and the first record."""

    records: int = 0
    with_assistant: int = 0
    roles: Counter[str] = field(default_factory=Counter)
    sources: Counter[str] = field(default_factory=Counter)
    first: Record | None = None
    ledger: Ledger = field(default_factory=Ledger)

    def add(self, block: ChatColumns | Sequence[Record]) -> None:
        self.records += len(block)
        self.first = self.first or block[0]
        self.ledger.add("read", rows=len(block))
        if isinstance(block, ChatColumns):
            counts = np.bincount(block.roles, minlength=len(ROLES)).tolist()
            self.roles.update({role: count for role, count in zip(ROLES, counts, strict=True) if count})
            self.sources[block.source] += len(block)
            is_assistant = block.roles == ROLES.index("assistant")
            self.with_assistant += int(np.logical_or.reduceat(is_assistant, block.first_message[:-1]).sum())
            return
        note_keys(self.ledger, block)
        for record in block:
            roles = [message.role for message in record.messages]
            self.roles.update(roles)
            self.sources[record.source] += 1
            self.with_assistant += "assistant" in roles

    def merge(self, other: Survey) -> None:
        self.records += other.records
        self.with_assistant += other.with_assistant
        self.roles.update(other.roles)
        self.sources.update(other.sources)
        self.ledger.merge(other.ledger)


@dataclass
class _PartRead:
    """The result of reading one part of a file; line numbers start at 1 in each part."""

    survey: Survey
    lines: int
    read: BytesRead
    faults: list[RecordError]


def survey(
    inputs: Sequence[str],
    *,
    shape: str | None,
    options: ShapeOptions,
    on_error: OnError,
    on_reject: Callable[[RecordError], None],
    workers: int | None = None,
    on_records: Callable[[int], None] = lambda count: None,
    part_bytes: int = PART_BYTES,
) -> tuple[Survey, list[FilePart]]:
    """Count all records; return the counts, and a `FilePart` with the record shape of each file.

    Errors are passed to `on_reject` in the order of the records; with `on_error` "stop", the first error is raised.
    """
    before = InputFiles([inputs])
    planned = partial(plan_files, before.groups[0], shape=shape, options=options, on_error=on_error)
    files = planned()
    parts = [piece for part in files for piece in part.cut(part_bytes, end=before.sizes[part.path])]
    total, line, read = Survey(), 0, list[tuple[Place, BytesRead]]()
    try:
        with closing(_results(parts, workers, on_error, on_records)) as results:
            for part, done in zip(parts, results, strict=True):
                line = line if part.start else 0
                if total.first is None and (first := done.survey.first) is not None:
                    total.first = msgspec.structs.replace(first, line=first.line + line)
                total.merge(done.survey)
                for fault in done.faults:
                    fault.line += line
                    if on_error == "stop":
                        raise fault
                    on_reject(fault)
                line += done.lines
                read.append((part.path, done.read))
    except (RecordError, RemoteError):
        # If a file changed while it was being read, report the change, because it may have caused the error.
        before.check_times()
        raise
    before.check(read, is_planned=lambda: planned() == files)
    return total, files


def _results(
    parts: Sequence[FilePart], workers: int | None, on_error: OnError, on_records: Callable[[int], None]
) -> Generator[_PartRead, None, None]:
    engine = LocalEngine(workers, if_killed="run again with fewer --workers")
    # Do not fork if this process runs other threads, such as those for network requests: the workers could deadlock.
    if engine.workers == 1 or len(parts) <= 1 or threading.active_count() > 1:
        yield from (_read(part, on_error, on_records) for part in parts)
        return
    read = partial(_read, on_error=on_error)
    with closing(engine.in_order(read, parts, processes=min(engine.workers, len(parts)))) as results:
        for done in results:
            on_records(done.survey.records)
            yield done


def _read(part: FilePart, on_error: OnError, on_records: Callable[[int], None] = lambda count: None) -> _PartRead:
    """Read one part of a file; with `on_error` "stop", stop at the first invalid record."""
    counts, log, lines, faults = Survey(), ReadLog(), [0], list[RecordError]()

    def on_fault(fault: RecordError) -> None:
        faults.append(fault)
        if on_error == "stop":
            raise fault

    with suppress(RecordError):
        for block in read_blocks(part, on_fault=on_fault, on_end=lines.append, log=log):
            counts.add(block)
            on_records(len(block))
    return _PartRead(counts, lines[-1], log.bytes_read(), faults)
