"""The `sharegpt` shape: `conversations` of from and value, with calls and observations as turns of their own."""

from __future__ import annotations

from chatmill.errors import RecordError
from chatmill.records.record import Message, Role, ToolCall, new_message
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


def parse(record: Object) -> ParsedRecord:
    """The conversation of one record; a top-level `system` becomes its first message."""
    return fields.conversation(record, "conversations", _message, fields.system)


def _message(owner: str, turn: Object) -> Message:
    role = fields.role(owner, turn, "from", _ROLES)
    value, weight = fields.text(owner, turn, "value"), fields.weight(owner, turn, role)
    if turn["from"] == "function_call":
        return new_message(role, tool_calls=_calls(owner, value), weight=weight)
    return new_message(role, value, weight=weight)


def _calls(owner: str, value: str) -> tuple[ToolCall, ...]:
    """The calls of a turn: JSON text of one call or of a list of calls."""
    try:
        calls = decode(value.encode())
    except RecordError as fault:
        what = f"{owner} has a function_call that is not JSON: {fault.what}"
        raise RecordError(what, "expected an object with name and arguments", kind="arguments") from None
    if calls == []:
        what = f"{owner} has an empty list as function_call"
        raise RecordError(what, "expected at least one call", kind="arguments")
    numbered = enumerate(calls if type(calls) is list else [calls])
    return tuple(fields.tool_call(f"{owner}, tool call {index}", call) for index, call in numbered)
