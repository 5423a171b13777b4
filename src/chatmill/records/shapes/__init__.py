"""One file a shape: what one record looks like, and what is wrong with it when it does not.

A shape turns the bytes of one unit into conversations; it knows nothing of files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from chatmill.errors import RecordError
from chatmill.records.record import Record
from chatmill.records.shapes import instruct, messages, oasst, primer, sharegpt, tool, transcript
from chatmill.records.shapes.decode import decode, decode_object
from chatmill.records.shapes.fields import Object, ParsedRecord

Shape = Callable[[bytes], list[ParsedRecord]]
PlainLines = Callable[[bytes], list[ParsedRecord] | None]

# What a fault keeps of the record it is about: enough to recognise it, little enough to hold many.
RAW_BYTES = 4096


def _objects(careful: Callable[[Object], ParsedRecord]) -> Shape:
    return lambda data: [careful(decode_object(data))]


def _plain_first(plain: Callable[[bytes], ParsedRecord | None], careful: Callable[[Object], ParsedRecord]) -> Shape:
    def read(data: bytes) -> list[ParsedRecord]:
        found = plain(data)
        return [careful(decode_object(data)) if found is None else found]

    return read


_READERS: dict[str, Shape] = {
    "messages": _plain_first(messages.plain, messages.careful),
    "sharegpt": _objects(sharegpt.careful),
    "alpaca": _objects(instruct.alpaca),
    "dolly": _objects(instruct.dolly),
    "oasst1": lambda data: [oasst.careful(decode(data))],
    "tool": _objects(tool.careful),
    "primer": _plain_first(primer.plain, primer.careful),
    "transcript": transcript.from_line,
    "transcript-lines": transcript.from_line,
    "transcript-stream": transcript.from_stream,
}
SHAPES = tuple(_READERS)


_PLAIN_LINES: dict[str, PlainLines] = {"messages": messages.plain_lines}
"""For the shape by which the bulk of all data comes: many lines at once."""


@dataclass(frozen=True)
class ShapeParser:
    """From bytes to the records they hold, of one shape and one file.

    Whatever the bytes, it raises nothing: what is wrong is a `RecordError` among the records, with its place and the
    beginning of the record.
    """

    file: str
    source: str
    limit: int
    read: Shape
    read_lines: PlainLines | None

    def __call__(self, line: int, data: bytes) -> list[Record | RecordError]:
        """What stands in the bytes that begin on a line."""
        try:
            if len(data) > self.limit:
                what = f"the record is longer than {self.limit} bytes"
                raise RecordError(what, "expected at most that, or a higher limit", kind="too_long")
            return [Record(turns, id, tools, self.source, self.file, line) for turns, id, tools in self.read(data)]
        except RecursionError:
            fault = RecordError("the record is nested too deeply", "expected fewer levels", kind="nesting")
        except RecordError as found:
            fault = found
        fault.raw = data[:RAW_BYTES]
        return [fault.at(self.file, line, _name(data) if len(data) <= self.limit else None)]

    def plain(self, first_line: int, block: bytes) -> list[Record | RecordError]:
        """The records of a block with one plain record on each line; none if any line needs a careful look."""
        found = self.read_lines(block) if self.read_lines is not None and len(block) <= self.limit else None
        source, file = self.source, self.file
        return [
            Record(turns, id, tools, source, file, line)
            for line, (turns, id, tools) in enumerate(found or (), first_line)
        ]


def parser(shape: str, *, file: str, source: str, limit: int) -> ShapeParser:
    return ShapeParser(file, source, limit, _READERS[shape], _PLAIN_LINES.get(shape))


def _name(data: bytes) -> str | None:
    """The id of a faulty record, where it has one that can be read."""
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
