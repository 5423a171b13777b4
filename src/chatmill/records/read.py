"""From files to records: what is read is planned first, then read part by part.

    inputs ── plan ──▶ parts ── units ──▶ (line, bytes) ── parser ──▶ records

A part is a file, or the lines of a byte range of one, and is all that a worker needs to know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from chatmill.errors import RecordError, UsageError
from chatmill.records import array, files, lines, parquet
from chatmill.records.detect import detect
from chatmill.records.record import Record
from chatmill.records.shapes import SHAPES, oasst, parser, transcript

MAX_LINE_BYTES = 64 * 2**20
OnError = Literal["stop", "skip"]
OnReject = Callable[[RecordError], None]


@dataclass(frozen=True, slots=True)
class Part:
    """One file of one shape, or of a file of lines those that begin in bytes [start, stop), numbered from 1."""

    path: Path
    shape: str
    source: str
    start: int = 0
    stop: int | None = None

    def cut(self, size: int) -> list[Part]:
        """Parts of at least `size` bytes that hold the same records in the same order.

        Compressed files, arrays and tables stay whole, and so do shapes whose records run over several lines.
        """
        of_lines = files.suffix(self.path) in (".jsonl", ".txt")
        if not of_lines or self.shape in ("oasst1", "transcript-stream"):
            return [self]
        return [replace(self, start=start, stop=stop) for start, stop in lines.cut(self.path, size=size)]


def read(
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
) -> list[Part]:
    """One part a file, in the order they are read; `shape` None is told from the first records of each file."""
    if shape is not None and shape not in SHAPES:
        raise UsageError(f'unknown shape "{shape}"; expected {", ".join(SHAPES)}')
    return [
        Part(path, _shape(path, shape, max_line_bytes), files.source_name(path) if source is None else source)
        for path in files.expand(inputs)
    ]


def read_part(
    part: Part,
    *,
    on_fault: OnReject,
    on_end: Callable[[int], None] = lambda lines: None,
    max_line_bytes: int = MAX_LINE_BYTES,
) -> Iterator[Record]:
    """The records of one part. Each fault goes to `on_fault`, which raises it to stop, or returns to go on.

    `on_end` is told how many lines the part has, so that those of the next can be numbered on.
    """
    file = str(part.path)
    parse = parser(part.shape, file=file, source=part.source, limit=max_line_bytes)
    line = 0
    with closing(_units(part, max_line_bytes)) as units:
        while True:
            try:
                line, data = next(units)
            except StopIteration as end:
                on_end(end.value or 0)
                return
            except RecordError as fault:
                # The file itself is broken from here on; where it knows no line, it is after the last one read.
                on_fault(fault.at(file, fault.line or line + 1))
                return
            try:
                records = parse(line, data)
            except RecordError as fault:
                on_fault(fault)
                continue
            yield from records


def _units(part: Part, limit: int) -> files.CountedUnits:
    ending = files.suffix(part.path).removesuffix(".gz")
    found: files.CountedUnits
    if ending == ".parquet":
        found = parquet.rows(part.path)
    elif part.shape == "transcript-stream":
        found = lines.conversations(part.path, limit=limit)
    elif ending == ".json":
        found = array.units(part.path, limit=limit)
    else:
        found = lines.lines(part.path, limit=limit, start=part.start, stop=part.stop)
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
        with closing(_units(Part(path, "messages", ""), limit)) as found:
            shape = detect(files.shown(path), _readable(found))
    return "transcript-lines" if shape == "transcript" else shape


def _readable(units: files.CountedUnits) -> Iterator[tuple[int, bytes]]:
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
