"""The `messages` shape: OpenAI-style chat, and the way by which the bulk of all data comes.

`plain` decodes the common form straight into typed values and refuses everything else; what it refuses goes
through `careful`, which knows every form and every fault. Where `plain` answers, both answer the same.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from chatmill.errors import RecordError
from chatmill.records.record import ROLES, Message, Role, ToolCall
from chatmill.records.shapes import fields
from chatmill.records.shapes.decode import named
from chatmill.records.shapes.fields import Object, ParsedRecord, quoted

_ROLES: dict[str, Role] = {role: role for role in ROLES}


class _PlainMessage(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """Role and text; the keys that tables and exports fill with null may be there as null."""

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


class _PlainRecord(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    messages: list[_PlainMessage]
    id: str | int | None = None
    tools: None = None


_PLAIN = msgspec.json.Decoder(_PlainRecord)


def plain(data: bytes) -> ParsedRecord | None:
    """The conversation where it is nothing but roles and texts; None where a careful look is needed."""
    try:
        found = _PLAIN.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return _conversation(found) if found.messages else None


def plain_lines(block: bytes) -> list[ParsedRecord] | None:
    """The conversations of a block of lines, if each line holds exactly one and all of them are plain."""
    count = _object_lines(block)
    if not count:
        return None
    try:
        found = _PLAIN.decode_lines(block)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    if len(found) != count or not all(record.messages for record in found):
        return None
    return [_conversation(record) for record in found]


def _object_lines(block: bytes) -> int:
    """How many lines there are, if each of them begins with { and ends with }; otherwise 0.

    The decoder takes line ends for spaces. But within a value no { comes after a }, so that all of these line ends
    stand between values, and with as many values as lines each line is one.
    """
    raw = np.frombuffer(block, dtype=np.uint8)
    ends = np.flatnonzero(raw == ord("\n"))
    if not block.endswith(b"\n"):
        ends = np.append(ends, len(raw))
    opens = raw[0] == ord("{") and (raw[ends[:-1] + 1] == ord("{")).all()
    return len(ends) if opens and (raw[ends - 1] == ord("}")).all() else 0


def _conversation(found: _PlainRecord) -> ParsedRecord:
    name = str(found.id) if isinstance(found.id, int) else found.id
    return ParsedRecord([Message(message.role, message.content) for message in found.messages], name)


def careful(record: Object) -> ParsedRecord:
    """The conversation of one record in any of the accepted forms."""
    fields.refuse("the record", record, "system", right='expected it as the first message, or shape "tool"')
    fields.refuse("the record", record, "functions", right="expected tools and tool_calls")
    turns = [_message(f"message {index}", turn) for index, turn in enumerate(fields.messages(record, "messages"))]
    return ParsedRecord(turns, fields.record_id(record), fields.tools(record))


def _message(owner: str, turn: Object) -> Message:
    # Newer servers call the system message the developer's.
    role = "system" if turn.get("role") == "developer" else fields.role(owner, turn, "role", _ROLES)
    fields.refuse(owner, turn, "function_call", right="expected tool_calls")
    fields.refuse(owner, turn, "refusal", "audio", right="expected its text as content")
    calls = _tool_calls(owner, turn, role)
    return Message(
        role=role,
        content=_content(owner, turn, calls),
        reasoning=fields.reasoning(owner, turn, role),
        tool_calls=calls,
        name=fields.optional_text(owner, turn, "name"),
        tool_call_id=fields.optional_text(owner, turn, "tool_call_id"),
        weight=fields.weight(owner, turn, role),
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
    return "".join(_part(f"{owner}, part {index}", part) for index, part in enumerate(content))


def _part(owner: str, part: Any) -> str:
    right = 'expected {"type": "text", "text": …}'
    if type(part) is not dict:
        raise RecordError(f"{owner} is {named(part)}", right, kind="content")
    if part.get("type") != "text":
        found = f"type {quoted(part['type'])}" if type(part.get("type")) is str else "no type"
        raise RecordError(f"{owner} has {found}", right, kind="content")
    return fields.text(owner, part, "text")


def _tool_calls(owner: str, turn: Object, role: Role) -> tuple[ToolCall, ...]:
    calls = turn.get("tool_calls")
    if calls is None:
        return ()
    if type(calls) is not list:
        raise RecordError(f"{owner} has {named(calls)} as tool_calls", "expected a list", kind="arguments")
    if calls and role != "assistant":
        what = f"{owner} has tool_calls on role {role}"
        raise RecordError(what, "expected them on the assistant only", kind="arguments")
    return tuple(_tool_call(f"{owner}, tool call {index}", call) for index, call in enumerate(calls))


def _tool_call(owner: str, call: Any) -> ToolCall:
    """One call, nested under `function` as servers write it, or flat."""
    if type(call) is not dict:
        return fields.tool_call(owner, call)
    kind = call.get("type")
    if kind not in (None, "function"):
        found = quoted(kind) if type(kind) is str else named(kind)
        raise RecordError(f"{owner} has type {found}", 'expected "function"', kind="arguments")
    function = call if call.get("function") is None else call["function"]
    return fields.tool_call(owner, function, fields.optional_text(owner, call, "id"))
