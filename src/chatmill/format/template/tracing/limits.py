"""Limits on the number of steps, the output size and the CPU time of a chat template when it renders a conversation.

A template that exceeds a limit is stopped with an error that names the template line. If a single operation takes too
long, the renderer kills the template process (see `chatmill.format.template.process`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from jinja2 import TemplateError

STEPS = 2**16
CHARACTERS = 2**20
GROWTH = 8
"""Number of additional characters that a template may output for each character of the conversation."""
MAX_INT_BITS = 4096
"""Maximum size of an integer that a template computes, in bits."""


class LimitError(TemplateError):
    """The template exceeded a limit, for example on the number of steps or on the size of its output."""


class TimeLimitError(Exception):
    """The template exceeded its CPU time limit."""


@dataclass
class Meter:
    """The limits that apply while a template renders one conversation, and the number of steps so far."""

    max_characters: int = CHARACTERS
    max_steps: int = STEPS
    deadline: float = float("inf")
    """The CPU time of the process, in seconds, at which the rendering stops."""
    steps: int = 0

    def step(self) -> None:
        """Count one loop iteration or function call, and raise an error if a limit is exceeded."""
        self.steps += 1
        if self.steps > self.max_steps:
            raise LimitError(f"the limit of {self.max_steps:,} steps was exceeded")
        if not self.steps & 0xF and time.process_time() > self.deadline:
            raise TimeLimitError

    def check_size(self, characters: float) -> None:
        if characters > self.max_characters:
            raise LimitError(f"the limit of {self.max_characters:,} output characters was exceeded")


def meter_for(characters: int, messages: int, deadline: float) -> Meter:
    """Return the limits for a conversation. The maximum number of steps grows quadratically with the number of
    messages.
    """
    return Meter(CHARACTERS + GROWTH * characters, STEPS + 64 * messages**2, deadline)
