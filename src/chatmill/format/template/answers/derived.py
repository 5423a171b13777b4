"""The answers in a rendered conversation, as plain data that the template process sends to the renderer."""

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
"""Notes in the ledger about a rendering.

`reasoning_left_out` and `tools_left_out`: the template drops reasoning or tool definitions.
`space_before_header`: row and prompt differ in whitespace before the assistant header.
`parts_behind_header`: row and prompt diverge after the assistant header.
`header_not_in_prompt`: the row has an assistant header, but the prompt has no header.
`history_rewritten`: row and prompt differ before the header in more than whitespace.
`several_turns`: an answer is rendered as several turns; headers between the turns are context.
`no_end_token`: no token ends an answer (with --allow-no-end-token).
"""


@dataclass(frozen=True)
class DerivedAnswers:
    """A rendered conversation, its answers, and the trace of the template run."""

    rendering: Rendering
    answers: tuple[AnswerSpan, ...]
    prefixes: tuple[PrefixAnswer, ...]
    """The answers that `by_prefix` found, or an empty tuple if generation tags mark the answers."""
    contexts: tuple[Context, ...]
    """The context that must precede each answer, or an empty tuple if generation tags mark the answers."""
    steps: tuple[TraceStep, ...] | None
    """The steps and guards of the trace, or None if other conversations cannot reuse the trace."""
    notes: tuple[Note, ...]
