"""The lines of a certificate.

PASS   the property holds
WARN   it works, but the user should know: a choice of the template, or a shape of records that will be rejected
FAIL   something would be trained wrongly, or cannot be trained
SKIP   not checked; the line gives the reason
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

from chatmill.errors import RecordError, one_line

EXAMPLES = 3
"""Number of examples in a line."""


LINE_OF_KIND = {"no_end_token": "terminator", "prompt_mismatch": "prompt"}
"""The line that reports an error of this kind in a plain conversation; `answers` for all other kinds."""


class Level(StrEnum):
    PASS = "PASS"
    WARN = "WARN"
    FAIL = "FAIL"
    SKIP = "SKIP"


class Finding(NamedTuple):
    """One line of a certificate."""

    name: str
    level: Level
    text: str
    details: Mapping[str, Any] = {}
    """Counts and examples, as JSON values."""

    @property
    def passed(self) -> bool:
        return self.level is not Level.FAIL


def some(places: Sequence[str]) -> str:
    more = f" and {len(places) - EXAMPLES} more" if len(places) > EXAMPLES else ""
    return f"{', '.join(places[:EXAMPLES])}{more}"


def refused(records: str, fault: RecordError) -> str:
    return f"records {records} will be rejected: {fault.what}"


def shown(text: str) -> str:
    return f'"{one_line(text, 40)}"'


def shown_end(text: str) -> str:
    return f'"{"…" if len(text) > 40 else ""}{one_line(text[-40:], 40)}"'


def line_of(fault: RecordError) -> str:
    """Return the name of the line that reports this error in a plain conversation."""
    return LINE_OF_KIND.get(fault.kind, "answers")
