"""Parse the record shapes `sharegpt` and `tool`, in which tool calls and tool results are separate turns.

sharegpt   `conversations` with `from` and `value`, including `function_call` and `observation` turns
tool       `messages` with `role` and `content`, including `assistant_toolcall` and `toolresult` turns
"""

from __future__ import annotations

from chatmill.errors import RecordError
from chatmill.records.record import Message, Role, ToolCall, new_message
from chatmill.records.shapes import fields
from chatmill.records.shapes.decode import compact
from chatmill.records.shapes.fields import KeyReader, Object, ParsedRecord, PlainMessages
from chatmill.records.shapes.messages import read_message
from chatmill.records.shapes.ranges import read_ranges

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

_PLAIN_SHAREGPT = PlainMessages(
    "from", "value", {name: role for name, role in _SHAREGPT_ROLES.items() if name != "function_call"}
)
_PLAIN_TOOL = PlainMessages("role", "content", fields.TEXT_ROLES)


def sharegpt(record: Object) -> ParsedRecord:
    """Parse a record of the shape `sharegpt`; a top-level `system` prompt becomes the first message."""
    return fields.read_record(record, _sharegpt_messages)


def _sharegpt_messages(record: KeyReader) -> list[Message]:
    return fields.with_system(record, fields.messages(record, "conversations", _sharegpt_message, _PLAIN_SHAREGPT))


def tool(record: Object) -> ParsedRecord:
    """Parse a record of the shape `tool`; a top-level `system` prompt becomes the first message."""
    return fields.read_record(record, _tool_messages)


def _tool_messages(record: KeyReader) -> list[Message]:
    return fields.with_system(record, fields.messages(record, "messages", _tool_message, _PLAIN_TOOL))


def _sharegpt_message(turn: KeyReader) -> Message:
    if "from" not in turn and "role" in turn:
        # Many ShareGPT datasets contain OpenAI-style messages.
        return read_message(turn)
    name = turn.peek("from")
    role = turn.role("from", _SHAREGPT_ROLES)
    value, weight = turn.text("value"), fields.read_weight(turn, role)
    ranges, weight = read_ranges(turn, role, None if name == "function_call" else value, weight)
    if name == "function_call":
        return new_message(role, tool_calls=_calls(turn, value), weight=weight)
    return new_message(role, value, fields.reasoning(turn, role), weight=weight, train_ranges=ranges)


def _calls(turn: KeyReader, value: str) -> tuple[ToolCall, ...]:
    owner, right = turn.owner, "expected an object with name and arguments"
    calls = fields.json_value(value, f"{owner} has a function_call that is not JSON", right, kind="arguments")
    if calls == []:
        what = f"{owner}: function_call is an empty list"
        raise RecordError(what, "expected at least one call", kind="arguments")
    made = []
    for index, value in enumerate(calls if type(calls) is list else [calls]):
        call = fields.call_fields(turn, f"{owner}, tool call {index}", "value.", value)
        made.append(fields.tool_call(call))
        call.finish()
    return tuple(made)


def _tool_message(turn: KeyReader) -> Message:
    name_of_role = turn.peek("role")
    role = turn.role("role", TOOL_ROLES)
    turn.refuse("tool_calls", "function_call", right='expected a turn of role "assistant_toolcall"')
    ranges, weight = read_ranges(turn, role, turn.peek("content"), fields.read_weight(turn, role))
    if name_of_role == "toolresult":
        content = turn.required("content")
        text = content if type(content) is str else compact(content)
        name, call_id = (turn.optional_text(key) for key in ("name", "tool_call_id"))
        return new_message(role, text, name=name, tool_call_id=call_id, weight=weight)
    if name_of_role == "assistant_toolcall":
        calls: tuple[ToolCall, ...] = (fields.tool_call(turn, turn.optional_text("id")),)
        text = turn.optional_text("content") or ""
    else:
        calls, text = (), turn.text("content")
    return new_message(role, text, fields.reasoning(turn, role), calls, weight=weight, train_ranges=ranges)
