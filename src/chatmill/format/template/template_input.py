"""Convert records to the variables of a chat template.

In this module, the shape of a record is everything except the texts of its messages, such as the roles and the tools.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from chatmill.errors import RecordError
from chatmill.format.template.tracing.trace import OUTSIDE, FieldPath
from chatmill.records.record import NO_ROLE, ROLES, Message, Record, ToolCall, is_layout

TextOf = Callable[[str, FieldPath], str]
"""Maps a text of the record to its value in the template variables."""

_DECODE = msgspec.json.Decoder().decode
_ENCODE = msgspec.json.Encoder().encode


@dataclass(frozen=True)
class Style:
    """The form in which a template expects messages."""

    parts: bool = False
    """Whether to pass content as a list of parts, as for vision-language models."""
    arguments_as_text: bool = False
    """Whether to pass the arguments of a tool call as a JSON string instead of an object."""


@dataclass(frozen=True)
class TemplateInput:
    """The template variables of one record."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    characters: int


SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The special tokens that a tokenizer may define as template variables.

Undefined variables render as an empty string.
"""
LEFT_OUT = "whitespace_left_out"
"""Ledger reason for a record with whitespace between turns, which templates drop."""
_ROLE_CODES: dict[str, int] = {role: code for code, role in enumerate(ROLES)}


def only_turns(record: Record) -> Record:
    """Return a transcript without whitespace between turns.

    Raise `RecordError` if the text between turns contains more than whitespace.
    """
    if all(message.role != NO_ROLE for message in record.messages):
        return record
    for number, message in enumerate(record.messages):
        if message.role == NO_ROLE and not is_layout(message):
            what = f"message {number} is text outside turns, which a chat template cannot render"
            right = "use --format post-training, or remove the text"
            if all(each.role == NO_ROLE for each in record.messages):
                what = "the text has no turn markers such as <|USER|>"
                right = "expected a transcript; docs/reference/records.md lists other layouts"
            raise RecordError(what, right, kind="text_outside_turns")
    return msgspec.structs.replace(record, messages=[each for each in record.messages if each.role != NO_ROLE])


def plain_input(record: Record, style: Style) -> TemplateInput:
    """Return the template variables of a record, with its texts unchanged."""
    return build_input(record, style, _unchanged, _unchanged)


def shape_and_texts(record: Record, style: Style) -> tuple[bytes, list[str]]:
    """Return the shape of a record as bytes, and the texts of its messages.

    For a record with only roles and contents, the shape has one byte per message, the code of its role. For all other
    records, the shape is byte 255, followed by JSON with the tools and with the messages without their texts.
    """
    codes = [
        255
        if message.tool_calls or message.reasoning or message.name or message.tool_call_id
        else _ROLE_CODES[message.role]
        for message in record.messages
    ]
    roles = bytes(codes)
    if not record.tools and 255 not in roles:
        return roles, [message.content for message in record.messages]
    texts: list[str] = []

    def without(text: str, source: FieldPath) -> str:
        texts.append(text)
        return ""

    return b"\xff" + _ENCODE([build_input(record, style, without, _unchanged).messages, record.tools]), texts


def _unchanged(text: str, source: FieldPath) -> str:
    return text


def build_input(record: Record, style: Style, text_of: TextOf, of_shape: TextOf) -> TemplateInput:
    """Return the template variables of a record.

    `text_of` converts the texts of messages, and `of_shape` converts the strings in tools and the keys of arguments.
    """
    messages = [_message(message, number, style, text_of, of_shape) for number, message in enumerate(record.messages)]
    tools = [
        _json_value(_DECODE(tool), OUTSIDE, ("tools", at), of_shape, of_shape) for at, tool in enumerate(record.tools)
    ]
    size = sum(map(len, record.tools))
    for message in record.messages:
        size += len(message.content) + len(message.reasoning)
        size += sum(len(call.arguments) + len(call.name) for call in message.tool_calls)
    return TemplateInput(messages, tools or None, size)


def _message(message: Message, number: int, style: Style, text_of: TextOf, of_shape: TextOf) -> dict[str, Any]:
    # Keep the usual order of keys, for templates that write a message as JSON.
    content: Any = text_of(message.content, FieldPath(number, ("content",)))
    out: dict[str, Any] = {
        "role": message.role,
        "content": [{"type": "text", "text": content}] if style.parts else content,
    }
    if message.reasoning:
        # Set both names that templates use for reasoning, as in transformers.
        reasoning = text_of(message.reasoning, FieldPath(number, ("reasoning",)))
        out = {"thinking": reasoning, **out, "reasoning_content": reasoning}
    if message.tool_calls:
        out["tool_calls"] = [
            _call(call, FieldPath(number, ("tool_calls", at)), style, text_of, of_shape)
            for at, call in enumerate(message.tool_calls)
        ]
    for key, value in (("name", message.name), ("tool_call_id", message.tool_call_id)):
        if value is not None:
            out[key] = text_of(value, FieldPath(number, (key,)))
    return out


def _call(call: ToolCall, at: FieldPath, style: Style, text_of: TextOf, of_shape: TextOf) -> dict[str, Any]:
    number, path = at
    id = {} if call.id is None else {"id": text_of(call.id, FieldPath(number, (*path, "id")))}
    name = text_of(call.name, FieldPath(number, (*path, "name")))
    path = (*path, "arguments")
    if style.arguments_as_text:
        arguments: Any = text_of(call.arguments_text, FieldPath(number, path))
    else:
        arguments = _json_value(_DECODE(call.arguments), number, path, text_of, of_shape)
    return {**id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _json_value(value: Any, number: int, path: tuple[str | int, ...], text_of: TextOf, of_shape: TextOf) -> Any:
    """Return a JSON value with its strings converted by `text_of` and its keys by `of_shape`."""
    if isinstance(value, str):
        return text_of(value, FieldPath(number, path))
    if isinstance(value, dict):
        return {
            of_shape(key, FieldPath(number, path)): _json_value(inner, number, (*path, key), text_of, of_shape)
            for key, inner in value.items()
        }
    if isinstance(value, list):
        return [_json_value(inner, number, (*path, at), text_of, of_shape) for at, inner in enumerate(value)]
    return value
