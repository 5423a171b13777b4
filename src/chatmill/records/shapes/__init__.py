"""Detect the record shape of a file, such as `messages` or `alpaca`, and parse its records.

The function for each shape parses the bytes of one record into conversations, or raises `RecordError`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from chatmill.errors import DataError, RecordError, UsageError
from chatmill.records.record import Record, new_record
from chatmill.records.shapes import instruct, messages, oasst, plain_text, tool_turns, transcript
from chatmill.records.shapes.column_map import ColumnMap, parse_columns
from chatmill.records.shapes.decode import decode, decode_object
from chatmill.records.shapes.fields import KeyReader, Object, ParsedRecord, keys_shown, quoted
from chatmill.records.shapes.plain_text import TextTemplates

Shape = Callable[[bytes], list[ParsedRecord]]
DecodeLines = Callable[[bytes], list[ParsedRecord] | None]

# Number of bytes of an invalid record to keep with the error.
RAW_BYTES = 4096


_OBJECTS: dict[str, Callable[[Object], ParsedRecord]] = {
    "messages": messages.parse,
    "sharegpt": tool_turns.sharegpt,
    "alpaca": instruct.alpaca,
    "dolly": instruct.dolly,
    "prompt-completion": plain_text.prompt_completion,
    "text": plain_text.text,
    "tool": tool_turns.tool,
    "primer": messages.parse_primer,
}
"""Shapes whose records are JSON objects."""
_DECODERS: dict[str, Callable[[bytes], ParsedRecord | None]] = {
    "messages": messages.decode,
    "primer": messages.decode_primer,
}
"""Faster parsers for plain records; they return None for other records."""
_OTHERS: dict[str, Shape] = {
    "oasst1": lambda data: [oasst.parse(decode(data))],
    "transcript": transcript.from_line,
    "transcript-lines": transcript.from_line,
    "transcript-stream": transcript.from_text,
}
SHAPES = (*_OBJECTS, *_OTHERS)
"""The names of all shapes."""
_RECORDS = 16
_UNITS = 1000
_PAIRS = (("question", "answer"), ("query", "response"), ("input", "output"), ("prompt", "response"))
"""Common pairs of keys for a question and an answer, which are too general to identify a record shape."""


class _OtherFormat(NamedTuple):
    name: str
    keys: set[str]
    """Keys of the first object in the list that identify the format."""


_OTHER_FORMATS = {
    "contents": _OtherFormat("the Gemini format", {"parts"}),
    "segments": _OtherFormat("the Axolotl segments format", {"label", "text"}),
    "conversation": _OtherFormat("the format of human and assistant pairs", {"human", "assistant"}),
}
"""Maps a record key to the unsupported format that uses this key."""
_HINT = f"set the shape with --shape: {', '.join(SHAPES)}"

_DECODE_LINES: dict[str, DecodeLines] = {"messages": messages.decode_lines}
"""A faster parser that parses many lines at once, for the most common shape."""


@dataclass(frozen=True)
class ShapeOptions:
    """Options for parsing records."""

    columns: str | None = None
    """Maps chatmill's keys and roles to those of the file, such as `messages=conversations,role=from`."""
    response_template: str | None = None
    """For `text` records: the string that precedes each answer."""
    instruction_template: str | None = None
    """For `text` records: the string that precedes each question."""

    def column_map(self) -> ColumnMap | None:
        return None if self.columns is None else parse_columns(self.columns)

    def templates(self) -> TextTemplates | None:
        if self.response_template is None:
            if self.instruction_template is not None:
                raise UsageError("--instruction-template requires --response-template")
            return None
        if "" in (self.response_template, self.instruction_template):
            raise UsageError("--response-template and --instruction-template must not be empty")
        return TextTemplates(self.response_template, self.instruction_template)


NO_OPTIONS = ShapeOptions()


def _reader(shape: str, options: ShapeOptions) -> Shape:
    columns, templates = options.column_map(), options.templates()
    if templates is not None and shape != "text":
        raise UsageError(f"--response-template is only for records of shape text, not {shape}; remove this option")
    if shape in _OTHERS or shape == "primer":
        if columns is not None:
            what = f"--columns cannot be used with the shape {shape}, whose key names are fixed"
            raise UsageError(f"{what}; remove this option")
        if shape in _OTHERS:
            return _OTHERS[shape]
    parse, decode_common = _OBJECTS[shape], _DECODERS.get(shape)
    if shape == "text":
        parse = partial(plain_text.text, templates=templates)
    if columns is None:
        key = _MESSAGE_KEYS.get(shape)
        return lambda data: [(decode_common and decode_common(data)) or parse(_object(data, key))]

    def read_renamed(data: bytes) -> list[ParsedRecord]:
        values = _object(data, _MESSAGE_KEYS.get(shape))
        renamed, left_out = columns.renamed(values)
        return [columns.reported(parse(renamed), left_out, values)]

    return read_renamed


