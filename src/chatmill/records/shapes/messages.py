"""Read records of the shape `messages` (OpenAI-style chat) and of its strict variant `primer`.

`decode` and `decode_lines` are fast, but read only plain records, in which each message has only a role and a string as
content. `parse` reads all records and reports errors.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import msgspec
import numpy as np

from chatmill.errors import RecordError
from chatmill.records.record import ROLES, Message, Record, Role, ToolCall, new_message, new_record
from chatmill.records.shapes import fields
from chatmill.records.shapes.decode import may_repeat_key, named, repeated_key, wrong_type
from chatmill.records.shapes.fields import KeyReader, Object, ParsedRecord, PlainMessages, quoted
from chatmill.records.shapes.ranges import read_ranges

_ROLES: dict[str, Role] = {role: role for role in ROLES}
PLAIN = PlainMessages("role", "content", _ROLES)
# Newer OpenAI models use the role "developer" instead of "system".
_DEVELOPER: dict[str, Role] = {"developer": "system"}
_TEXT_PARTS = ("text", "input_text", "output_text")
_REASONING_PARTS = ("reasoning", "thinking")
_CALL_PARTS = ("tool_call", "function_call")


class _CommonMessage(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """A plain message, which has only `role` and `content`. The other fields must be null or missing."""

    role: Role
    content: str
    name: None = None
    tool_calls: None = None
    tool_call_id: None = None
    function_call: None = None
    refusal: None = None
    reasoning_content: None = None
    train: None = None
    weight: None = None


class _CommonRecord(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    messages: list[_CommonMessage]
    id: str | int | None = None
    tools: None = None


class _PrimerMessage(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    role: Literal["system", "user", "assistant"]
    content: str


class _PrimerRecord(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    messages: list[_PrimerMessage]
    id: ClassVar[None] = None


_DECODER = msgspec.json.Decoder(_CommonRecord)
_PRIMER_DECODER = msgspec.json.Decoder(_PrimerRecord)


def decode(data: bytes, decoder: msgspec.json.Decoder[Any] = _DECODER) -> ParsedRecord | None:
    """Decode a plain record; return None for any other record."""
    try:
        record = decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return _conversation(record) if record.messages and repeated_key(data) is None else None


def decode_primer(data: bytes) -> ParsedRecord | None:
    """Decode a valid primer record; return None for any other record."""
    return decode(data, _PRIMER_DECODER)


def decode_lines(block: bytes) -> list[ParsedRecord] | None:
    """Decode a block of lines; return None unless every line is one plain record."""
    count = _object_lines(block)
    if not count or may_repeat_key(block):
        return None
    try:
        records = _DECODER.decode_lines(block)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    if len(records) != count or not all(record.messages for record in records):
        return None
    return [_conversation(record) for record in records]


def _object_lines(block: bytes) -> int:
    """Return the number of lines if each line starts with { and ends with }, otherwise 0.

    Inside a JSON value, a line end never occurs between } and {. If the number of JSON values equals the number of
    lines, each line is therefore one value.
    """
    raw = np.frombuffer(block, dtype=np.uint8)
    ends = np.flatnonzero(raw == ord("\n"))
    if not block.endswith(b"\n"):
        ends = np.append(ends, len(raw))
    opens = raw[0] == ord("{") and (raw[ends[:-1] + 1] == ord("{")).all()
    return len(ends) if opens and (raw[ends - 1] == ord("}")).all() else 0


def _conversation(record: _CommonRecord | _PrimerRecord) -> ParsedRecord:
    name = str(record.id) if isinstance(record.id, int) else record.id
    return ParsedRecord([new_message(message.role, message.content) for message in record.messages], name)


def parse(record: Object) -> ParsedRecord:
    return fields.read_record(record, _messages)


def _messages(record: KeyReader) -> list[Message]:
    record.refuse("system", right='expected the system text as the first message, or shape "tool"')
    record.refuse("functions", right="expected the keys tools and tool_calls instead")
    return fields.messages(record, "messages", read_message, PLAIN)


def parse_primer(record: Object) -> ParsedRecord:
    """Parse one primer record, which has only the key `messages`; each message has only `role` and `content`."""
    whole = KeyReader("the record", "", record, {})
    whole.only(("messages",))
    turns = fields.message_list(whole, "messages")
    return ParsedRecord(
        [_primer_message(KeyReader(f"message {index}", "", turn, {})) for index, turn in enumerate(turns)]
    )


def _primer_message(turn: KeyReader) -> Message:
    turn.only(("role", "content"))
    return new_message(turn.role("role", fields.TEXT_ROLES, has_columns=False), turn.text("content"))


def message_from_fields(given: Object, owner: str = "the message") -> Message:
    """Build a message from the fields that `parse` reads; reject unknown fields."""
    turn = KeyReader(owner, "", given, {})
    complete = turn.take("complete")
    turn.refuse_media()
    message = read_message(turn)
    turn.take("annotations")
    turn.only(Message.__struct_fields__)
    return message if complete in (None, True) else msgspec.structs.replace(message, complete=False)


def record_from_fields(given: Object) -> Record:
    """Build a `Record` from its fields; the list of messages can be empty."""
    record = KeyReader("the record", "", given, {})
    record.only(Record.__struct_fields__)
    turns = [] if given.get("messages") == [] else fields.message_list(record, "messages")
    messages = [
        turn if isinstance(turn, Message) else message_from_fields(turn, f"message {index}")
        for index, turn in enumerate(turns)
    ]
    tools = given.get("tools", ())
    if not isinstance(tools, tuple) or not all(isinstance(tool, str) for tool in tools):
        tools = fields.tools(record)
    checked = {"messages": messages, "id": fields.record_id(record), "tools": tools}
    if given.get("weight") is not None:
        checked["weight"] = fields.read_weight(record)
    return new_record(**{**given, **checked})


def read_message(turn: KeyReader) -> Message:
    """Parse one OpenAI-style message."""
    role = turn.role("role", _ROLES if turn.peek("role") != "developer" else _DEVELOPER)
    turn.refuse("function_call", right="expected tool_calls")
    turn.refuse("refusal", right="expected the text of the refusal as content")
    weight = fields.read_weight(turn, role)
    ranges, weight = read_ranges(turn, role, turn.peek("content"), weight)
    calls = _tool_calls(turn, role)
    parts = _content(turn, role, calls, weight)
    return new_message(
        role,
        parts.text,
        parts.reasoning,
        tuple(parts.calls),
        turn.optional_text("name"),
        turn.optional_text("tool_call_id"),
        weight,
        train_ranges=ranges or tuple(parts.ranges),
    )


def _content(turn: KeyReader, role: Role, calls: tuple[ToolCall, ...], weight: float | None) -> _Parts:
    reasoning = fields.reasoning(turn, role)
    has_content, content = "content" in turn, turn.take("content")
    if type(content) is str or (content is None and (calls or reasoning)):
        return _Parts(role, content or "", reasoning, [*calls])
    if type(content) is not list:
        what = wrong_type(turn.owner, "content", content) if has_content else f"{turn.owner} has no content"
        raise RecordError(what, "expected a string or a list of text parts", kind="content")
    parts = _Parts(role)
    for index, part in enumerate(content):
        owner = f"{turn.owner}, part {index}"
        if type(part) is not dict:
            raise RecordError(f"{owner} is {named(part)}", _PART, kind="content")
        parts.add(turn.child(owner, "content[].", part), weight)
    if parts.reasoning and reasoning:
        what = f"{turn.owner} has reasoning both in its content and as a key"
        raise RecordError(what, "expected reasoning only once", kind="content")
    if calls and parts.calls:
        what = f"{turn.owner} has tool calls both in its content and as tool_calls"
        raise RecordError(what, "expected tool calls only once", kind="arguments")
    parts.reasoning, parts.calls = parts.reasoning or reasoning, parts.calls or [*calls]
    return parts


_PART = 'expected {"type": "text", "text": …}, or the types reasoning and tool_call'


@dataclass
class _Parts:
    """Collects the content parts of a message, which must be in the order reasoning, text, tool calls."""

    role: Role
    text: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    ranges: list[tuple[int, int, float]] = field(default_factory=list)
    """Character ranges (start, stop, weight) of text parts that have their own weight, as in Axolotl."""

    def add(self, part: KeyReader, weight: float | None) -> None:
        kind = part.take("type")
        if kind in _TEXT_PARTS:
            self._add_text(part, weight)
        elif kind in _REASONING_PARTS and self.role == "assistant":
            key = next((key for key in (kind, "text") if key in part), "value")
            if self.text or self.calls:
                what = f"{part.owner} is a reasoning part after text or a tool call"
                raise RecordError(what, "expected reasoning before text and tool calls", kind="content")
            part.refuse(*fields.FLAG_KEYS, *fields.WEIGHT_KEYS, right="expected no weight on a part with reasoning")
            self.reasoning += part.text(key)
        elif kind in _CALL_PARTS and self.role == "assistant":
            self._add_calls(part)
        else:
            given = f"type {quoted(kind)}" if type(kind) is str else "no type"
            is_media = type(kind) is str and any(word in kind for word in ("image", "audio", "video", "file"))
            right = "chatmill trains only on text; remove the record" if is_media else _PART
            raise RecordError(f"{part.owner} has {given}", right, kind="media" if is_media else "content")
        part.finish()

    def _add_text(self, part: KeyReader, weight: float | None) -> None:
        if self.calls:
            raise RecordError(
                f"{part.owner} is text after a tool call", "expected text before tool calls", kind="content"
            )
        text = part.text(next((key for key in ("value", "content") if key in part), "text"))
        own = fields.read_weight(part, self.role)
        if own is not None and self.role != "assistant":
            what = f"{part.owner} has a weight, but the role of its message is {self.role}"
            raise RecordError(what, "only parts of assistant messages can have weights", kind="weight")
        if own is not None and text and weight != 0:
            # As in Axolotl, weight 0 on a message overrides the weights of its parts.
            self.ranges.append((len(self.text), len(self.text) + len(text), own))
        self.text += text

    def _add_calls(self, part: KeyReader) -> None:
        part.refuse(*fields.FLAG_KEYS, *fields.WEIGHT_KEYS, right="expected no weight on a part with a tool call")
        if "value" not in part:
            self.calls.append(_call_of(part))
            return
        given, right = part.take("value"), "expected an object with name and arguments"
        given = fields.json_value(given, f"{part.owner} is not JSON", right, kind="arguments")
        numbered = enumerate(given if type(given) is list else [given])
        self.calls += [_tool_call(part, f"{part.owner}, call {index}", "value.", call) for index, call in numbered]


def _tool_calls(turn: KeyReader, role: Role) -> tuple[ToolCall, ...]:
    calls = turn.take("tool_calls")
    if calls is None:
        return ()
    if type(calls) is str:
        right = "expected a list of calls, or a list as JSON text"
        calls = fields.json_value(calls, f"{turn.owner} has tool_calls that are not JSON", right, kind="arguments")
        calls = [] if calls is None else calls
    if type(calls) not in (list, tuple):
        raise RecordError(wrong_type(turn.owner, "tool_calls", calls), "expected a list", kind="arguments")
    if calls and role != "assistant":
        what = f"{turn.owner} has tool_calls, but its role is {role}"
        raise RecordError(what, "expected tool_calls only in assistant messages", kind="arguments")
    numbered = enumerate(calls)
    return tuple(
        _tool_call(turn, f"{turn.owner}, tool call {index}", "tool_calls[].", call) for index, call in numbered
    )


def _tool_call(turn: KeyReader, owner: str, path: str, call: Any) -> ToolCall:
    """Parse one tool call, with name and arguments either at the top level or in the key `function`."""
    if type(call) is ToolCall:
        return call
    return _call_of(fields.call_fields(turn, owner, path, call))


def _call_of(call: KeyReader) -> ToolCall:
    kind = call.take("type")
    if kind not in (None, "function", *_CALL_PARTS):
        given = quoted(kind) if type(kind) is str else named(kind)
        raise RecordError(f"{call.owner} has type {given}", 'expected "function"', kind="arguments")
    id, function = call.optional_text("id"), call.take("function")
    if function is None:
        made = fields.tool_call(call, id)
    else:
        nested = fields.call_fields(call, call.owner, "function.", function)
        made = fields.tool_call(nested, id)
        nested.finish()
    call.finish()
    return made
