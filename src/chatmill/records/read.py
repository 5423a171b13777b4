"""Read records from files: first plan the parts of files to read, then read the records of each part.

    inputs ── plan ──▶ parts ── units ──▶ (line, bytes) ── parser ──▶ records

A part is a file, or the lines in a byte range of a file.
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
"""Minimum size, in bytes, of a run of plain lines that is parsed into columns if the block also has other lines."""
CHECKED_RECORDS = 1000
"""Number of records per file that are searched for the names of `--columns`."""
RETRY_BYTES = 2**16
"""Number of bytes to parse line by line before parsing into columns is tried again."""
SCAN = 2**18
"""Bytes per read when detecting the layout of a transcript file."""
T = TypeVar("T")
OnError = Literal["stop", "skip"]
OnReject = Callable[[RecordError], None]


@dataclass(frozen=True, slots=True)
class FilePart:
    """A file, or the lines or Parquet row groups of a file that start in bytes [start, stop).

    Line numbers start at 1 in each part.
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
    """How the shape was chosen, as shown to the user."""

    def cut(self, size: int, *, end: int | None = None) -> list[FilePart]:
        """Split this part into parts of at least `size` bytes; `end` is the size of the file.

        Only Parquet files and uncompressed files with one record per line can be split.
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

    With `on_error` "stop", the first invalid record raises an error. With "skip", invalid records are passed to
    `on_reject`, and reading continues. If a file changes while it is read, a `DataError` is raised after the last
    record.
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
    """Return one part per file, in reading order.

    If `shape` is None, the record shape is detected from the first records of each file.
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
    """Like `plan`, but all paths must be files, not folders or globs."""
    if shape is not None and shape not in SHAPES:
        raise UsageError(f'unknown shape "{shape}"; expected {", ".join(SHAPES)}')
    options.column_map()
    options.templates()
    # Inspecting an object takes several requests, so use threads. For memory:// URLs, use no threads, because the
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
        what = f'--columns has the name "{one_line(name)}", which none of the first {CHECKED_RECORDS:,} records has'
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
    """Yield the records of one part in blocks: lists of `Record`s and, with `as_columns`, also `ChatColumns`.

    `on_fault` is called with the error of each invalid record, and can raise this error to stop reading. `on_end` is
    called with the number of lines in the part. `log` records which bytes were read.
    """
    for parsed in _read(part, max_line_bytes, as_columns=as_columns, on_end=on_end, log=log):
        if isinstance(parsed, ChatColumns):
            yield parsed
            continue
        records: list[Record] = []
        for item in parsed:
            if isinstance(item, RecordError):
                # Yield the preceding records before reporting a fault.
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
    """Yield blocks of records and errors, up to the end of the part or to the first corrupt data."""
    line = 0
    with closing(_parsed(part, limit, as_columns=as_columns, log=log)) as parsed:
        try:
            for line, items in parsed:  # noqa: B007
                yield items
            on_end(line)
        except RecordError as fault:
            # The rest of the file is corrupt. An error without a line number is on the line after the last line read.
            yield [fault.at(files.label(part.path), fault.line or line + 1)]


def _parsed(
    part: FilePart, limit: int, *, as_columns: bool, log: ReadLog | None
) -> Generator[tuple[int, ParsedItems], None, None]:
    """Yield blocks of records and errors, each with the number of the last line read."""
    parse = parser(part.shape, file=files.label(part.path), source=part.source, limit=limit, options=part.options)
    if not _is_of_lines(part):
        for line, data in _units(part, limit, log):
            yield line, parse(line, data)
        return
    before = 0
    as_columns = as_columns and COMPILED and parse.decode_lines is not None
    size = units.WIDE_BLOCK if as_columns else units.BLOCK
    for block in units.blocks(part.path, limit=limit, start=part.start, stop=part.stop, size=size, log=log):
        # If the block is within the limit, so is every line.
        in_columns = as_columns and len(block) <= limit
        for count, items in _columns(parse, before, block) if in_columns else [_one_by_one(parse, before, block)]:
            before += count
            yield before, items