def _object(data: bytes, key: str | None) -> Object:
    """Decode a record to a JSON object; if the record is a list of messages, return it as the value of `key`."""
    if key is not None and data.lstrip()[:1] == b"[":
        value = decode(data)
        if type(value) is list and value and all(type(turn) is dict for turn in value):
            return {key: value}
    return decode_object(data)


@dataclass(frozen=True)
class ShapeParser:
    """Parses records of one shape from the bytes of one file.

    For an invalid record, the parser returns a `RecordError` instead of raising it.
    """

    file: str
    source: str
    limit: int
    read: Shape
    decode_lines: DecodeLines | None

    def __call__(self, line: int, data: bytes) -> list[Record | RecordError]:
        try:
            if len(data) > self.limit:
                what = f"the record is longer than {self.limit} bytes"
                raise RecordError(what, "split the conversation, or remove it", kind="too_long")
            return [parsed_record(parsed, self.source, self.file, line) for parsed in self.read(data)]
        except RecursionError:
            fault = RecordError("the record is nested too deeply", "expected fewer levels", kind="nesting")
        except RecordError as error:
            fault = error
        fault.raw = data[:RAW_BYTES]
        return [fault.at(self.file, line, _id(data) if len(data) <= self.limit else None)]

    def block(self, first_line: int, block: bytes) -> list[Record | RecordError]:
        """Return the records of a block of lines, or an empty list if the block cannot be decoded as a whole."""
        parsed = self.decode_lines(block) if self.decode_lines is not None and len(block) <= self.limit else None
        source, file = self.source, self.file
        # Only plain records are decoded in blocks; they have no unread keys.
        return [
            new_record(each.messages, each.id, each.tools, source, file, line)
            for line, each in enumerate(parsed or (), first_line)
        ]


def parsed_record(parsed: ParsedRecord, source: str, file: str, line: int) -> Record:
    turns, id, tools, *others = parsed
    return new_record(turns, id, tools, source, file, line, *others)


def parser(shape: str, *, file: str, source: str, limit: int, options: ShapeOptions = NO_OPTIONS) -> ShapeParser:
    decode_lines = _DECODE_LINES.get(shape) if options.columns is None else None
    return ShapeParser(file, source, limit, _reader(shape, options), decode_lines)


def _id(data: bytes) -> str | None:
    """Return the id of an invalid record, or None if the id cannot be read."""
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


# Detect the shape of a file from the keys of its first records.


def detect(file: str, units: Iterable[tuple[int, bytes]], columns: ColumnMap | None = None) -> tuple[str, str]:
    """Return the record shape of a file and the reason for choosing it; raise `DataError` if no shape or several shapes
    fit its first records.

    The shape `primer` is never detected, because every `primer` record is also a `messages` record.
    """
    possible: dict[str, str] | None = None
    unknown: tuple[int, Object] | None = None
    seen = 0
    for line, data in islice(units, _UNITS):
        record = _value(data)
        if record is None:
            continue
        if columns is not None and isinstance(record, dict):
            record, _ = columns.renamed(record)
        votes = shapes_of(record)
        if votes:
            if possible is not None and not possible.keys() & votes.keys():
                both = " and ".join(" or ".join(sorted(names)) for names in (possible, votes))
                raise DataError(f"{file}:{line}: the file has records of shapes {both}; split the file, or {_HINT}")
            possible = {name: why for name, why in (possible or votes).items() if name in votes}
        elif isinstance(record, dict):
            unknown = (line, record) if unknown is None else unknown
        seen += 1
        if seen == _RECORDS:
            break
    if possible is None and unknown is not None:
        line, record = unknown
        _refuse_other_data(file, line, record)
        keys = f"with the keys {keys_shown(list(record))}" if record else "without keys"
        what = f"{file}: cannot detect the shape of records {keys}"
        raise DataError(f"{what}; {_HINT}, or map the keys{_columns_hint(record)}")
    if possible is None:
        # No record is an object, so all shapes would report the same errors.
        return "messages", "no record is a JSON object"
    if "messages" in possible:
        return "messages", possible["messages"]
    if len(possible) > 1:
        raise DataError(f"{file}: the records match the shapes {' and '.join(sorted(possible))}; {_HINT}")
    return possible.popitem()


def _columns_hint(record: Object) -> str:
    """Return a hint with the `--columns` value for a record with a question and an answer.

    If the record also has the key `system` or `history`, the hint maps its keys to those of the `alpaca` shape.
    """
    pair = next((pair for pair in _PAIRS if all(type(record.get(key)) is str for key in pair)), None)
    if pair is None:
        return " with --columns"
    names = ("prompt", "completion") if record.keys().isdisjoint(("system", "history")) else ("instruction", "output")
    return f": --columns {names[0]}={pair[0]},{names[1]}={pair[1]}"


