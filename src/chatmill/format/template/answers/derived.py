"""What the derivation of answers results in: plain data, which the process that derived it sends to others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from chatmill.format.template.answers.by_origin import AnswerSpan
from chatmill.format.template.answers.by_prefix import PrefixAnswer
from chatmill.format.template.tracing.trace import Rendering, TraceStep

Note = Literal["reasoning_left_out", "tools_left_out"]


@dataclass(frozen=True)
class DerivedAnswers:
    """A traced rendering with its answers."""

    rendering: Rendering
    answers: tuple[AnswerSpan, ...]
    prefixes: tuple[PrefixAnswer, ...]
    """What prefixes tell about the answers; empty for generation tags."""
    steps: tuple[TraceStep, ...] | None
    """The steps and guards of the trace; None if it cannot be replayed on other conversations."""
    notes: tuple[Note, ...]
    """What the template leaves out though it may: reasoning, tools."""
