"""Read the records of files: plan which parts to read, then read them part by part.

    inputs ── plan ──▶ parts ── units ──▶ (line, bytes) ── parser ──▶ records

A part is a file, or the lines in a byte range of a file. A part contains all that a worker needs to read its records.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice, takewhile
from pathlib import Path
from typing import Literal, TypeVar, cast

from chatmill.errors import DataError, RecordError, UsageError, one_line
from chatmill.records import columns, files, tables, units
from chatmill.records.columns import COMPILED, ChatColumns
from chatmill.records.files import open_bytes
from chatmill.records.input_files import InputFiles
from chatmill.records.read_log import ReadLog
from chatmill.records.record import Record
from chatmill.records.shapes import NO_OPTIONS, SHAPES, ShapeOptions, ShapeParser, detect, keys_in, oasst, parser
from chatmill.records.transcript_layout import transcript_layout
from chatmill.remote import objects
from chatmill.remote.threads import in_threads
from chatmill.remote.urls import Place, Url

MAX_LINE_BYTES = 64 * 2**20
MIN_COLUMN_BYTES = 2**17
"""Smallest run of plain lines, in bytes, for which columns are faster in a mixed block."""
CHECKED_RECORDS = 1000
"""Number of records per file in which the names of `--columns` are looked up."""
RETRY_BYTES = 2**16
"""Bytes of lines to parse one by one before trying columns again."""
SCAN = 2**18
"""Bytes per read when detecting whether a transcript file is `transcript-lines` or `transcript-stream`."""
T = TypeVar("T")
OnError = Literal["stop", "skip"]
OnReject = Callable[[RecordError], None]


@dataclass(frozen=True, slots=True)
class FilePart:
    """A file of one shape, or the lines (or row groups) of a file that start in bytes [start, stop). The lines of each
    part are numbered from 1.
    """

    path: Place
    shape: str
    source: str
    start: int = 0
    stop: int | None = None
    options: ShapeOptions = NO_OPTIONS
    is_array: bool = False
    """Whether a .jsonl file contains one JSON array instead of lines."""
    why: str = field(default="", compare=False)
    """Reason for the shape, shown to the user."""

    def cut(self, size: int, *, end: int | None = None) -> list[FilePart]:
        """Split this part into parts of at least `size` bytes, with the same records in the same order.

        `end` is the size of the file. Parquet files are split at row groups. Compressed files, arrays, other tables,
        and shapes whose records span several lines are not split.
        """
        is_table = files.kind(self.path) == ".parquet" and self.shape != "oasst1"
        if files.compression(self.path) or not (is_table or _is_of_lines(self)):
            return [self]
        end = _size(self.path) if end is None else end
        pieces = list((tables.cut_table if is_table else units.cut)(self.path, size=size, end=end))
        if is_table and len(pieces) == 1:
            return [self]
        return [replace(self, start=start, stop=stop) for start, stop in pieces]


def read_records(
    inputs: Sequence[str | Place],
    *,
    shape: str | None = None,
    source: str | None = None,
    options: ShapeOptions = NO_OPTIONS,
    on_error: OnError = "stop",
    on_reject: OnReject | None = None,
    max_line_bytes: int = MAX_LINE_BYTES,
) -> Iterator[Record]:
    """Iterate over the records of all files in order.

    >>> [record.id for record in chatmill.read_records(["data/conversations.jsonl"])][:2]
    ['chat-000', 'chat-001']

    Names and globs that match no file, and shapes that cannot be detected, raise an error before the first record. With
    `on_error` "stop", the first invalid record raises an error; with "skip", invalid records are passed to `on_reject`
    and reading continues. A file that changes while it is read raises a `DataError` after the last record.
    """
    on_fault = _fault_handler(on_error, on_reject)
    before = InputFiles([[inputs] if isinstance(inputs, str | Path | Url) else inputs])
    paths, limit = before.groups[0], max_line_bytes
    planned = partial(
        plan_files, paths, shape=shape, source=source, options=options, on_error=on_error, max_line_bytes=limit
    )
    return _read_all(planned(), before, planned, on_fault=on_fault, max_line_bytes=max_line_bytes)


def _read_all(
    parts: Sequence[FilePart],
    before: InputFiles,
    planned: Callable[[], list[FilePart]],
    *,
    on_fault: OnReject,
    max_line_bytes: int,
) -> Iterator[Record]:
    logs = [ReadLog() for _ in parts]
    try:
        for part, log in zip(parts, logs, strict=True):
            yield from read_part(part, on_fault=on_fault, max_line_bytes=max_line_bytes, log=log)
    except (RecordError, objects.RemoteError):
        before.check_times()
        raise
    read = [(part.path, log.bytes_read()) for part, log in zip(parts, logs, strict=True)]
    before.check(read, is_planned=lambda: planned() == parts)


def plan(
    inputs: Sequence[str | Place],
    *,
    shape: str | None = None,
    source: str | None = None,
    options: ShapeOptions = NO_OPTIONS,
    on_error: OnError = "skip",
    max_line_bytes: int = MAX_LINE_BYTES,
) -> list[FilePart]:
    """Return one part per file, in reading order. If `shape` is None, the shape is detected from the first records of
    each file.

    With `on_error` "stop", detection ends at a record that is too long; reading reports the record later.
    """
    paths, limit = files.expand(inputs), max_line_bytes
    return plan_files(paths, shape=shape, source=source, options=options, on_error=on_error, max_line_bytes=limit)


def plan_files(
    paths: Sequence[Place],
    *,
    shape: str | None = None,
    source: str | None = None,
    options: ShapeOptions = NO_OPTIONS,
    on_error: OnError = "skip",
    max_line_bytes: int = MAX_LINE_BYTES,
) -> list[FilePart]:
    """Like `plan`, for files returned by `expand`."""
    if shape is not None and shape not in SHAPES:
        raise UsageError(f'unknown shape "{shape}"; expected {", ".join(SHAPES)}')
    options.column_map()
    options.templates()
    # Inspecting an object takes several requests, so use threads. Use no threads for in-memory objects, because the
    # process may fork later.
    parts = in_threads(
        lambda path: _planned(path, shape, source, options, max_line_bytes, stops=on_error == "stop"),
        paths,
        here=all(isinstance(path, Path) or path.scheme == "memory" for path in paths),
    )
    if options.columns is not None:
        _warn_of_missing_columns(parts, max_line_bytes, stops=on_error == "stop")
    return parts


def _warn_of_missing_columns(parts: Sequence[FilePart], limit: int, *, stops: bool) -> None:
    """Warn about `--columns` names that occur in none of the first records of any file, in case they are misspelled."""
    missing: set[str] = set()
    for part in parts:
        columns = part.options.column_map()
        assert columns is not None
        missing = missing or {*columns.record, *columns.message}
        with closing(_units(part, limit)) as numbered:
            for _, data in islice(_readable_units(numbered, limit, stops=stops), CHECKED_RECORDS):
                missing -= keys_in(data)
                if not missing:
                    return
    for name in sorted(missing):
        what = f'--columns names "{one_line(name)}", which none of the first {CHECKED_RECORDS:,} records has'
        warnings.warn(f"{what}; correct or remove this name", stacklevel=2)


def _planned(
    path: Place, shape: str | None, source: str | None, options: ShapeOptions, limit: int, *, stops: bool
) -> FilePart:
    name = files.source_name(path) if source is None else source
    is_array = files.kind(path) == ".jsonl" and units.is_array(path, limit=limit)
    return _with_shape(FilePart(path, "messages", name, options=options, is_array=is_array), shape, limit, stops=stops)


def read_part(
    part: FilePart,
    *,
    on_fault: OnReject,
    on_end: Callable[[int], None] = lambda lines: None,
    max_line_bytes: int = MAX_LINE_BYTES,
    log: ReadLog | None = None,
) -> Iterator[Record]:
    """Yield the records of one part, one at a time; see `read_blocks`."""
    blocks = read_blocks(
        part, on_fault=on_fault, on_end=on_end, max_line_bytes=max_line_bytes, as_columns=False, log=log
    )
    return (record for block in blocks for record in block)


def read_blocks(
    part: FilePart,
    *,
    on_fault: OnReject,
    on_end: Callable[[int], None],
    max_line_bytes: int = MAX_LINE_BYTES,
    as_columns: bool = True,
    log: ReadLog | None = None,
) -> Iterator[ChatColumns | list[Record]]:
    """Yield the records of one part in blocks: `ChatColumns` where possible if `as_columns` is set, otherwise lists.

    `on_fault` is called with each fault and either raises it, to stop reading, or returns, to continue. `on_end`
    receives the number of lines of the part, so that the next part can be numbered. `log` records the bytes read.
    """
    for parsed in _read(part, max_line_bytes, as_columns=as_columns, on_end=on_end, log=log):
        if isinstance(parsed, ChatColumns):
            yield parsed
            continue
        records: list[Record] = []
        for item in parsed:
            if isinstance(item, RecordError):
                # Yield the records that precede a fault before reporting the fault.
                if records:
                    yield records
                    records = []
                on_fault(item)
            else:
                records.append(item)
        if records:
            yield records


ParsedItems = Sequence[Record | RecordError]


def _read(
    part: FilePart, limit: int, *, as_columns: bool, on_end: Callable[[int], None], log: ReadLog | None
) -> Iterator[ParsedItems]:
    """Yield blocks of records and faults, up to the point where the file itself is corrupt."""
    line = 0
    with closing(_parsed(part, limit, as_columns=as_columns, log=log)) as parsed:
        try:
            for line, items in parsed:  # noqa: B007
                yield items
            on_end(line)
        except RecordError as fault:
            # The rest of the file is corrupt. A fault without a line number gets the number after that of the last line
            # read.
            yield [fault.at(files.label(part.path), fault.line or line + 1)]


def _parsed(
    part: FilePart, limit: int, *, as_columns: bool, log: ReadLog | None
) -> Generator[tuple[int, ParsedItems], None, None]:
    """Yield blocks of records and faults, with the number of the last line read."""
    parse = parser(part.shape, file=files.label(part.path), source=part.source, limit=limit, options=part.options)
    if not _is_of_lines(part):
        for line, data in _units(part, limit, log):
            yield line, parse(line, data)
        return
    before = 0
    as_columns = as_columns and COMPILED and parse.decode_lines is not None
    size = units.WIDE_BLOCK if as_columns else units.BLOCK
    for block in units.blocks(part.path, limit=limit, start=part.start, stop=part.stop, size=size, log=log):
        # A block within the size limit has no line over the limit.
        in_columns = as_columns and len(block) <= limit
        for count, items in _columns(parse, before, block) if in_columns else [_one_by_one(parse, before, block)]:
            before += count
            yield before, items


def _one_by_one(parse: ShapeParser, before: int, block: bytes) -> tuple[int, ParsedItems]:
    """Return the number of lines in a block, and their records and faults."""
    if records := parse.block(before + 1, block):
        return len(records), records
    pieces = units.split(block)
    numbered = enumerate(pieces, before + 1)
    return len(pieces), [item for n, data in numbered if not units.is_blank(data) for item in parse(n, data)]


def _columns(parse: ShapeParser, before: int, block: bytes) -> Iterator[tuple[int, ParsedItems]]:
    """Like `_one_by_one`, but runs of plain lines become columns."""

    def parse_lines(line: int, data: bytes) -> ParsedItems:
        return _one_by_one(parse, line - 1, data)[1]

    at, place = 0, {"source": parse.source, "file": parse.file}
    while at < len(block):
        end, records = columns.parse(block, at, line=before + 1, parse_lines=parse_lines, **place)
        count, items = len(records), cast(ParsedItems, records)
        if end - at < min(MIN_COLUMN_BYTES, len(block)):
            end = block.find(b"\n", end + RETRY_BYTES) + 1 or len(block)
            count, items = _one_by_one(parse, before, block[at:end])
        yield count, items
        before += count
        at = end


def _is_of_lines(part: FilePart) -> bool:
    """Whether every record is one line of text."""
    ending = files.kind(part.path)
    return ending in (".jsonl", ".txt") and not part.is_array and part.shape not in ("oasst1", "transcript-stream")


def _units(part: FilePart, limit: int, log: ReadLog | None = None) -> files.Units:
    ending = files.kind(part.path)
    if ending in files.TABLES:
        numbered = tables.table_rows(part.path, start=part.start, stop=part.stop, log=log)
    elif part.shape == "transcript-stream":
        numbered = units.conversations(part.path, limit=limit, log=log)
    elif ending == ".json" or part.is_array:
        numbered = units.elements(part.path, limit=limit, log=log)
    else:
        numbered = units.lines(part.path, limit=limit, log=log)
    return oasst.grouped(numbered, limit=limit) if part.shape == "oasst1" else numbered


def _with_shape(part: FilePart, shape: str | None, limit: int, *, stops: bool) -> FilePart:
    """Return the part with its shape, given or detected, and the reason for it. The shape `transcript` becomes
    `transcript-lines` or `transcript-stream`.
    """
    path = part.path
    ending = files.kind(path)
    if ending in files.TABLES and shape == "transcript-stream":
        raise UsageError(f"{files.shown(path)}: a table cannot be a stream; expected shape transcript-lines")
    if ending == ".txt" and shape in (None, "transcript"):
        with closing(units.lines(path, limit=limit)) as numbered:
            first = next(_readable(numbered), (0, b""))[1]
        if stops and len(first) > limit and b"<|" not in first:
            # The first record is too long in either shape, so the shape does not matter.
            return replace(part, shape="transcript-lines", why="from its first line")
        # A text file of JSON objects is JSON Lines with a different suffix.
        if shape == "transcript" or not first.lstrip().startswith(b"{"):
            shape = _transcript_shape(path, is_transcript=shape is not None)
            return replace(part, shape=shape, why="from its lines and markers")
    why = "as given"
    if shape is None:
        with closing(_units(part, limit)) as numbered:
            readable = _readable_units(numbered, limit, stops=stops)
            shape, why = detect(files.shown(path), readable, part.options.column_map())
    return replace(part, shape="transcript-lines" if shape == "transcript" else shape, why=why)


def _transcript_shape(path: Place, *, is_transcript: bool) -> str:
    """Return `transcript-lines` or `transcript-stream`; raise a `DataError` that asks for --shape if the file is
    ambiguous.
    """
    try:
        with open_bytes(path) as file:
            layout = transcript_layout(_readable(iter(partial(file.read, SCAN), b"")))
    except RecordError:
        # The file is corrupt from its first byte; reading reports the error.
        return "transcript-lines"
    if not is_transcript and not layout & (layout.MARKERS | layout.JSON) and layout & layout.TEXT:
        files.check_text(path)
        names = ", ".join(SHAPES)
        raise DataError(f"{files.shown(path)}: no transcript markers found; set the shape with --shape: {names}")
    if layout.shape is None:
        raise DataError(
            f"{files.shown(path)}: records could be separated by lines or by <|EOS|>; "
            "pass --shape transcript-lines or transcript-stream"
        )
    return layout.shape


def _size(path: Place) -> int:
    if isinstance(path, Path):
        return path.stat().st_size
    if (info := objects.find(path)) is None:
        raise objects.missing(path)
    return info.size


def _readable(pieces: Iterator[T]) -> Iterator[T]:
    """Yield pieces of a file up to the point where it is corrupt; reading reports the error later."""
    try:
        yield from pieces
    except RecordError:
        return


def _readable_units(numbered: files.Units, limit: int, *, stops: bool) -> Iterator[tuple[int, bytes]]:
    """Like `_readable`, for units. If reading stops at the first fault, also stop at a unit over the limit, because its
    end may be far away.
    """
    return takewhile(lambda unit: not stops or len(unit[1]) <= limit, _readable(numbered))


def _fault_handler(on_error: OnError, on_reject: OnReject | None) -> OnReject:
    if on_error == "skip":
        if on_reject is None:
            raise UsageError('on_error "skip" requires on_reject, otherwise records would be lost silently')
        return on_reject
    if on_error != "stop":
        raise UsageError(f'unknown on_error "{on_error}"; expected stop or skip')
    return _stop


def _stop(fault: RecordError) -> None:
    raise fault
