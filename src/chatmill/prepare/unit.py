"""Units of work: read, render and fit one part of the input, and write its rows to staged files."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count as numbers
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from chatmill.answers import mask_answers, note_untrained
from chatmill.errors import ChatmillError, DataError, RecordError
from chatmill.fit import truncate_with_sources
from chatmill.format import Renderer, TemplateOptions, before_cutting, open_renderer, requires_user
from chatmill.ledger import Ledger
from chatmill.prepare.dedupe_columns import Columns, dedupe_columns, joined_columns
from chatmill.prepare.filters import (
    EXCLUDE,
    NAMES,
    TIME_LIMIT,
    Predicate,
    failed_row_filters,
    failed_test,
    filters_of,
    has_row_filters,
    reason,
    record_tests,
)
from chatmill.prepare.job import Job
from chatmill.prepare.rejects import note_keys
from chatmill.prepare.staging import Staged, StagedHead, read_head, save, trained_of_rows
from chatmill.prepare.unroll import render_unrolled, unrolled
from chatmill.records import BytesRead, ChatColumns, FilePart, ReadLog, Record, Unrolled, keys_of, read_blocks
from chatmill.records.files import shown
from chatmill.records.raw_files import has_bytes
from chatmill.remote.objects import MissingObjectError, RemoteError
from chatmill.remote.urls import Place, Url
from chatmill.rows import EMPTY, File, Index, Rows, TrainOn, concat
from chatmill.store.layout import token_dtype

CHUNK = 512
"""Number of records to render at a time if they are not in columns."""
WARM_SOURCES = 8
"""Number of sources from which a renderer fills its caches before the workers start."""
WARM_BLOCKS = 2
"""Number of blocks of each of these sources from which the caches are filled."""
FILE_TOKENS = 2**22
"""Number of tokens after which a unit starts another staged file."""
Batch = Sequence[Record] | Sequence[Unrolled]
Block = ChatColumns | list[Record]
"""A block of records, as `read_blocks` yields it."""
REMOVED = np.dtype([("line", "<u8"), ("filter", "u1")])
"""A record removed by a filter: its line in the unit, and the index of the filter."""


@dataclass(frozen=True)
class Unit:
    number: int
    part: FilePart
    name: str
    """File name as stored in the dataset, never an absolute path."""
    train_on: TrainOn
    only_val: bool
    size: int
    """Number of input bytes, used to report progress."""
    source: int = 0
    """Index of the source in the job."""
    predicates: tuple[Predicate, ...] = ()
    """User functions; a record is kept only if all of them return True."""
    excluded_ids: frozenset[str] = frozenset()

    def staged_name(self, number: int) -> str:
        return f"unit_{self.number:06d}_{number:04d}.rows"


@dataclass(frozen=True)
class Done:
    """The result of a unit without its rows, which are in staged files; small enough to send to the main process."""

    number: int
    files: int
    lines: int
    """Number of lines that the unit read."""
    ledger: Ledger
    faults: tuple[RecordError, ...]
    read: BytesRead
    heads: tuple[bytes, ...] = ()
    """For units staged in an object store: the bytes of each staged file before its tokens and spans."""
    resumed: bool = False
    """Whether the unit was completed by an interrupted build."""


def job_renderer(job: Job) -> Renderer:
    """Open the renderer of a job. Answers without a preceding user turn are masked later, after truncation."""
    template = TemplateOptions(
        chat_template=job.chat_template,
        arguments=job.template_args,
        mask=job.mask,
        date=job.template_date,
        text_tokens=job.text_tokens,
        allow_no_end_token=job.allow_no_end_token,
        strip_prompt_space=job.strip_prompt_space,
    )
    return before_cutting(open_renderer(job.format, job.tokenizer, add_tokens=job.add_tokens, template=template))


def renderer_identity(renderer: Renderer) -> dict[str, Any]:
    """Return the format, tokenizer hash and control tokens, which must be the same in all processes and in a resumed
    build.
    """
    tokenizer = renderer.tokenizer
    return {"format": renderer.to_json(), "tokenizer": tokenizer.sha256, "control": dict(tokenizer.control_ids)}


def same_renderer(job: Job, identity: Mapping[str, Any]) -> Renderer:
    """Reopen the renderer of a job in another process; raise `DataError` if its files have changed."""
    renderer = job_renderer(job)
    own = renderer_identity(renderer)
    for name, file in (
        ("tokenizer", job.tokenizer),
        ("control", job.tokenizer),
        ("format", job.format or job.tokenizer),
    ):
        if own[name] != identity[name]:
            what = "the control tokens" if name == "control" else f"the {name}"
            raise DataError(
                f"{file}: {what} changed during the build, or differs on another node; "
                "build again with the same version on all nodes"
            )
    return renderer


def run_unit(
    unit: Unit, job: Job, renderer: Renderer, folder: Place, *, read: Callable[..., Iterable[Block]] = read_blocks
) -> Done:
    """Read, render and fit one unit. With `on_error` "stop", raise the first error of the unit.

    `read` yields the records of the unit, and has the same parameters as `read_blocks`.
    """
    records = _Records(unit, job, renderer, read)
    vocab_size = renderer.tokenizer.vocab_size
    out = _StagedFiles(unit, token_dtype(vocab_size), folder)
    for batch in records:
        rows, record_of, rendered = records.render(batch)
        _check_ids(rows, vocab_size)
        columns = dedupe_columns(rendered, rows, record_of, job)
        rows, record_of = records.filtered(rows, record_of)
        rows, source = _fitted(rows, job, renderer, records.ledger)
        record_of = record_of[source]
        out.add(rows, record_of, len(rendered), columns)
    if records.stopped_by is not None:
        raise records.stopped_by
    out.save(records)
    was_read, heads = records.log.bytes_read(), tuple(filter(None, out.heads))
    return Done(unit.number, out.number, records.lines, records.ledger, tuple(records.faults), was_read, heads)


def first_blocks(units: Iterable[Unit]) -> Iterator[ChatColumns]:
    """Yield the first `WARM_BLOCKS` blocks of conversations of each source, for the first `WARM_SOURCES` sources with
    plain local files. Invalid records are ignored, because the worker that reads their unit reports them.
    """
    parts = {unit.source: unit.part for unit in reversed([*units])}
    for source in sorted(parts)[:WARM_SOURCES]:
        part = parts[source]
        if not (isinstance(part.path, Path) and part.path.is_file()):
            continue
        with suppress(ChatmillError, OSError):
            blocks = read_blocks(part, on_fault=lambda fault: None, on_end=lambda lines: None)
            yield from (block for block in islice(blocks, WARM_BLOCKS) if isinstance(block, ChatColumns))


def _fitted(rows: Rows, job: Job, renderer: Renderer, ledger: Ledger) -> tuple[Rows, Index]:
    """Truncate rendered rows; also return, for each truncated row, the index of its rendered row. With `--fit blocks`,
    rows are not truncated.
    """
    if job.fit == "blocks":
        return rows, np.arange(len(rows), dtype=np.int64)
    fit = partial(truncate_with_sources, rule=job.fit, ledger=ledger, require_terminators=job.require_terminators)
    if not requires_user(renderer):
        note_untrained(rows, ledger)
        return fit(rows, job.capacity)
    # Truncation may remove the user turn before an answer, so mask answers and drop rows only afterwards.
    cut, source = fit(rows, job.capacity, drop_untrained=False)
    cut = mask_answers(cut)
    note_untrained(cut, ledger)
    kept, of_cut = fit(cut, None)
    return kept, source[of_cut]


def finished(unit: Unit, folder: Place) -> Done | None:
    """Return the result of a unit completed by an interrupted build, or None if the unit must run again.

    Raise `ChatmillError` if the input of the unit has changed.
    """
    heads: list[bytes] = []
    for number in numbers():
        staged: StagedHead
        try:
            if isinstance(folder, Url):
                heads.append(read_head(folder / unit.staged_name(number)))
                staged = StagedHead(heads[-1])
            else:
                staged = Staged(folder / unit.staged_name(number), check=True)
        except MissingObjectError:
            return None
        except RemoteError:
            raise
        except (DataError, OSError):
            return None
        if (counts := staged.extra["ledger"]) is not None:
            ledger = Ledger.from_json(counts)
            # Run the unit again, because its errors must be reported and are not staged.
            if ledger.total("rejected").rows:
                return None
            read = BytesRead.from_json(staged.extra["read"])
            if not has_bytes(unit.part.path, read):
                raise ChatmillError(
                    f"{shown(unit.part.path)}: changed since the interrupted build read it; build without --resume"
                )
            return Done(unit.number, number + 1, staged.extra["lines"], ledger, (), read, tuple(heads), resumed=True)
    raise AssertionError


def trained_tokens(rows: Rows) -> int:
    return int(rows.spans["length"][rows.spans["weight"] > 0].sum())


class _Records:
    """Yields the renderable records of a unit in batches, and collects errors and counts."""

    def __init__(self, unit: Unit, job: Job, renderer: Renderer, read: Callable[..., Iterable[Block]]) -> None:
        self.ledger = Ledger()
        self.faults: list[RecordError] = []
        self.lines = 0
        self.log = ReadLog()
        self.stopped_by: RecordError | None = None
        self._unit, self._job, self._renderer, self._read = unit, job, renderer, read
        self._filters = filters_of(job, unit.source)
        self._tests = record_tests(self._filters, unit.predicates)
        if unit.excluded_ids:
            self._tests = ((EXCLUDE, lambda record: record.id not in unit.excluded_ids), *self._tests)
        self._removed_line, self._removed_by = array("Q"), array("B")
        self.excluded_ids: set[str] = set()

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches of records in input order: as `ChatColumns` if possible, otherwise as lists that render to
        about `CHUNK` rows.
        """
        waiting: list[Any] = []
        count = 0
        try:
            blocks = self._read(
                self._unit.part, on_fault=self._fault, on_end=partial(setattr, self, "lines"), log=self.log
            )
            for block in blocks:
                if not isinstance(block, ChatColumns):
                    note_keys(self.ledger, block)
                if isinstance(block, ChatColumns) and self._keeps_columns:
                    block = self._renderer.lay_out_columns(block)
                if isinstance(block, ChatColumns) and self._keeps_columns:
                    if waiting:
                        yield waiting
                        waiting, count = [], 0
                    yield block
                    continue
                for record in self._renderable(self._passed(block) if self._tests else block):
                    waiting.append(record)
                    count += len(record.rows) if isinstance(record, Unrolled) else 1
                    if count >= CHUNK:
                        yield waiting
                        waiting, count = [], 0
        except RecordError as fault:
            # Rendering the records before the invalid one may raise another error, which must be reported first.
            self.stopped_by = fault
        if waiting:
            yield waiting

    @property
    def _keeps_columns(self) -> bool:
        """Whether records can stay in `ChatColumns`, because no step needs `Record` objects."""
        return not (self._job.unroll or self._tests)

    def _passed(self, records: Iterable[Record]) -> Iterator[Record]:
        """Yield the records that pass the filters applied before rendering."""
        for record in records:
            try:
                name = failed_test(record, self._tests)
            except RecordError as fault:
                if fault.kind == TIME_LIMIT:
                    # Stop even with `on_error` "skip": a timeout depends on the machine, but the rows of a dataset must
                    # not.
                    raise
                self._fault(fault)
                continue
            if name is None:
                yield record
                continue
            self.ledger.add("read", rows=1)
            self.ledger.add("filtered", reason(name), rows=1)
            self._removed_line.append(record.line)
            self._removed_by.append(NAMES.index(name))
            if name == EXCLUDE and record.id is not None:
                self.excluded_ids.add(record.id)

    def filtered(self, rows: Rows, record_of: Index) -> tuple[Rows, Index]:
        """Return the rendered rows that pass the row filters, and the record index of each row."""
        if not has_row_filters(self._filters):
            return rows, record_of
        tokens = np.diff(rows.row_start)
        # The renderer leaves answers without a preceding user turn unmasked until rows are truncated, so mask them here
        # before counting trained tokens.
        trained = trained_of_rows(mask_answers(rows) if requires_user(self._renderer) else rows)
        failed = failed_row_filters(self._filters, tokens, trained, record_of)
        if not failed.any():
            return rows, record_of
        for number in np.unique(failed[failed > 0]).tolist():
            those = failed == number
            counts = {"tokens": int(tokens[those].sum()), "trained": int(trained[those].sum())}
            self.ledger.add("dropped", reason(NAMES[number - 1]), rows=int(those.sum()), **counts)
        first = np.flatnonzero((np.diff(record_of, prepend=-1) != 0) & (failed > 0))
        self._removed_line.extend(rows.origins["line"][first].tolist())
        self._removed_by.extend((failed[first] - 1).tolist())
        kept = np.flatnonzero(failed == 0)
        return rows.take(kept), record_of[kept]

    def removed(self) -> NDArray[Any]:
        """Return the line number of each record removed by a filter, and the index of the filter, sorted by line
        number.
        """
        removed = np.empty(len(self._removed_line), dtype=REMOVED)
        removed["line"], removed["filter"] = self._removed_line, self._removed_by
        return removed[np.argsort(removed["line"], kind="stable")]

    def _renderable(self, block: Iterable[Record]) -> Iterator[Record] | Iterator[Unrolled]:
        if not self._job.unroll:
            return self._renderer.renderable(block, self._fault)
        train_on = self._unit.train_on
        return unrolled(block, self._renderer, train_on=train_on, on_reject=self._fault, ledger=self.ledger)

    def render(self, batch: Batch) -> tuple[Rows, Index, Batch]:
        """Return the rows of a batch, the record index of each row, and the rendered records.

        Records that cannot be encoded are left out.
        """
        while len(batch):
            try:
                rows, record_of = self._rendered(batch)
            except RecordError as fault:
                self._fault(fault)
                batch = cast(Batch, [each for each in batch if _place(each) != (fault.file, fault.line)])
                continue
            self.ledger.add("read", rows=len(batch))
            return rows, record_of, batch
        return EMPTY, np.zeros(0, dtype=np.int64), batch

    def _rendered(self, batch: Batch) -> tuple[Rows, Index]:
        if not self._job.unroll:
            records = cast(Sequence[Record], batch)
            rows = self._renderer.render(records, train_on=self._unit.train_on, ledger=self.ledger)
            rows.origins["key"] = np.frombuffer(keys_of(records), dtype="<u8").reshape(-1, 2)
            self.ledger.add("rendered", rows=len(rows), tokens=len(rows.ids), trained=trained_tokens(rows))
            return rows, np.arange(len(rows), dtype=np.int64)
        conversations = cast(Sequence[Unrolled], batch)
        rows = render_unrolled(self._renderer, conversations, self.ledger)
        record_of = np.repeat(np.arange(len(batch), dtype=np.int64), [len(each.rows) for each in conversations])
        # All rows of a conversation have the same key, so they go to the same split and are deduplicated together.
        keys = np.frombuffer(keys_of([each.record for each in conversations]), dtype="<u8").reshape(-1, 2)
        rows.origins["key"] = keys[record_of]
        return rows, record_of

    def _fault(self, fault: RecordError) -> None:
        if self._job.on_error == "stop":
            raise fault
        self.faults.append(fault)
        self.ledger.add("read", rows=1)
        self.ledger.add("rejected", fault.kind, rows=1)


