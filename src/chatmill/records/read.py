"""From files to records: what is read is planned first, then read part by part.

    inputs ── plan ──▶ parts ── units ──▶ (line, bytes) ── parser ──▶ records

A part is a file, or the lines of a byte range of one, and is all that a worker needs to know.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from chatmill.errors import RecordError, UsageError
from chatmill.records import array, files, lines, parquet
from chatmill.records.columns import COMPILED, ChatColumns, plain_lines
from chatmill.records.detect import detect
from chatmill.records.record import Record
from chatmill.records.shapes import SHAPES, ShapeParser, oasst, parser, transcript

MAX_LINE_BYTES = 64 * 2**20
ENOUGH = 2**17
"""Bytes of plain lines from which on columns pay off, where other lines stand between them."""
STRETCH = 2**16
"""Bytes of lines that are read one by one before columns are tried again."""
OnError = Literal["stop", "skip"]
OnReject = Callable[[RecordError], None]


@dataclass(frozen=True, slots=True)
class FilePart:
    """One file of one shape, or of a file of lines those that begin in bytes [start, stop), numbered from 1."""

    path: Path
    shape: str
    source: str
    start: int = 0
    stop: int | None = None

    def cut(self, size: int) -> list[FilePart]:
        """Parts of at least `size` bytes that hold the same records in the same order.

        Compressed files, arrays and tables stay whole, and so do shapes whose records run over several lines.
        """
        if not _is_of_lines(self) or files.suffix(self.path).endswith(".gz"):
            return [self]
        return [replace(self, start=start, stop=stop) for start, stop in lines.cut(self.path, size=size)]


def read_records(
    inputs: Sequence[str | Path],
    *,
    shape: str | None = None,
    source: str | None = None,
    on_error: OnError = "stop",
    on_reject: OnReject | None = None,
    max_line_bytes: int = MAX_LINE_BYTES,
) -> Iterator[Record]:
    """The records of all files in order, one at a time.

    Names and globs that match nothing, and shapes that cannot be told, are errors before the first record. With
    `on_error` "stop" the first faulty record is raised; with "skip" each one goes to `on_reject` and reading goes on.
    """
    parts = plan(inputs, shape=shape, source=source, max_line_bytes=max_line_bytes)
    on_fault = _fault_handler(on_error, on_reject)
    return (record for part in parts for record in read_part(part, on_fault=on_fault, max_line_bytes=max_line_bytes))


def plan(
    inputs: Sequence[str | Path],
    *,
    shape: str | None = None,
    source: str | None = None,
    max_line_bytes: int = MAX_LINE_BYTES,
) -> list[FilePart]:
    """One part a file, in the order they are read; `shape` None is told from the first records of each file."""
    if shape is not None and shape not in SHAPES:
        raise UsageError(f'unknown shape "{shape}"; expected {", ".join(SHAPES)}')
    return [
        FilePart(path, _shape(path, shape, max_line_bytes), files.source_name(path) if source is None else source)
        for path in files.expand(inputs)
    ]


def read_part(
    part: FilePart,
    *,
    on_fault: OnReject,
    on_end: Callable[[int], None] = lambda lines: None,
    max_line_bytes: int = MAX_LINE_BYTES,
) -> Iterator[Record]:
    """The records of one part. Each fault goes to `on_fault`, which raises it to stop, or returns to go on.

    `on_end` is told how many lines the part has, so that those of the next can be numbered on.
    """
    for found in _read(part, max_line_bytes, columns=False, on_end=on_end):
        for each in found:
            if isinstance(each, RecordError):
                on_fault(each)
            else:
                yield each


def read_blocks(
    part: FilePart, *, on_fault: OnReject, on_end: Callable[[int], None], max_line_bytes: int = MAX_LINE_BYTES
) -> Iterator[ChatColumns | list[Record]]:
    """The same records many at a time: in columns where they are plain, in lists where not."""
    for found in _read(part, max_line_bytes, columns=True, on_end=on_end):
        if isinstance(found, ChatColumns):
            yield found
            continue
        records: list[Record] = []
        for each in found:
            if isinstance(each, RecordError):
                # Those before the fault are not lost with it.
                if records:
                    yield records
                    records = []
                on_fault(each)
            else:
                records.append(each)
        if records:
            yield records


Found = Sequence[Record | RecordError]


def _read(part: FilePart, limit: int, *, columns: bool, on_end: Callable[[int], None]) -> Iterator[Found]:
    """Records and faults, some at a time, up to where the file itself breaks."""
    line = 0
    with closing(_parsed(part, limit, columns=columns)) as parsed:
        while True:
            try:
                line, found = next(parsed)
            except StopIteration:
                on_end(line)
                return
            except RecordError as fault:
                # The file itself is broken from here on; where it knows no line, it is after the last one read.
                yield [fault.at(str(part.path), fault.line or line + 1)]
                return
            yield found


def _parsed(part: FilePart, limit: int, *, columns: bool) -> Generator[tuple[int, Found], None, None]:
    """Records and faults, some at a time, and the last line that has been read."""
    parse = parser(part.shape, file=str(part.path), source=part.source, limit=limit)
    if not _is_of_lines(part):
        for line, data in _units(part, limit):
            yield line, parse(line, data)
        return
    before = 0
    columns = columns and COMPILED and parse.read_lines is not None
    size = lines.WIDE_BLOCK if columns else lines.BLOCK
    for block in lines.blocks(part.path, limit=limit, start=part.start, stop=part.stop, size=size):
        # A block within the limit holds no line over it.
        as_columns = columns and len(block) <= limit
        for count, found in _in_columns(parse, before, block) if as_columns else [_one_by_one(parse, before, block)]:
            before += count
            yield before, found


def _one_by_one(parse: ShapeParser, before: int, block: bytes) -> tuple[int, Found]:
    """How many lines a block has, and what they hold."""
    if found := parse.plain(before + 1, block):
        return len(found), found
    pieces = lines.split(block)
    numbered = enumerate(pieces, before + 1)
    return len(pieces), [each for n, data in numbered if not lines.is_blank(data) for each in parse(n, data)]


def _in_columns(parse: ShapeParser, before: int, block: bytes) -> Iterator[tuple[int, Found]]:
    """The same in columns, as far as the lines are plain; in between, some of them one by one."""

    def made(line: int, data: bytes) -> Found:
        return _one_by_one(parse, line - 1, data)[1]

    at = 0
    while at < len(block):
        end, found = plain_lines(block, at, source=parse.source, file=parse.file, line=before + 1, made=made)
        if end - at < min(ENOUGH, len(block)):
            end = block.find(b"\n", end + STRETCH) + 1 or len(block)
            count, others = _one_by_one(parse, before, block[at:end])
            yield count, others
        else:
            count = len(found)
            yield count, found
        before += count
        at = end


def _is_of_lines(part: FilePart) -> bool:
    """Whether each record is a line of a text file."""
    ending = files.suffix(part.path).removesuffix(".gz")
    return ending in (".jsonl", ".txt") and part.shape not in ("oasst1", "transcript-stream")


def _units(part: FilePart, limit: int) -> files.Units:
    ending = files.suffix(part.path).removesuffix(".gz")
    if ending == ".parquet":
        found = parquet.rows(part.path)
    elif part.shape == "transcript-stream":
        found = lines.conversations(part.path, limit=limit)
    elif ending == ".json":
        found = array.units(part.path, limit=limit)
    else:
        found = lines.lines(part.path, limit=limit)
    return oasst.grouped(found, limit=limit) if part.shape == "oasst1" else found


def _shape(path: Path, shape: str | None, limit: int) -> str:
    """The shape a file is read as: told from its first records, and whether a transcript is lines or a stream."""
    ending = files.suffix(path).removesuffix(".gz")
    if ending == ".parquet" and shape == "transcript-stream":
        raise UsageError(f"{files.shown(path)}: a table is no stream; expected shape transcript-lines")
    if ending == ".txt" and shape in (None, "transcript"):
        with closing(lines.lines(path, limit=limit)) as found:
            first = next(_readable(found), (0, b'"'))[1]
        # Objects in a text file are JSON Lines under another name.
        if shape == "transcript" or not first.lstrip().startswith(b"{"):
            return "transcript-lines" if transcript.is_line_a_record(first) else "transcript-stream"
    if shape is None:
        with closing(_units(FilePart(path, "messages", ""), limit)) as found:
            shape = detect(files.shown(path), _readable(found))
    return "transcript-lines" if shape == "transcript" else shape


def _readable(units: files.Units) -> Iterator[tuple[int, bytes]]:
    """Units up to where the file breaks: reading will report that, telling the shape need not."""
    try:
        yield from units
    except RecordError:
        return


def _fault_handler(on_error: OnError, on_reject: OnReject | None) -> OnReject:
    if on_error == "skip":
        if on_reject is None:
            raise UsageError('on_error "skip" without on_reject would lose records in silence; give both')
        return on_reject
    if on_error != "stop":
        raise UsageError(f'unknown on_error "{on_error}"; expected stop or skip')
    return _stop


def _stop(fault: RecordError) -> None:
    raise fault
