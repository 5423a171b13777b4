"""A compiled chat template that renders conversations with or without tracing.

Only template processes import this module.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from datetime import datetime
from functools import cached_property, partial
from typing import Any

from chatmill.errors import RecordError
from chatmill.format.template.answers.contexts import Headers, template_headers
from chatmill.format.template.probes import CALL, CALL_WITHOUT_RESULT, QUESTION, TURNS, WEATHER_CALL
from chatmill.format.template.template_input import Style, TemplateInput, build_input, plain_input
from chatmill.format.template.tracing.limits import meter_for
from chatmill.format.template.tracing.program import Program, TracedProgram
from chatmill.format.template.tracing.sandbox import Sandbox
from chatmill.format.template.tracing.trace import FieldPath, Rendering, Trace
from chatmill.format.template.tracing.traced_str import field
from chatmill.records.record import Record

ARGUMENTS_IN_PYTHON = str(json.loads(WEATHER_CALL.arguments))
FAILS_ALWAYS = "change the template, which fails even for one question and one answer"
"""The suggested fix for a template that cannot render any conversation."""


class ChatTemplate:
    """A chat template and its variables. Renders a whole conversation, or only its first messages."""

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
        """Renderings stop when the CPU time of the process, in seconds, reaches this value."""
        self._plain = Program(source, name, Sandbox(now=now))
        self._new_traced = partial(TracedProgram, source, name, now=now)
        self._renders_something = self._exceeds_limit = False
        self.style = self._find_style()
        if not self._renders_something:
            self._plain.remedy = FAILS_ALWAYS
        self._headers: Headers | None = None

    @cached_property
    def _traced(self) -> TracedProgram:
        """The traced program, compiled on first use, because processes that only check cached traces do not need it."""
        traced = self._new_traced()
        traced.remedy = self._plain.remedy
        return traced

    @property
    def has_tags(self) -> bool:
        return self._plain.sandbox.has_tags

    def render(self, given: TemplateInput, messages: int | None = None, *, prompt: bool = False) -> str:
        """Render the first `messages` messages (default: all), with the generation prompt if `prompt` is true."""
        return "".join(self._plain.run(*self._arguments(given, messages, prompt)))

    def trace(self, given: TemplateInput, messages: int | None = None, *, prompt: bool = False) -> Rendering:
        """Like `render`, but return pieces with their origins. `given` must have been created by `traced_input`."""
        return self._traced.trace(*self._arguments(given, messages, prompt))

    def headers(self, token: re.Pattern[str]) -> Headers:
        """Return the headers that the template outputs for a test conversation; the pattern `token` matches control
        tokens.
        """
        if self._headers is None:
            given, words = plain_input(TURNS, self.style), [message.content for message in TURNS.messages]
            self._headers = template_headers(
                lambda count, prompt: self.render(given, count, prompt=prompt), words, token
            )
        return self._headers

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
        """Return the format in which the template expects message contents and the arguments of tool calls.

        Inference servers pass the arguments of a tool call as an object. The arguments are passed as a string if the
        template fails on an object, drops it, or outputs its Python repr.
        """
        parts = next((parts for parts in (False, True) if self._written(QUESTION, Style(parts))), False)
        for probe in (CALL, CALL_WITHOUT_RESULT):
            as_object = self._written(probe, Style(parts))
            if as_object and ARGUMENTS_IN_PYTHON not in as_object:
                return Style(parts)
            as_text = self._written(probe, Style(parts, True))
            # Passing a string does not help if the template outputs the Python repr of the whole call.
            if as_text and (not as_object or repr(WEATHER_CALL.arguments_text) not in as_text):
                return Style(parts, True)
        return Style(parts)

    def _written(self, record: Record, style: Style) -> str:
        """Render a test conversation; return an empty string if the template fails or drops contents or tool calls."""
        if self._exceeds_limit:
            # Do not render other test conversations, because each could take as long to reach the limit.
            return ""
        try:
            text = self.render(plain_input(record, style))
        except RecordError as fault:
            self._exceeds_limit = fault.kind == "template_limit"
            return ""
        self._renders_something = True
        contents = [message.content for message in record.messages if message.role != "tool"]
        has_calls = any(message.tool_calls for message in record.messages)
        is_whole = all(content in text for content in contents) and ("Lisbon" in text) == has_calls
        return text if is_whole else ""


def traced_input(record: Record, style: Style, trace: Trace) -> TemplateInput:
    """Return the template input for a record, with traced texts. Slots are numbered in the order in which
    `shape_and_texts` returns the texts.
    """
    slots = iter(range(trace.num_slots))

    def text_of(text: str, source: FieldPath) -> str:
        return field(text, source, next(slots), trace)

    def of_shape(text: str, source: FieldPath) -> str:
        return field(text, source, None, None)

    return build_input(record, style, text_of, of_shape)