def _one_by_one(parse: ShapeParser, before: int, block: bytes) -> tuple[int, ParsedItems]:
    """Parse a block line by line; return the number of lines, and a list of records and errors."""
    if records := parse.block(before + 1, block):
        return len(records), records
    pieces = units.split(block)
    numbered = enumerate(pieces, before + 1)
    return len(pieces), [item for n, data in numbered if not units.is_blank(data) for item in parse(n, data)]


def _columns(parse: ShapeParser, before: int, block: bytes) -> Iterator[tuple[int, ParsedItems]]:
    """Like `_one_by_one`, but parse consecutive lines with only roles and texts into columns."""

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
    """Set the record shape of a part to `shape` or, if `shape` is None, to the detected shape."""
    path = part.path
    ending = files.kind(path)
    if ending in files.TABLES and shape == "transcript-stream":
        raise UsageError(f"{files.shown(path)}: a table cannot have shape transcript-stream; expected transcript-lines")
    if ending == ".txt" and shape in (None, "transcript"):
        with closing(units.lines(path, limit=limit)) as numbered:
            first = next(_readable(numbered), (0, b""))[1]
        if stops and len(first) > limit and b"<|" not in first:
            # The first record is over the size limit in both shapes, so reading stops with an error in either case.
            return replace(part, shape="transcript-lines", why="from the first line")
        # A .txt file of JSON objects is read as JSON Lines.
        if shape == "transcript" or not first.lstrip().startswith(b"{"):
            shape = _transcript_shape(path, is_transcript=shape is not None)
            return replace(part, shape=shape, why="from the lines and markers")
    why = "as given"
    if shape is None:
        with closing(_units(part, limit)) as numbered:
            readable = _readable_units(numbered, limit, stops=stops)
            shape, why = detect(files.shown(path), readable, part.options.column_map())
    return replace(part, shape="transcript-lines" if shape == "transcript" else shape, why=why)


def _transcript_shape(path: Place, *, is_transcript: bool) -> str:
    """Return `transcript-lines` or `transcript-stream`; raise `DataError` if the shape cannot be detected."""
    try:
        with open_bytes(path) as file:
            layout = transcript_layout(_readable(iter(partial(file.read, SCAN), b"")))
    except RecordError:
        # The file is corrupt from the start; reading reports the error.
        return "transcript-lines"
    if not is_transcript and not layout & (layout.MARKERS | layout.JSON) and layout & layout.TEXT:
        files.check_text(path)
        raise DataError(
            f"{files.shown(path)}: is neither JSON nor a transcript with markers such as <|USER|>; "
            "docs/reference/records.md lists the layouts that chatmill reads"
        )
    if layout.shape is None:
        raise DataError(
            f"{files.shown(path)}: records may be separated by line breaks or by <|EOS|>; "
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
    """Yield items up to the first `RecordError`; the error is reported later, when the records are read."""
    try:
        yield from pieces
    except RecordError:
        return


def _readable_units(numbered: files.Units, limit: int, *, stops: bool) -> Iterator[tuple[int, bytes]]:
    """Yield the line number and the bytes of each record, up to the first corrupt data.

    With `stops`, also stop before the first record of more than `limit` bytes.
    """
    return takewhile(lambda unit: not stops or len(unit[1]) <= limit, _readable(numbered))


def _fault_handler(on_error: OnError, on_reject: OnReject | None) -> OnReject:
    if on_error == "skip":
        if on_reject is None:
            raise UsageError('on_error "skip" requires on_reject, which receives the invalid records')
        return on_reject
    if on_error != "stop":
        raise UsageError(f'unknown on_error "{on_error}"; expected stop or skip')
    return _stop


def _stop(fault: RecordError) -> None:
    raise fault
