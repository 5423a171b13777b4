"""What the derivation of answers results in: plain data, which the process that derived it sends to others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from chatmill.format.template.answers.by_origin import AnswerSpan
from chatmill.format.template.answers.by_prefix import PrefixAnswer
from chatmill.format.template.answers.contexts import Context
from chatmill.format.template.tracing.trace import Rendering, TraceStep

Note = Literal[
    "reasoning_left_out",
    "tools_left_out",
    "space_before_header",
    "parts_behind_header",
    "history_rewritten",
    "header_not_in_prompt",
    "several_turns",
    "no_end_token",
]
"""What a user should know about a rendering.

reasoning_left_out, tools_left_out    the template does not write them
space_before_header                   row and prompt differ in white space before the assistant header
parts_behind_header                   row and prompt part behind the assistant header
header_not_in_prompt                  the row has an assistant header where the prompt has none
history_rewritten                     what precedes the header differs in row and prompt
several_turns                         an answer is written as several turns; headers between them are context
no_end_token                          no token ends an answer, which was allowed
"""


@dataclass(frozen=True)
class DerivedAnswers:
    """A traced rendering with its answers."""

    rendering: Rendering
    answers: tuple[AnswerSpan, ...]
    prefixes: tuple[PrefixAnswer, ...]
    """What prefixes tell about the answers; empty for generation tags."""
    contexts: tuple[Context, ...]
    """By answer: what must stand before it, from the assistant header on; empty for generation tags."""
    steps: tuple[TraceStep, ...] | None
    """The steps and guards of the trace; None if it cannot be replayed on other conversations."""
    notes: tuple[Note, ...]
