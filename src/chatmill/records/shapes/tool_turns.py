"""The `sharegpt` and `tool` shapes: calls and results are turns of their own, and the system text may be top-level.

sharegpt   `conversations` of from and value, with `function_call` and `observation` turns
tool       `messages` with `assistant_toolcall` and `toolresult` turns
"""

from __future__ import annotations

from chatmill.errors import RecordError
from chatmill.records.record import Message, Role, ToolCall, new_message
from chatmill.records.shapes import fields
from chatmill.records.shapes.decode import compact
from chatmill.records.shapes.fields import Object, ParsedRecord

_SHAREGPT_ROLES: dict[str, Role] = {
    "system": "system",
    "human": "user",
    "gpt": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
TOOL_ROLES: dict[str, Role] = {**fields.TEXT_ROLES, "assistant_toolcall": "assistant", "toolresult": "tool"}


def sharegpt(record: Object) -> ParsedRecord:
    """The conversation of one record; a top-level `system` becomes its first message."""
    return fields.conversation(record, "conversations", _sharegpt_message, fields.system)


def tool(record: Object) -> ParsedRecord:
    """The conversation of one record; a top-level `system` becomes its first message."""
    return fields.conversation(record, "messages", _tool_message, fields.system)


def _sharegpt_message(owner: str, turn: Object) -> Message:
    role = fields.role(owner, turn, "from", _SHAREGPT_ROLES)
    value, weight = fields.text(owner, turn, "value"), fields.weight(owner, turn, role)
    if turn["from"] == "function_call":
        ranges, weight = fields.train_ranges(owner, turn, role, None, weight)
        return new_message(role, tool_calls=_calls(owner, value), weight=weight)
    ranges, weight = fields.train_ranges(owner, turn, role, value, weight)
    return new_message(role, value, weight=weight, train_ranges=ranges)


def _calls(owner: str, value: str) -> tuple[ToolCall, ...]:
    """The calls of a turn: JSON text of one call or of a list of calls."""
    right = "expected an object with name and arguments"
    calls = fields.json_value(value, f"{owner} has a function_call that is not JSON", right, kind="arguments")
    if calls == []:
        what = f"{owner} has an empty list as function_call"
        raise RecordError(what, "expected at least one call", kind="arguments")
    numbered = enumerate(calls if type(calls) is list else [calls])
    return tuple(fields.tool_call(f"{owner}, tool call {index}", call) for index, call in numbered)


def _tool_message(owner: str, turn: Object) -> Message:
    role = fields.role(owner, turn, "role", TOOL_ROLES)
    fields.refuse(owner, turn, "tool_calls", "function_call", right='expected a turn of role "assistant_toolcall"')
    weight = fields.weight(owner, turn, role)
    ranges, weight = fields.train_ranges(owner, turn, role, turn.get("content"), weight)
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
    return new_message(role, text, fields.reasoning(owner, turn, role), calls, weight=weight, train_ranges=ranges)
