"""A chat template, compiled: it renders conversations, plain and traced. Only processes made for it import this."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from chatmill.errors import RecordError
from chatmill.format.template.probes import CALL, QUESTION
from chatmill.format.template.template_input import Style, TemplateInput, build_input, plain_input
from chatmill.format.template.tracing.limits import meter_for
from chatmill.format.template.tracing.program import Program, TracedProgram
from chatmill.format.template.tracing.sandbox import Sandbox
from chatmill.format.template.tracing.trace import FieldPath, Rendering, Trace
from chatmill.format.template.tracing.traced_str import field
from chatmill.records.record import Record

FAILS_ALWAYS = "change the template: it fails for a question with its answer, too"
"""What to do about a template that renders no conversation at all."""


class ChatTemplate:
    """A chat template with its variables; renders conversations, or their first messages."""

    def __init__(
        self,
        source: str,
        name: str,
        *,
        variables: Mapping[str, Any],
        now: datetime | None = None,
        deadline: float = math.inf,
    ) -> None:
        self._variables = dict(variables)
        self.deadline = deadline
        """When renderings are stopped, in seconds of this process's processor time."""
        self._plain = Program(source, name, Sandbox(now=now))
        self._traced = TracedProgram(source, name, now=now)
        self._renders_something = False
        self.style = self._find_style()
        if not self._renders_something:
            self._plain.remedy = self._traced.remedy = FAILS_ALWAYS

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

    def _arguments(self, given: TemplateInput, messages: int | None, prompt: bool) -> Any:
        chosen = given.messages[:messages]
        variables = {
            "documents": None,
            **self._variables,
            "messages": chosen,
            "tools": given.tools,
            "add_generation_prompt": prompt,
        }
        return variables, meter_for(given.characters, len(chosen), self.deadline)

    def _find_style(self) -> Style:
        """The first style in which the template writes the contents and the tool calls of a conversation."""
        parts = next((parts for parts in (False, True) if self._writes(QUESTION, Style(parts))), False)
        return next((style for style in (Style(parts), Style(parts, True)) if self._writes(CALL, style)), Style(parts))

    def _writes(self, record: Record, style: Style) -> bool:
        try:
            text = self.render(plain_input(record, style))
        except RecordError:
            return False
        self._renders_something = True
        contents = [message.content for message in record.messages if message.role != "tool"]
        has_calls = any(message.tool_calls for message in record.messages)
        return all(content in text for content in contents) and ("Lisbon" in text) == has_calls


def traced_input(record: Record, style: Style, trace: Trace) -> TemplateInput:
    """The record with traced texts, in the slots of the texts that `shape_and_texts` gives."""
    slots = iter(range(trace.num_slots))

    def text_of(text: str, source: FieldPath) -> str:
        return field(text, source, next(slots), trace)

    def of_shape(text: str, source: FieldPath) -> str:
        return field(text, source, None, None)

    return build_input(record, style, text_of, of_shape)
