"""The turns of a row, read off its spans: who speaks, how much of it is trained, and what a reader should know."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from chatmill.rows import NO_MESSAGE, Part, Role, Rows, Rule
from chatmill.show.text import TokenText, visible

NOTES = {
    Rule.FLAG: "weighed by the message itself",
    Rule.UNFINISHED: "cut: not trained, because it does not close",
    Rule.INCOMPLETE_USER: "not trained: no complete user turn stands before it",
    Rule.INJECTED: "begins a cut turn anew with an injected copy",
    Rule.EARLIER_WINDOW: "in part of the row before, and trained there",
    Rule.VALUES_OFF: "appended texts are not trained",
}


@dataclass(frozen=True)
class MessageTurn:
    """Consecutive spans of one message, as [first_span, last_span) and [start, stop) tokens of the row."""

    segment: int
    message: int | None
    role: Role
    first_span: int
    last_span: int
    start: int
    stop: int
    trained: int
    notes: tuple[str, ...]
    missing: tuple[int, int] | None
    """Messages before this one that are not in the row, first and last: the row was cut there."""

    @property
    def name(self) -> str:
        return self.role.name.lower() if self.role != Role.NONE else "no turn"


def turns(row: Rows, segment: int) -> Iterator[MessageTurn]:
    """The turns of one conversation of a row."""
    first, last = int(row.first_span[segment]), int(row.first_span[segment + 1])
    spans = row.spans[first:last]
    if not len(spans):
        return
    new = (np.diff(spans["message"].astype(np.int64)) != 0) | (np.diff(spans["role"].astype(np.int64)) != 0)
    edges = [first, *(np.flatnonzero(new) + 1 + first).tolist(), last]
    expected = 0
    for begin, end in pairwise(edges):
        part = row.spans[begin:end]
        message = None if part["message"][0] == NO_MESSAGE else int(part["message"][0])
        missing = (expected, message - 1) if message is not None and message > expected else None
        expected = expected if message is None else max(expected, message + 1)
        role = Role(part["role"][0])
        yield MessageTurn(
            segment=segment,
            message=message,
            role=role,
            first_span=begin,
            last_span=end,
            start=int(row.span_start[begin]),
            stop=int(row.span_start[end]),
            trained=int(part["length"][part["weight"] > 0].sum()),
            notes=tuple(NOTES[rule] for rule in map(Rule, np.unique(part["rule"]).tolist()) if rule in NOTES),
            missing=missing,
        )


def is_padding(row: Rows, segment: int) -> bool:
    first = int(row.first_span[segment])
    return first < int(row.first_span[segment + 1]) and bool(row.spans["part"][first] == Part.PAD)


def first_words(row: Rows, text: TokenText, limit: int = 80) -> str:
    """What a row is about, in a line: the beginning of the first text of a user, else of anyone."""
    spans = row.spans
    is_text = np.isin(spans["part"], (Part.CONTENT, Part.PREFIX, Part.VALUE))
    for wanted in (is_text & (spans["role"] == Role.USER), is_text, np.ones(len(spans), dtype=np.bool_)):
        if wanted.any():
            at = int(wanted.argmax())
            said = text.text(row.ids[row.span_start[at] : row.span_start[at + 1]].tolist(), keep="\n", limit=2 * limit)
            # Where the header of a turn is as little trained as its text, the two are one span.
            words = said.removeprefix(f"{Role(spans['role'][at]).name.lower()}\n").strip()
            return visible(" ".join(words.split("\n")), limit=limit)
    return ""
