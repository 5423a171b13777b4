"""A writer: one template with everything it is given besides the conversation."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from chatmill.format.template.messages import Style, TemplateInput
from chatmill.format.template.tracing.program import Program
from chatmill.format.template.tracing.sandbox import Sandbox, meter_for
from chatmill.format.template.tracing.traced_template import Rendering, TracedProgram


class ChatTemplate:
    """Writes conversations, or their beginnings, as plain text and as traced pieces."""

    def __init__(
        self,
        source: str,
        name: str,
        *,
        variables: Mapping[str, Any],
        now: datetime | None = None,
    ) -> None:
        self.source, self.name = source, name
        self.style = Style()
        """How it wants its messages; whoever opens a template finds out."""
        self._variables = dict(variables)
        self._plain = Program(source, name, Sandbox(now=now))
        self._traced = TracedProgram(source, name, now=now)

    @property
    def has_tags(self) -> bool:
        """Whether the template says itself what is generated."""
        return self._plain.sandbox.has_tags

    def write(self, conversation: TemplateInput, messages: int | None = None, *, prompt: bool = False) -> str:
        """The text of the first `messages`, with the generation prompt if asked for."""
        return self._plain.render(*self._given(conversation, messages, prompt))

    def trace(self, conversation: TemplateInput, messages: int | None = None, *, prompt: bool = False) -> Rendering:
        """The same as pieces that know their origin; the conversation must be a traced one."""
        return self._traced.trace(*self._given(conversation, messages, prompt))

    def quote(self, line: int) -> str:
        """A line of the template with its place."""
        return self._plain.line(line)

    def _given(self, conversation: TemplateInput, messages: int | None, prompt: bool) -> Any:
        chosen = conversation.messages[:messages]
        variables = {
            "documents": None,
            **self._variables,
            "messages": chosen,
            "tools": conversation.tools,
            "add_generation_prompt": prompt,
        }
        return variables, meter_for(conversation.characters, len(chosen))
