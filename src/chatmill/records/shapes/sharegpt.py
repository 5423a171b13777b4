"""The `sharegpt` shape: `conversations` of from and value, with calls and observations as turns of their own."""

from __future__ import annotations

from typing import Any

from chatmill.errors import RecordError
from chatmill.records.record import Message, Role, ToolCall
from chatmill.records.shapes import fields
from chatmill.records.shapes.decode import decode
from chatmill.records.shapes.fields import Object, ParsedRecord

_ROLES: dict[str, Role] = {
    "system": "system",
    "human": "user",
    "gpt": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


def careful(record: Object) -> ParsedRecord:
    """The conversation of one record; a top-level `system` becomes its first message."""
    turns = fields.messages(record, "conversations")
    system = fields.optional_text("the record", record, "system")
    head = [Message("system", system)] if system else []
    body = [_message(f"message {index}", turn) for index, turn in enumerate(turns)]
    return ParsedRecord(head + body, fields.record_id(record), fields.tools(record))


def _message(owner: str, turn: Object) -> Message:
    role = fields.role(owner, turn, "from", _ROLES)
    value, weight = fields.text(owner, turn, "value"), fields.weight(owner, turn, role)
    if turn["from"] == "function_call":
        return Message(role, tool_calls=_calls(owner, value), weight=weight)
    return Message(role, value, weight=weight)


def _calls(owner: str, value: str) -> tuple[ToolCall, ...]:
    try:
        found: Any = decode(value.encode())
    except RecordError as fault:
        what = f"{owner} has a function_call that is not JSON: {fault.what}"
        raise RecordError(what, "expected an object with name and arguments", kind="arguments") from None
    calls = found if type(found) is list else [found]
    if not calls:
        what = f"{owner} has an empty list as function_call"
        raise RecordError(what, "expected at least one call", kind="arguments")
    return tuple(fields.tool_call(f"{owner}, tool call {index}", call) for index, call in enumerate(calls))
