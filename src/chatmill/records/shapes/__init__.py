"""A function per shape: how it reads one record, and the fault it names where it cannot.

A shape reads the bytes of one record into conversations; files are read elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from chatmill.errors import RecordError
from chatmill.records.record import Record, new_record
from chatmill.records.shapes import instruct, messages, oasst, tool_turns, transcript
from chatmill.records.shapes.decode import decode, decode_object
from chatmill.records.shapes.fields import Object, ParsedRecord

Shape = Callable[[bytes], list[ParsedRecord]]
DecodeLines = Callable[[bytes], list[ParsedRecord] | None]

# What a fault keeps of its record: enough to recognise it, little enough to hold many.
RAW_BYTES = 4096


def _shape(
    parse: Callable[[Object], ParsedRecord], decode: Callable[[bytes], ParsedRecord | None] = lambda data: None
) -> Shape:
    """The shape of JSON objects that `parse` reads, if `decode`, which is faster, cannot."""
    return lambda data: [decode(data) or parse(decode_object(data))]


_READERS: dict[str, Shape] = {
    "messages": _shape(messages.parse, messages.decode),
    "sharegpt": _shape(tool_turns.sharegpt),
    "alpaca": _shape(instruct.alpaca),
    "dolly": _shape(instruct.dolly),
    "oasst1": lambda data: [oasst.parse(decode(data))],
    "tool": _shape(tool_turns.tool),
    "primer": _shape(messages.parse_primer, messages.decode_primer),
    "transcript": transcript.from_line,
    "transcript-lines": transcript.from_line,
    "transcript-stream": transcript.from_stream,
}
SHAPES = tuple(_READERS)
"""The names of all shapes."""

_DECODE_LINES: dict[str, DecodeLines] = {"messages": messages.decode_lines}
"""Shapes that can decode many lines at once; most data is of this shape."""


@dataclass(frozen=True)
class ShapeParser:
    """Parses the bytes of records of one shape and one file.

    It raises nothing, whatever the bytes: a fault is a `RecordError` among the records, with its origin and the
    beginning of the record.
    """

    file: str
    source: str
    limit: int
    read: Shape
    decode_lines: DecodeLines | None

    def __call__(self, line: int, data: bytes) -> list[Record | RecordError]:
        """The records in `data`, which begins on `line`."""
        try:
            if len(data) > self.limit:
                what = f"the record is longer than {self.limit} bytes"
                raise RecordError(what, "expected at most that, or a higher limit", kind="too_long")
            return [new_record(turns, id, tools, self.source, self.file, line) for turns, id, tools in self.read(data)]
        except RecursionError:
            fault = RecordError("the record is nested too deeply", "expected fewer levels", kind="nesting")
        except RecordError as error:
            fault = error
        fault.raw = data[:RAW_BYTES]
        return [fault.at(self.file, line, _id(data) if len(data) <= self.limit else None)]

    def block(self, first_line: int, block: bytes) -> list[Record | RecordError]:
        """The records of a block of lines that can be decoded at once; none if it cannot."""
        parsed = self.decode_lines(block) if self.decode_lines is not None and len(block) <= self.limit else None
        source, file = self.source, self.file
        return [
            new_record(turns, id, tools, source, file, line)
            for line, (turns, id, tools) in enumerate(parsed or (), first_line)
        ]


def parser(shape: str, *, file: str, source: str, limit: int) -> ShapeParser:
    return ShapeParser(file, source, limit, _READERS[shape], _DECODE_LINES.get(shape))


def _id(data: bytes) -> str | None:
    """The id of a faulty record, if it can be read."""
    try:
        record = decode(data)
    except (RecordError, RecursionError):
        return None
    if type(record) is list and record:
        record = record[0]
    if type(record) is not dict:
        return None
    name = record.get("id", record.get("message_tree_id"))
    return str(name) if type(name) in (str, int) else None
