"""Limits on the steps, characters and CPU time of one rendering.

Exceeding a limit stops the template with an error that names the line. If the template is busy inside a single
operation, the waiting process stops it (`chatmill.format.template.process`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from jinja2 import TemplateError

STEPS = 2**16
CHARACTERS = 2**20
GROWTH = 8
"""Additional characters that a template may output per character of the conversation."""
MAX_INT_BITS = 4096
"""Maximum size of an integer; templates have no use for larger ones."""


class LimitError(TemplateError):
    """The template exceeded a limit."""


class TimeLimitError(Exception):
    """The template ran for too long. Not a `RecordError`, which would mean that the template rejects the record."""


@dataclass
class Meter:
    """Limits of one rendering, and the number of steps used so far."""

    max_characters: int = CHARACTERS
    max_steps: int = STEPS
    deadline: float = float("inf")
    """CPU time of this process, in seconds."""
    steps: int = 0

    def step(self) -> None:
        """Count one loop iteration or call."""
        self.steps += 1
        if self.steps > self.max_steps:
            raise LimitError(f"it took more than {self.max_steps:,} steps")
        if not self.steps & 0xF and time.process_time() > self.deadline:
            raise TimeLimitError

    def check_size(self, characters: float) -> None:
        if characters > self.max_characters:
            raise LimitError(f"its output has more than {self.max_characters:,} characters")


def meter_for(characters: int, messages: int, deadline: float) -> Meter:
    """Return the limits for a conversation of this size; templates may visit all messages for each message."""
    return Meter(CHARACTERS + GROWTH * characters, STEPS + 64 * messages**2, deadline)
