"""A chat template, and records as the variables that it is rendered with.

The shape of a record is everything but its texts: roles, which fields there are, the keys and numbers of tool calls,
the tools. Two records of one shape differ in their texts only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import msgspec

from chatmill.errors import RecordError, one_line
from chatmill.format.chat_format import ROLE_CODES
from chatmill.format.template.tracing.program import Program, Rendering, TracedProgram
from chatmill.format.template.tracing.sandbox import Sandbox, meter_for
from chatmill.format.template.tracing.trace import OUTSIDE, FieldPath, Trace
from chatmill.format.template.tracing.traced_str import field
from chatmill.records import Message, Record, ToolCall

TextOf = Callable[[str, FieldPath], str]
"""What stands in the variables for a text of the record."""

_DECODE = msgspec.json.Decoder().decode
_ENCODE = msgspec.json.Encoder().encode


@dataclass(frozen=True)
class Style:
    """How a template expects its messages."""

    parts: bool = False
    """Content as a list of parts, as for vision-language models."""
    arguments_as_text: bool = False
    """The arguments of a tool call as JSON text instead of an object."""


@dataclass(frozen=True)
class TemplateInput:
    """The variables of one record."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    characters: int


class ChatTemplate:
    """A chat template with its variables; renders conversations, or their first messages."""

    def __init__(self, source: str, name: str, *, variables: Mapping[str, Any], now: datetime | None = None) -> None:
        self.source, self.name = source, name
        self._variables = dict(variables)
        self._plain = Program(source, name, Sandbox(now=now))
        self._traced = TracedProgram(source, name, now=now)
        self.style = self._find_style()

    @property
    def has_tags(self) -> bool:
        """Whether the template has generation tags."""
        return self._plain.sandbox.has_tags

    def render(self, given: TemplateInput, messages: int | None = None, *, prompt: bool = False) -> str:
        """The text of the first `messages` (default: all), with the generation prompt if `prompt`."""
        return "".join(self._plain.run(*self._arguments(given, messages, prompt)))

    def trace(self, given: TemplateInput, messages: int | None = None, *, prompt: bool = False) -> Rendering:
        """Like `render`, as pieces with their origin; `given` is from `traced_input`."""
        return self._traced.trace(*self._arguments(given, messages, prompt))

    def quote(self, line: int) -> str:
        """A line of the template with its number, for messages."""
        lines = self.source.split("\n")
        text = lines[line - 1].strip() if 0 < line <= len(lines) else ""
        return f"{self.name}:{line}: {one_line(text, 160)}"

    def _arguments(self, given: TemplateInput, messages: int | None, prompt: bool) -> Any:
        chosen = given.messages[:messages]
        variables = {
            "documents": None,
            **self._variables,
            "messages": chosen,
            "tools": given.tools,
            "add_generation_prompt": prompt,
        }
        return variables, meter_for(given.characters, len(chosen))

    def _find_style(self) -> Style:
        """The first style in which the template writes the contents and the tool calls of a conversation."""
        parts = next((parts for parts in (False, True) if self._writes(QUESTION, Style(parts))), False)
        return next((style for style in (Style(parts), Style(parts, True)) if self._writes(CALL, style)), Style(parts))

    def _writes(self, record: Record, style: Style) -> bool:
        try:
            text = self.render(plain_input(record, style))
        except RecordError:
            return False
        contents = [message.content for message in record.messages if message.role != "tool"]
        has_calls = any(message.tool_calls for message in record.messages)
        return all(content in text for content in contents) and ("Lisbon" in text) == has_calls


def probe_record(name: str, *messages: Message, tools: tuple[str, ...] = ()) -> Record:
    """A small conversation that shows what a template does."""
    return Record(list(messages), id=name, tools=tools, file="probe", line=0)


TOOLS = (
    '{"type":"function","function":{"name":"weather","description":"The weather in a city.","parameters":'
    '{"type":"object","properties":{"city":{"type":"string","description":"Which city."}},"required":["city"]}}}',
)
WEATHER_CALL = ToolCall("weather", '{"city":"Lisbon"}', "call00001")
WEATHER = Message("tool", '{"sky":"clear"}', name="weather", tool_call_id="call00001")
QUESTION = probe_record(
    "question", Message("user", "Which way is north?"), Message("assistant", "Towards the pole star.")
)
CALL = probe_record(
    "style",
    Message("user", "Rain?"),
    Message("assistant", "", "", (WEATHER_CALL,)),
    WEATHER,
    Message("assistant", "No."),
    tools=TOOLS,
)


def plain_input(record: Record, style: Style) -> TemplateInput:
    """The record with its texts as they are."""
    return _input(record, style, _unchanged, _unchanged)


def traced_input(record: Record, style: Style, trace: Trace) -> TemplateInput:
    """The record with traced texts, in the slots of the texts that `shape_and_texts` gives."""
    slots = iter(range(trace.num_slots))

    def text_of(text: str, source: FieldPath) -> str:
        return field(text, source, next(slots), trace)

    def of_shape(text: str, source: FieldPath) -> str:
        return field(text, source, None, None)

    return _input(record, style, text_of, of_shape)


def shape_and_texts(record: Record, style: Style) -> tuple[bytes, list[str]]:
    """What is the same in all records of a shape, and the texts in which they differ.

    A shape of roles alone is their codes; one with other fields or with tools begins with 255.
    """
    codes = [
        255
        if message.tool_calls or message.reasoning or message.name or message.tool_call_id
        else ROLE_CODES[message.role]
        for message in record.messages
    ]
    roles = bytes(codes)
    if not record.tools and 255 not in roles:
        return roles, [message.content for message in record.messages]
    texts: list[str] = []

    def without(text: str, source: FieldPath) -> str:
        texts.append(text)
        return ""

    return b"\xff" + _ENCODE([_input(record, style, without, _unchanged).messages, record.tools]), texts


def _unchanged(text: str, source: FieldPath) -> str:
    return text


def _input(record: Record, style: Style, text_of: TextOf, of_shape: TextOf) -> TemplateInput:
    """`text_of` gives the texts of the record, `of_shape` those that belong to its shape."""
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
    # Keys are in the usual order, for templates that write a message as JSON.
    content: Any = text_of(message.content, FieldPath(number, ("content",)))
    out: dict[str, Any] = {
        "role": message.role,
        "content": [{"type": "text", "text": content}] if style.parts else content,
    }
    if message.reasoning:
        # Under both names that templates use, like transformers.
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
        arguments: Any = text_of(call.arguments, FieldPath(number, path))
    else:
        arguments = _json_value(_DECODE(call.arguments), number, path, text_of, of_shape)
    return {**id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _json_value(value: Any, number: int, path: tuple[str | int, ...], text_of: TextOf, of_shape: TextOf) -> Any:
    """A JSON value with its strings replaced; keys belong to the shape."""
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