def _place(each: Record | Unrolled) -> tuple[str, int]:
    record = each.record if isinstance(each, Unrolled) else each
    return record.file, record.line


class _StagedFiles:
    """Writes the staged files of a unit; the last file contains the ledger, which marks the unit as complete."""

    def __init__(self, unit: Unit, dtype: np.dtype[np.unsignedinteger], folder: Place) -> None:
        self._unit, self._dtype, self._folder = unit, dtype, folder
        self.heads: list[bytes] = []
        self.number = 0
        self._begin()

    def _begin(self) -> None:
        self._rows: list[Rows] = []
        self._record: list[Index] = []
        self._columns: list[Columns] = []
        self._records = self._tokens = 0

    def add(self, rows: Rows, source: Index, records: int, columns: Columns) -> None:
        if self._tokens >= FILE_TOKENS:
            self.save(None)
        self._rows.append(rows)
        self._record.append(source + self._records)
        self._columns.append(columns)
        self._records += records
        self._tokens += len(rows.ids)

    def save(self, finished: _Records | None) -> None:
        """Write a staged file; `finished` is None except for the last file of the unit."""
        rows = concat(self._rows)
        rows = replace(rows, files=tuple(File(file.source, self._unit.name) for file in rows.files))
        record = np.concatenate([np.empty(0, dtype=np.int64), *self._record])
        extra: dict[str, Any] = {"records": self._records, "ledger": None}
        if finished is not None:
            read = finished.log.bytes_read().to_json()
            extra |= {"ledger": finished.ledger.to_json(), "lines": finished.lines, "read": read}
            if self._unit.excluded_ids:
                extra["excluded_ids"] = sorted(finished.excluded_ids)
        place = self._folder / self._unit.staged_name(self.number)
        columns = dict(joined_columns(self._columns))
        if finished is not None and len(removed := finished.removed()):
            columns["removed"] = removed
        self.heads.append(save(place, rows, record, tokens=self._dtype, extra=extra, columns=columns))
        self.number += 1
        self._begin()


def _check_ids(rows: Rows, vocab_size: int) -> None:
    """Raise `RecordError` if a token id is outside the vocabulary, because the id may not fit the stored dtype."""
    if len(rows.ids) and (largest := int(rows.ids.max())) >= vocab_size:
        origin = rows.origins[np.searchsorted(rows.segment_start, int(rows.ids.argmax()), side="right") - 1]
        fault = RecordError(f"token id {largest}", f"expected an id below {vocab_size}", kind="vocabulary")
        raise fault.at(rows.files[origin["file"]].path, int(origin["line"]))
