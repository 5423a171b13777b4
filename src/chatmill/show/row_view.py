"""Describe the segments, turns and spans of a row for display, with their origins and trained tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from chatmill.errors import one_line
from chatmill.load.batch import IGNORE_INDEX
from chatmill.rows import NO_FILE, NO_MESSAGE, OWN_ID, Part, Role, Rows, Rule
from chatmill.show.text import TokenText, visible

NOTES = {
    Rule.FLAG: "the message sets its weight",
    Rule.UNFINISHED: "not trained: incomplete here, or follows an unclosed answer",
    Rule.INCOMPLETE_USER: "not trained: no complete user turn precedes it",
    Rule.OUTSIDE: "not trained: outside turns",
    Rule.WHITESPACE: "whitespace between turns",
    Rule.NOT_ANSWER: "not trained: sets train or weight, but is not an answer",
    Rule.INJECTED: "continues a split turn, after an injected copy of its header",
    Rule.EARLIER_WINDOW: "partly in the previous row, and trained there",
    Rule.VALUES_OFF: "appended texts are not trained",
    Rule.SURPLUS: "trained to close the answer after the last true object",
    Rule.EARLIER_ROW: "trained in an earlier row",
    Rule.RANGE: "partly weighted by train_ranges",
}
"""Maps the rule of a span to the note that is shown on its turn."""

TOOL_DEFINITION = re.compile(
    r'"(?:parameters|input_schema)"\s*:|"type"\s*:\s*"function"|namespace functions\b|\bdeclaration:\w|<parameters>'
)
"""Matches the tool definitions of published chat templates, in JSON Schema, TypeScript, Gemma's notation or XML."""

ROLES, PARTS, RULES = ({each.value: each.name.lower() for each in kind} for kind in (Role, Part, Rule))
"""The names of roles, parts and rules in JSON."""


def trained_tokens(row: Rows) -> int:
    return int(row.spans["length"][row.spans["weight"] > 0].sum())


# Segments.


class Origin(NamedTuple):
    """The input file, line number and source of a segment; unknown fields are None."""

    file: str | None
    line: int | None
    source: str | None


def origin_of(row: Rows, segment: int) -> Origin:
    file, line = row.origins[segment]["file"], int(row.origins[segment]["line"])
    if file == NO_FILE or int(file) >= len(row.files):
        return Origin(None, None, None)
    path, source = row.files[file].path, row.files[file].source
    # A source that records no files, such as a cache in a mix, has one file with an empty path.
    return Origin(path, line, source) if path else Origin(None, None, source)


def segment_json(row: Rows, segment: int) -> dict[str, Any]:
    file, line, source = origin_of(row, segment)
    start, stop = row.segment_start[segment : segment + 2].tolist()
    return {"start": start, "stop": stop, "source": source, "file": file, "line": line}


def place_name(row: Rows, segment: int | None = None, *, unrolled: bool = False, limit: int = 200) -> str:
    """Return `file:line` for a segment, or the number of segments if `segment` is None and the row is packed. If
    `unrolled` is true, the index of the last message is included.
    """
    if segment is None and len(row.origins) != 1:
        return f"{len(row.origins)} segments"
    file, line, _ = origin_of(row, segment or 0)
    last = last_message(row, segment or 0) if unrolled else None
    until = "" if last is None else f" up to message {last}"
    return f"{'-' if file is None else f'{one_line(file, limit)}:{line}'}{until}"


def last_message(row: Rows, segment: int = 0) -> int | None:
    """Return the index of the last message of a segment; in an unrolled row, this message is the trained answer."""
    message = row.spans["message"][row.first_span[segment] : row.first_span[segment + 1]]
    message = message[message != NO_MESSAGE]
    return int(message.max()) if len(message) else None


def row_title(rows: Rows, row: int, *, unrolled: bool = False) -> str:
    one = rows[row : row + 1]
    place = place_name(one, 0, unrolled=unrolled, limit=80)
    return f"{place}  {len(one.ids)} tokens, {trained_tokens(one)} trained"


def is_padding(row: Rows, segment: int) -> bool:
    first = int(row.first_span[segment])
    return first < int(row.first_span[segment + 1]) and bool(row.spans["part"][first] == Part.PAD)


# Spans.


@dataclass(frozen=True)
class SpanView:
    """A span with the tokens [start, stop) of a row. `target` is the label of every token in the span, or None if each
    token is its own label.
    """

    start: int
    stop: int
    role: Role
    part: Part
    rule: Rule
    message: int | None
    weight: float
    target: int | None

    @property
    def mark(self) -> str:
        """A symbol for the weight: a star for 1, a space for 0, and the number for other weights."""
        return " " if self.weight == 0 else "*" if self.weight == 1 else f"{self.weight:g}"

    def to_json(self) -> dict[str, Any]:
        return {**self.__dict__, "role": ROLES[self.role], "part": PARTS[self.part], "rule": RULES[self.rule]}


def span_views(row: Rows, first: int = 0, last: int | None = None) -> Iterator[SpanView]:
    """Yield the spans [first, last) of a row."""
    for at in range(first, len(row.spans) if last is None else last):
        span = row.spans[at]
        yield SpanView(
            int(row.span_start[at]),
            int(row.span_start[at + 1]),
            Role(span["role"]),
            Part(span["part"]),
            Rule(span["rule"]),
            None if span["message"] == NO_MESSAGE else int(span["message"]),
            float(span["weight"]),
            None if span["target"] == OWN_ID else int(span["target"]),
        )


