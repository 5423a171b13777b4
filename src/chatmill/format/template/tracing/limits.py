"""The limits of one rendering, on steps, characters and processor time.

They stop a template with a line that names the place. A template that is busy inside of one operation is stopped by the
process that waits for it (`chatmill.format.template.process`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from jinja2 import TemplateError

STEPS = 2**16
CHARACTERS = 2**20
GROWTH = 8
"""Additional characters that a template may write for each character of the conversation."""
MAX_INT_BITS = 4096
"""Larger integers only keep a machine busy."""


class LimitError(TemplateError):
    """The template exceeded a limit."""


class TimeLimitError(Exception):
    """The template ran for too long. No `RecordError`, which derivations take for an answer of the template."""


@dataclass
class Meter:
    """The limits of one rendering, and the steps that it has used."""

    max_characters: int = CHARACTERS
    max_steps: int = STEPS
    deadline: float = float("inf")
    """In seconds of this process's processor time."""
    steps: int = 0

    def step(self) -> None:
        """Count one loop iteration or call."""
        self.steps += 1
        if self.steps > self.max_steps:
            raise LimitError(f"it ran for more than {self.max_steps:,} steps")
        if not self.steps & 0xF and time.process_time() > self.deadline:
            raise TimeLimitError

    def check_size(self, characters: float) -> None:
        if characters > self.max_characters:
            raise LimitError(f"it wrote more than {self.max_characters:,} characters")


def meter_for(characters: int, messages: int, deadline: float) -> Meter:
    """Limits for a conversation of this size; templates may look at all messages for each message."""
    return Meter(CHARACTERS + GROWTH * characters, STEPS + 64 * messages**2, deadline)
