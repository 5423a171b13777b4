"""The `tool` shape: calls as `assistant_toolcall` turns, their results as `toolresult`, the system text on top."""

from __future__ import annotations

from chatmill.records.record import Message, Role
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


def careful(record: Object) -> ParsedRecord:
    """The conversation of one record; a top-level `system` becomes its first message."""
    turns = fields.messages(record, "messages")
    system = fields.optional_text("the record", record, "system")
    head = [Message("system", system)] if system else []
    body = [_message(f"message {index}", turn) for index, turn in enumerate(turns)]
    return ParsedRecord(head + body, fields.record_id(record), fields.tools(record))


def _message(owner: str, turn: Object) -> Message:
    role = fields.role(owner, turn, "role", ROLES)
    fields.refuse(owner, turn, "tool_calls", "function_call", right='expected a turn of role "assistant_toolcall"')
    weight = fields.weight(owner, turn, role)
    if turn["role"] == "assistant_toolcall":
        call = fields.tool_call(owner, turn, fields.optional_text(owner, turn, "id"))
        said = fields.optional_text(owner, turn, "content") or ""
        return Message(role, said, fields.reasoning(owner, turn, role), (call,), weight=weight)
    if turn["role"] == "toolresult":
        content = fields.required(owner, turn, "content")
        shown = content if type(content) is str else compact(content)
        caller, call_id = (fields.optional_text(owner, turn, key) for key in ("name", "tool_call_id"))
        return Message(role, shown, name=caller, tool_call_id=call_id, weight=weight)
    said = fields.text(owner, turn, "content")
    return Message(role, said, fields.reasoning(owner, turn, role), weight=weight)
