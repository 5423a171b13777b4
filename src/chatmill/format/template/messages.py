"""Messages: a record as the list of dictionaries that chat templates read, and its shape.

The shape is all of a record but its texts: who speaks, which fields there are, the keys and numbers of tool calls,
the tools. Two records of one shape differ in their texts alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from chatmill.format.compiled import ROLE_CODES
from chatmill.format.template.tracing.provenance import FieldPath
from chatmill.format.template.tracing.trace import Trace
from chatmill.format.template.tracing.traced_str import field
from chatmill.records import Message, Record

Leaf = Callable[[str, FieldPath], str]
Key = Callable[[str, FieldPath], str]

_DECODE = msgspec.json.Decoder().decode
_ENCODE = msgspec.json.Encoder().encode


@dataclass(frozen=True)
class Style:
    """How a template wants its messages."""

    parts: bool = False
    """Content as a list of parts, as templates of models that see pictures read it."""
    arguments_as_text: bool = False
    """The arguments of a tool call as JSON text instead of an object."""


@dataclass(frozen=True)
class TemplateInput:
    """What a template is given of one record."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    characters: int


def plain_conversation(record: Record, style: Style) -> TemplateInput:
    """The record with its texts as they are."""
    return _conversation(record, style, _as_it_is, _as_it_is)


def traced_conversation(record: Record, style: Style, trace: Trace) -> TemplateInput:
    """The record with traced texts: every text of `shape_and_texts` has the slot of its place there."""
    slots = iter(range(trace.count))

    def leaf(text: str, source: FieldPath) -> str:
        return field(text, source, next(slots), trace)

    def known(text: str, source: FieldPath) -> str:
        return field(text, source, None, None)

    return _conversation(record, style, leaf, known)


def shape_and_texts(record: Record, style: Style) -> tuple[bytes, list[str]]:
    """What is the same in all records of a shape, and the texts in which they differ."""
    texts = [message.content for message in record.messages]
    kinds = bytes(
        [
            ROLE_CODES[message.role]
            if not (message.tool_calls or message.reasoning or message.name or message.tool_call_id)
            else 255
            for message in record.messages
        ]
    )
    if not record.tools and 255 not in kinds:
        return kinds, texts
    texts = []

    def leaf(text: str, source: FieldPath) -> str:
        texts.append(text)
        return ""

    made = _conversation(record, style, leaf, _as_it_is)
    return b"\xff" + _ENCODE([made.messages, record.tools]), texts


def is_plain(shape: bytes) -> bool:
    """Whether a shape is nothing but who speaks."""
    return not shape.startswith(b"\xff")


def _as_it_is(text: str, source: FieldPath) -> str:
    return text


def _conversation(record: Record, style: Style, leaf: Leaf, known: Key) -> TemplateInput:
    messages = [_message(message, number, style, leaf, known) for number, message in enumerate(record.messages)]
    tools = [_inside(_DECODE(tool), -1, ("tools", at), known, known) for at, tool in enumerate(record.tools)]
    return TemplateInput(messages, tools or None, _characters(record))


def _characters(record: Record) -> int:
    size = sum(map(len, record.tools))
    for message in record.messages:
        size += len(message.content) + len(message.reasoning)
        size += sum(len(call.arguments) + len(call.name) for call in message.tool_calls)
    return size


def _message(message: Message, number: int, style: Style, leaf: Leaf, known: Key) -> dict[str, Any]:
    # The order of the keys is that of the usual records, for templates that write a message as it is.
    content: Any = leaf(message.content, FieldPath(number, ("content",)))
    out: dict[str, Any] = {
        "role": message.role,
        "content": [{"type": "text", "text": content}] if style.parts else content,
    }
    if message.reasoning:
        # Under both names by which templates know it, as transformers gives it to them.
        reasoning = leaf(message.reasoning, FieldPath(number, ("reasoning",)))
        out = {"thinking": reasoning, **out, "reasoning_content": reasoning}
    if message.tool_calls:
        out["tool_calls"] = [_call(call, number, at, style, leaf, known) for at, call in enumerate(message.tool_calls)]
    for key, value in (("name", message.name), ("tool_call_id", message.tool_call_id)):
        if value is not None:
            out[key] = leaf(value, FieldPath(number, (key,)))
    return out


def _call(call: Any, number: int, at: int, style: Style, leaf: Leaf, known: Key) -> dict[str, Any]:
    path = ("tool_calls", at)
    id = {} if call.id is None else {"id": leaf(call.id, FieldPath(number, (*path, "id")))}
    name = leaf(call.name, FieldPath(number, (*path, "name")))
    of_arguments = FieldPath(number, (*path, "arguments"))
    if style.arguments_as_text:
        arguments: Any = leaf(call.arguments, of_arguments)
    else:
        arguments = _inside(_DECODE(call.arguments), number, of_arguments.path, leaf, known)
    return {**id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _inside(value: Any, number: int, path: tuple[str | int, ...], leaf: Leaf, known: Key) -> Any:
    """A JSON value whose texts are leaves; keys are of the shape."""
    if isinstance(value, str):
        return leaf(value, FieldPath(number, path))
    if isinstance(value, dict):
        return {
            known(key, FieldPath(number, path)): _inside(inner, number, (*path, key), leaf, known)
            for key, inner in value.items()
        }
    if isinstance(value, list):
        return [_inside(inner, number, (*path, at), leaf, known) for at, inner in enumerate(value)]
    return value
