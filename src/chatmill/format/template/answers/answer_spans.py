"""Answer spans, and the error for answers that cannot be determined."""

from __future__ import annotations

from typing import NamedTuple

from chatmill.errors import RecordError, one_line

SHOWN = 40


class AnswerSpan(NamedTuple):
    """The trained text of one message: characters [start, stop) of the rendering."""

    message: int
    start: int
    stop: int
    closed: bool
    """Whether it ends with a control token."""


def disputed(what: str, right: str = "write the conversation another way, or leave it out") -> RecordError:
    return RecordError(what, right, kind="mask_disputed")


def shown(text: str) -> str:
    """The beginning of a text, in quotes."""
    return f'"{one_line(text, SHOWN)}"'


def shown_end(text: str) -> str:
    """The end of a text, in quotes."""
    return f'"{"…" if len(text) > SHOWN else ""}{one_line(text[-SHOWN:], SHOWN)}"'
