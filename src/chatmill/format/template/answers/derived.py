"""The result of deriving answers: plain data that the template process sends to the renderer."""

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
"""Reasons that are noted in the ledger about a rendering.

reasoning_left_out, tools_left_out    the template drops them
space_before_header                   row and prompt differ in whitespace before the assistant header
parts_behind_header                   row and prompt diverge after the assistant header
header_not_in_prompt                  the row has an assistant header where the prompt has none
history_rewritten                     row and prompt differ before the header in more than whitespace
several_turns                         an answer is rendered as several turns; headers between them are context
no_end_token                          no token ends an answer (with --allow-no-end-token)
"""


@dataclass(frozen=True)
class DerivedAnswers:
    """A traced rendering with its answers."""

    rendering: Rendering
    answers: tuple[AnswerSpan, ...]
    prefixes: tuple[PrefixAnswer, ...]
    """The answers by prefix; empty with generation tags."""
    contexts: tuple[Context, ...]
    """The text that must precede each answer, starting at the assistant header; empty with generation tags."""
    steps: tuple[TraceStep, ...] | None
    """The steps and guards of the trace; None if other conversations cannot reuse it."""
    notes: tuple[Note, ...]