def row_json(row: Rows) -> dict[str, Any]:
    """Return a row as a dict that can be serialized to JSON."""
    return {
        "segments": [segment_json(row, segment) for segment in range(len(row.origins))],
        "ids": row.ids.tolist(),
        "labels": np.where(row.mask(), row.targets(), IGNORE_INDEX).tolist(),
        "weights": row.weights().tolist(),
        "spans": list(_spans_json(row)),
    }


def _spans_json(row: Rows) -> Iterator[dict[str, Any]]:
    """Yield the spans of a row as dicts for JSON; faster than `span_views`."""
    names = ("role", "part", "rule", "message", "weight", "target")
    columns = [row.spans[name].tolist() for name in names]
    starts = row.span_start.tolist()
    for start, stop, role, part, rule, message, weight, target in zip(starts, starts[1:], *columns, strict=False):
        yield {
            "start": start,
            "stop": stop,
            "role": ROLES[role],
            "part": PARTS[part],
            "rule": RULES[rule],
            "message": None if message == NO_MESSAGE else message,
            "weight": weight,
            "target": None if target == OWN_ID else target,
        }


# Turns.


@dataclass(frozen=True)
class MessageTurn:
    """Consecutive spans of one message: spans [first_span, last_span) and tokens [start, stop) of the row."""

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
    """Indices of the first and last message that truncation removed before this turn."""


def turns(row: Rows, segment: int) -> Iterator[MessageTurn]:
    """Yield the turns of one segment of a row."""
    first, last = int(row.first_span[segment]), int(row.first_span[segment + 1])
    spans = row.spans[first:last]
    if not len(spans):
        return
    is_new = (np.diff(spans["message"].astype(np.int64)) != 0) | (np.diff(spans["role"].astype(np.int64)) != 0)
    expected = 0
    for begin, end in pairwise([first, *(np.flatnonzero(is_new) + 1 + first).tolist(), last]):
        part = row.spans[begin:end]
        message = None if part["message"][0] == NO_MESSAGE else int(part["message"][0])
        missing = (expected, message - 1) if message is not None and message > expected else None
        expected = expected if message is None else max(expected, message + 1)
        yield MessageTurn(
            segment=segment,
            message=message,
            role=Role(part["role"][0]),
            first_span=begin,
            last_span=end,
            start=int(row.span_start[begin]),
            stop=int(row.span_start[end]),
            trained=int(part["length"][part["weight"] > 0].sum()),
            notes=tuple(NOTES[rule] for rule in map(Rule, np.unique(part["rule"]).tolist()) if rule in NOTES),
            missing=missing,
        )


def turn_name(row: Rows, turn: MessageTurn, text: TokenText) -> str:
    """Return a name for a turn: the role and index of its message, or a description of tokens outside messages."""
    role, number = turn.role.name.lower(), "" if turn.message is None else f" {turn.message}"
    if turn.role != Role.NONE and turn.message is not None:
        return role + number
    spans = list(span_views(row, turn.first_span, turn.last_span))
    if any(_defines_tools(row, span, text) for span in spans):
        return "tool definitions"
    if turn.role != Role.NONE:
        return role
    if any(span.rule != Rule.HEADER for span in spans):
        return f"outside turns{number}"
    return "end of conversation" if spans[0].part == Part.EOS else "template text"


def part_name(row: Rows, span: SpanView, text: TokenText) -> str:
    """Return the name of a span's part; tool definitions are recognized by their text."""
    if not _defines_tools(row, span, text):
        return PARTS[span.part].replace("_", " ")
    return "tool definitions" if span.message is None or span.part != Part.CONTENT else "content and tool definitions"


def _defines_tools(row: Rows, span: SpanView, text: TokenText) -> bool:
    """Whether a span has tool definitions, which templates write before, after or inside a message."""
    is_candidate = span.role in (Role.SYSTEM, Role.NONE) or (span.role == Role.USER and span.rule == Rule.HEADER)
    if not is_candidate or span.stop - span.start < 8:
        return False
    return TOOL_DEFINITION.search(text.text(row.ids[span.start : span.stop].tolist(), limit=20_000)) is not None


def preview(row: Rows, text: TokenText, limit: int = 80) -> str:
    """Return the beginning of the first user message or, without a user message, of other text, on one line."""
    spans = row.spans
    is_text = np.isin(spans["part"], (Part.CONTENT, Part.PREFIX, Part.VALUE))
    for chosen in (is_text & (spans["role"] == Role.USER), is_text, np.ones(len(spans), dtype=np.bool_)):
        if chosen.any():
            at = int(chosen.argmax())
            start, stop = row.span_start[at : at + 2].tolist()
            content = text.text(row.ids[start:stop].tolist(), keep="\n", limit=2 * limit)
            # If a header has the same weight as the content, both are in one span.
            content = content.removeprefix(f"{Role(spans['role'][at]).name.lower()}\n").strip()
            return visible(" ".join(content.split("\n")), limit=limit)
    return ""
