"""The `tool` shape: calls as `assistant_toolcall` turns, results as `toolresult` turns, and a top-level system text."""

from __future__ import annotations

from chatmill.records.record import Message, Role, ToolCall, new_message
from chatmill.records.shapes import fields
from chatmill.records.shapes.decode import compact
from chatmill.records.shapes.fields import Object, ParsedRecord

ROLES: dict[str, Role] = {
    "system": "system",
    "user": "user",
    "assistant": "assistant",
    "assistant_toolcall": "assistant",
    "toolresult": "tool",
}


def parse(record: Object) -> ParsedRecord:
    """The conversation of one record; a top-level `system` becomes its first message."""
    return fields.conversation(record, "messages", _message, fields.system)


def _message(owner: str, turn: Object) -> Message:
    role = fields.role(owner, turn, "role", ROLES)
    fields.refuse(owner, turn, "tool_calls", "function_call", right='expected a turn of role "assistant_toolcall"')
    weight = fields.weight(owner, turn, role)
    if turn["role"] == "toolresult":
        content = fields.required(owner, turn, "content")
        text = content if type(content) is str else compact(content)
        name, call_id = (fields.optional_text(owner, turn, key) for key in ("name", "tool_call_id"))
        return new_message(role, text, name=name, tool_call_id=call_id, weight=weight)
    if turn["role"] == "assistant_toolcall":
        calls: tuple[ToolCall, ...] = (fields.tool_call(owner, turn, fields.optional_text(owner, turn, "id")),)
        text = fields.optional_text(owner, turn, "content") or ""
    else:
        calls, text = (), fields.text(owner, turn, "content")
    return new_message(role, text, fields.reasoning(owner, turn, role), calls, weight=weight)