def _refuse_other_data(file: str, line: int, record: Object) -> None:
    """Raise `RecordError` if a record has images, preference data or token ids, or a format that `--columns` cannot
    map.
    """
    keys = KeyReader("the record", "", record, {})
    try:
        keys.refuse_media()
        keys.refuse_preferences()
    except RecordError as fault:
        raise fault.at(file, line) from None
    if "input_ids" in record:
        what = 'the record has "input_ids": it is already tokenized'
        raise RecordError(what, "expected the original conversations", kind="keys").at(file, line)
    for key, format in _OTHER_FORMATS.items():
        items = record.get(key)
        if type(items) is list and items and type(items[0]) is dict and format.keys <= items[0].keys():
            what = f'the record has "{key}", as in {format.name}'
            raise RecordError(
                what, "expected messages with role and content; convert the conversation", kind="keys"
            ).at(file, line)


def shapes_of(record: Any) -> dict[str, str]:
    """Return a dictionary that maps each shape that fits the keys of a decoded record to the reason why it fits."""
    if isinstance(record, str):
        return {"transcript": "the text has <|USER|> or <|ASSISTANT|>"} if _has_marker(record) else {}
    if not isinstance(record, dict):
        return _list_shapes(record) if isinstance(record, list) else {}
    keys = {key for key, value in record.items() if value is not None}
    shapes: dict[str, str] = {}
    if "messages" in keys:
        shapes |= _chat_shapes(record)
    for shape, wanted in _KEYS_OF_SHAPES.items():
        if keys.issuperset(wanted):
            shapes[shape] = f"the records have {' and '.join(map(quoted, wanted))}"
    if isinstance(record.get("prompt"), dict):
        shapes["oasst1"] = 'the records have an object as "prompt"'
        shapes.pop("prompt-completion", None)
    elif "oasst1" not in shapes and "text" in keys:
        if _has_marker(record["text"]):
            shapes["transcript"] = 'the "text" of the records has <|USER|> or <|ASSISTANT|>'
        elif not shapes and keys.isdisjoint(_BESIDE_A_TEXT):
            shapes["text"] = 'the records have "text"'
    return shapes


def _list_shapes(turns: list[Any]) -> dict[str, str]:
    for shape, key in (("messages", "role"), ("sharegpt", "from")):
        if turns and all(isinstance(turn, dict) and key in turn for turn in turns):
            return {shape: f"the records are lists of messages with {quoted(key)}"}
    return {}


_MESSAGE_KEYS = {"messages": "messages", "sharegpt": "conversations"}
"""Maps each shape whose records can be a bare list of messages to the key for this list."""
_BESIDE_A_TEXT = ("role", "from", "output", "outputs", "response", "responses", "answer", "answers", "completions")
"""If a record has one of these keys, its `text` is only part of the conversation."""
_KEYS_OF_SHAPES = {
    "sharegpt": ("conversations",),
    "alpaca": ("instruction", "output"),
    "dolly": ("instruction", "response"),
    "oasst1": ("message_id", "role", "text"),
    "prompt-completion": ("prompt", "completion"),
}


def _chat_shapes(record: Object) -> dict[str, str]:
    """Return the shapes `messages`, `tool` or both; the two shapes differ only in some roles and keys."""
    as_messages = {"messages": 'the records have "messages"'}
    as_tool = {"tool": 'the records have "messages" and "system", or the roles assistant_toolcall and toolresult'}
    turns = record["messages"] if isinstance(record["messages"], list) else []
    turns = [turn for turn in turns if isinstance(turn, dict)]
    roles = {turn.get("role") for turn in turns if isinstance(turn.get("role"), str)}
    if record.get("system") is not None or roles & {"assistant_toolcall", "toolresult"}:
        return as_tool
    if roles - set(tool_turns.TOOL_ROLES) or any(isinstance(turn.get("content"), list) for turn in turns):
        return as_messages
    return as_messages if any(turn.get("tool_calls") for turn in turns) else as_messages | as_tool


def _value(data: bytes) -> Any:
    """Return the decoded JSON record or the transcript text, or None if the record cannot be decoded."""
    if data.lstrip()[:2] == b"<|":
        return data.decode(errors="replace")
    try:
        return decode(data)
    except (RecordError, RecursionError):
        return None


def keys_in(data: bytes) -> set[str]:
    """Return the keys of a record and of its nested objects."""
    keys: set[str] = set()
    values = [_value(data)]
    while values:
        value = values.pop()
        if isinstance(value, str) and value.lstrip().startswith("["):
            value = _value(value.encode())
        if isinstance(value, dict):
            keys |= value.keys()
            values += value.values()
        elif isinstance(value, list):
            values += value
    return keys


def _has_marker(text: Any) -> bool:
    return isinstance(text, str) and any(mark in text for mark in ("<|SYSTEM|>", "<|USER|>", "<|ASSISTANT|>"))
