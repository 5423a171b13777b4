"""A function per shape: how it reads one record, and the fault it names where it cannot.

A shape reads the bytes of one record into conversations; files are read elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

from chatmill.errors import DataError, RecordError
from chatmill.records.record import Record, new_record
from chatmill.records.shapes import instruct, messages, oasst, tool_turns, transcript
from chatmill.records.shapes.decode import decode, decode_object, decode_text
from chatmill.records.shapes.fields import Object, ParsedRecord, keys_shown

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
    "transcript-stream": lambda data: transcript.conversations(decode_text(data)),
}
SHAPES = tuple(_READERS)
"""The names of all shapes."""
_RECORDS = 16
_UNITS = 1000
_HINT = f"name it with --shape: {', '.join(SHAPES)}"

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
            return [parsed_record(parsed, self.source, self.file, line) for parsed in self.read(data)]
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
        # Only the common form is decoded so, and it has no other keys.
        return [
            new_record(each.messages, each.id, each.tools, source, file, line)
            for line, each in enumerate(parsed or (), first_line)
        ]


def parsed_record(parsed: ParsedRecord, source: str, file: str, line: int) -> Record:
    """The record of what was parsed on a line."""
    turns, id, tools, *others = parsed
    return new_record(turns, id, tools, source, file, line, *others)


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


# The shape of a file, from the keys of its first records.


def detect(file: str, units: Iterable[tuple[int, bytes]]) -> str:
    """The one shape that the first records of a file have in common; several or none is an error.

    `primer` is never detected, because all of its records are also `messages`.
    """
    possible: set[str] | None = None
    unknown: Object | None = None
    seen = 0
    for line, data in islice(units, _UNITS):
        record = _value(data)
        if record is None:
            continue
        votes = shapes_of(record)
        if votes:
            if possible is not None and not possible & votes:
                both = " and ".join(" or ".join(sorted(names)) for names in (possible, votes))
                raise DataError(f"{file}:{line}: records of shape {both} in one file; split it or {_HINT}")
            possible = votes if possible is None else possible & votes
        elif isinstance(record, dict):
            unknown = record if unknown is None else unknown
        seen += 1
        if seen == _RECORDS:
            break
    if possible is None and unknown is not None:
        keys = keys_shown(list(unknown)) or "none"
        raise DataError(f"{file}: no shape is told by records with the keys {keys}; {_HINT}")
    if possible is None or "messages" in possible:
        # If no record is an object, every shape reports the same faults.
        return "messages"
    if len(possible) > 1:
        raise DataError(f"{file}: its records can be {' or '.join(sorted(possible))}; {_HINT}")
    return possible.pop()


def shapes_of(record: Any) -> set[str]:
    """The shapes that a decoded record can have, by its keys; none if they are unknown."""
    if isinstance(record, str):
        return {"transcript"} if _has_marker(record) else set()
    if not isinstance(record, dict):
        return set()
    keys = {key for key, value in record.items() if value is not None}
    shapes = set()
    if "messages" in keys:
        shapes |= _chat_shapes(record)
    if "conversations" in keys:
        shapes.add("sharegpt")
    if {"instruction", "output"} <= keys:
        shapes.add("alpaca")
    if {"instruction", "response"} <= keys:
        shapes.add("dolly")
    if isinstance(record.get("prompt"), dict) or {"message_id", "message_tree_id", "text"} <= keys:
        shapes.add("oasst1")
    elif _has_marker(record.get("text")):
        shapes.add("transcript")
    return shapes


def _chat_shapes(record: Object) -> set[str]:
    """`messages`, `tool`, or both: they share plain turns and differ in roles and keys."""
    turns = record["messages"] if isinstance(record["messages"], list) else []
    turns = [turn for turn in turns if isinstance(turn, dict)]
    roles = {turn.get("role") for turn in turns if isinstance(turn.get("role"), str)}
    if record.get("system") is not None or roles & {"assistant_toolcall", "toolresult"}:
        return {"tool"}
    if roles - set(tool_turns.TOOL_ROLES) or any(isinstance(turn.get("content"), list) for turn in turns):
        return {"messages"}
    return {"messages"} if any(turn.get("tool_calls") for turn in turns) else {"messages", "tool"}


def _value(data: bytes) -> Any:
    """The decoded record, or raw transcript text; None if it cannot be decoded."""
    if data.lstrip()[:2] == b"<|":
        return data.decode(errors="replace")
    try:
        return decode(data)
    except (RecordError, RecursionError):
        return None


def _has_marker(text: Any) -> bool:
    return isinstance(text, str) and any(mark in text for mark in ("<|SYSTEM|>", "<|USER|>", "<|ASSISTANT|>"))
