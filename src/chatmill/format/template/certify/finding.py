"""The findings of `chatmill certify`, and their levels.

`PASS`: the template passes the check.
`WARN`: training works, but the template makes an unusual choice or rejects some record shapes.
`FAIL`: the model would be trained on wrong tokens, or some records cannot be used for training.
`SKIP`: the check did not run; the text of the finding says why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

from chatmill.errors import RecordError, one_line

EXAMPLES = 3
"""Maximum number of examples in one line of a certificate."""


LINE_OF_KIND = {"no_end_token": "terminator", "prompt_mismatch": "prompt"}
"""The certificate line that reports each kind of error in a plain conversation; the default is `answers`."""


class Level(StrEnum):
    PASS = "PASS"
    WARN = "WARN"
    FAIL = "FAIL"
    SKIP = "SKIP"


class Finding(NamedTuple):
    """A line in the output of `chatmill certify`: the result of one check."""

    name: str
    level: Level
    text: str
    details: Mapping[str, Any] = {}
    """Counts and examples for the JSON output."""

    @property
    def passed(self) -> bool:
        return self.level is not Level.FAIL


def some(places: Sequence[str]) -> str:
    more = f" and {len(places) - EXAMPLES} more" if len(places) > EXAMPLES else ""
    return f"{', '.join(places[:EXAMPLES])}{more}"


def refused(records: str, fault: RecordError) -> str:
    return f"{records} will be rejected: {fault.what}"


def shown(text: str) -> str:
    return f'"{one_line(text, 40)}"'


def shown_end(text: str) -> str:
    return f'"{"…" if len(text) > 40 else ""}{one_line(text[-40:], 40)}"'


def line_of(fault: RecordError) -> str:
    """Return the name of the finding that reports this error."""
    return LINE_OF_KIND.get(fault.kind, "answers")
