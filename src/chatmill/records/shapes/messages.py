"""The `messages` shape: OpenAI-style chat, which most data has; and `primer`, its strict form.

`decode` and `decode_lines` decode the common form, roles and texts only, straight into typed values and return None for
anything else; `parse` reads every accepted form and names every fault. Where both read a record, they agree.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec
import numpy as np

from chatmill.errors import RecordError
from chatmill.records.record import ROLES, Message, Record, Role, ToolCall, new_message, new_record
from chatmill.records.shapes import fields
from chatmill.records.shapes.decode import named
from chatmill.records.shapes.fields import Object, ParsedRecord, quoted

_ROLES: dict[str, Role] = {role: role for role in ROLES}
_FIELDS = (
    *("role", "content", "reasoning", "reasoning_content", "thinking", "tool_calls", "name", "tool_call_id"),
    *("weight", "train", "complete", "function_call", "refusal", "audio", "annotations"),
    *fields.RANGE_KEYS,
)


class _CommonMessage(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """Role and text; keys that tables and exports fill with null may be present as null."""

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
    """The conversation of a record in the common form; None for any other."""
    try:
        record = decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return _conversation(record) if record.messages else None


def decode_primer(data: bytes) -> ParsedRecord | None:
    """The conversation of a valid primer record; None for any other, of which `parse_primer` says what is wrong."""
    return decode(data, _PRIMER_DECODER)


def decode_lines(block: bytes) -> list[ParsedRecord] | None:
    """The conversations of a block of lines, if every line is one record in the common form."""
    count = _object_lines(block)
    if not count:
        return None
    try:
        records = _DECODER.decode_lines(block)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    if len(records) != count or not all(record.messages for record in records):
        return None
    return [_conversation(record) for record in records]


def _object_lines(block: bytes) -> int:
    """How many lines there are, if each of them begins with { and ends with }; otherwise 0.

    The decoder treats line ends as spaces. But within a value no { follows a }, so these line ends are between values,
    and with as many values as lines each line is one value.
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
    """The conversation of one record in any of the accepted forms."""
    fields.refuse("the record", record, "system", right='expected it as the first message, or shape "tool"')
    fields.refuse("the record", record, "functions", right="expected tools and tool_calls")
    return fields.conversation(record, "messages", _message)


def parse_primer(record: Object) -> ParsedRecord:
    """The conversation of one primer record: exactly `messages`, each exactly `role` and `content`."""
    turns = fields.messages(record, "messages")
    fields.only("the record", record, ("messages",))
    return ParsedRecord([_primer_message(f"message {index}", turn) for index, turn in enumerate(turns)])


def _primer_message(owner: str, turn: Object) -> Message:
    role, content = fields.role(owner, turn, "role", fields.TEXT_ROLES), fields.text(owner, turn, "content")
    fields.only(owner, turn, ("role", "content"))
    return new_message(role, content)


def message_from_fields(given: Object, owner: str = "the message") -> Message:
    """The message of these fields, as `parse` reads it; an unknown field is a fault."""
    fields.only(owner, given, _FIELDS)
    message = _message(owner, given)
    return message if given.get("complete", True) else msgspec.structs.replace(message, complete=False)


def record_from_fields(given: Object) -> Record:
    """The record of these fields, with messages as `Message` or as dicts of their fields; there may be none."""
    fields.only("the record", given, Record.__struct_fields__)
    turns = [] if given.get("messages") == [] else fields.messages(given, "messages")
    messages = [
        turn if isinstance(turn, Message) else message_from_fields(turn, f"message {index}")
        for index, turn in enumerate(turns)
    ]
    tools = given.get("tools", ())
    if not isinstance(tools, tuple) or not all(isinstance(tool, str) for tool in tools):
        tools = fields.tools(given)
    return new_record(**{**given, "messages": messages, "id": fields.record_id(given), "tools": tools})


def _message(owner: str, turn: Object) -> Message:
    # Newer servers call the system message the developer's.
    role = "system" if turn.get("role") == "developer" else fields.role(owner, turn, "role", _ROLES)
    fields.refuse(owner, turn, "function_call", right="expected tool_calls")
    fields.refuse(owner, turn, "refusal", "audio", right="expected its text as content")
    calls = _tool_calls(owner, turn, role)
    weight = fields.weight(owner, turn, role)
    ranges, weight = fields.train_ranges(owner, turn, role, turn.get("content"), weight)
    return new_message(
        role,
        _content(owner, turn, calls),
        fields.reasoning(owner, turn, role),
        calls,
        fields.optional_text(owner, turn, "name"),
        fields.optional_text(owner, turn, "tool_call_id"),
        weight,
        train_ranges=ranges,
    )


def _content(owner: str, turn: Object, calls: tuple[ToolCall, ...]) -> str:
    content = turn.get("content")
    if type(content) is str:
        return content
    if content is None and calls:
        return ""
    if type(content) is not list:
        what = f"{owner} has {named(content)} as content" if "content" in turn else f"{owner} has no content"
        raise RecordError(what, "expected a string or a list of text parts", kind="content")
    return "".join(_text_part(f"{owner}, part {index}", part) for index, part in enumerate(content))


def _text_part(owner: str, part: Any) -> str:
    right = 'expected {"type": "text", "text": …}'
    if type(part) is not dict:
        raise RecordError(f"{owner} is {named(part)}", right, kind="content")
    if part.get("type") != "text":
        given = f"type {quoted(part['type'])}" if type(part.get("type")) is str else "no type"
        raise RecordError(f"{owner} has {given}", right, kind="content")
    return fields.text(owner, part, "text")


def _tool_calls(owner: str, turn: Object, role: Role) -> tuple[ToolCall, ...]:
    calls = turn.get("tool_calls")
    if calls is None:
        return ()
    if type(calls) not in (list, tuple):
        raise RecordError(f"{owner} has {named(calls)} as tool_calls", "expected a list", kind="arguments")
    if calls and role != "assistant":
        what = f"{owner} has tool_calls on role {role}"
        raise RecordError(what, "expected them on the assistant only", kind="arguments")
    return tuple(_tool_call(f"{owner}, tool call {index}", call) for index, call in enumerate(calls))


def _tool_call(owner: str, call: Any) -> ToolCall:
    """One call, nested under `function` as servers write it, or flat."""
    if type(call) is ToolCall:
        return call
    if type(call) is not dict:
        return fields.tool_call(owner, call)
    kind = call.get("type")
    if kind not in (None, "function"):
        given = quoted(kind) if type(kind) is str else named(kind)
        raise RecordError(f"{owner} has type {given}", 'expected "function"', kind="arguments")
    function = call if call.get("function") is None else call["function"]
    return fields.tool_call(owner, function, fields.optional_text(owner, call, "id"))
