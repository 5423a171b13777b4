"""Pieces: the words and fields that a text is made of, and steps of a trace that work on several of them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from chatmill.format.template.tracing.slices import SPANS, Span
from chatmill.format.template.tracing.trace import Trace


class FieldPath(NamedTuple):
    """The field that characters came from; message -1 is what all messages share, such as the tools."""

    message: int
    path: tuple[str | int, ...]


class TracedPiece(NamedTuple):
    text: str
    line: int = 0
    """Where in the template its own words stand."""
    source: FieldPath | None = None
    """None for the template's own words."""
    slot: int | None = None
    """Its place in the trace; None for what is the same in every conversation of this shape."""
    tagged: bool = False
    """Whether it stands between generation tags."""
    mixed: bool = False
    """Whether words of the template and of a message are in it and can no longer be told apart."""


def slots_of(pieces: Sequence[TracedPiece]) -> tuple[int, ...]:
    return tuple(piece.slot for piece in pieces if piece.slot is not None)


def pattern_of(pieces: Sequence[TracedPiece]) -> tuple[str | None, ...]:
    """The words between the slots."""
    return tuple(None if piece.slot is not None else piece.text for piece in pieces)


def cut(pieces: Sequence[TracedPiece], span: Span) -> list[tuple[int, TracedPiece]]:
    """The pieces inside a span, by their number."""
    found = []
    at = 0
    for number, piece in enumerate(pieces):
        start, stop = max(span[0] - at, 0), min(span[1] - at, len(piece.text))
        at += len(piece.text)
        if start < stop:
            found.append((number, piece._replace(text=piece.text[start:stop])))
    return found


# Steps of a trace: functions of plain strings.


def fill(*args: Any) -> str:
    *values, pattern = args
    given = iter(values)
    return "".join([next(given) if words is None else words for words in pattern])


def cut_rope(*args: Any) -> tuple[Any, ...]:
    """How a text of several pieces is cut, as ((number, words or None) …) for each result, and the texts of fields."""
    *values, name, method_args, pattern = args
    given = iter(values)
    parts = [next(given) if words is None else words for words in pattern]
    pieces = [TracedPiece(part) for part in parts]
    cuts = [cut(pieces, span) for span in SPANS[name]("".join(parts), *method_args)]
    shape = tuple(tuple((at, None if pattern[at] is None else p.text) for at, p in found) for found in cuts)
    return shape, tuple(p.text for found in cuts for at, p in found if pattern[at] is None)


def pick(cut: tuple[Any, ...], number: int) -> str:
    return str(cut[1][number])


def slots_of_slices(trace: Trace, slot: int, name: str, args: tuple[Any, ...], count: int) -> list[int]:
    """The slots of what a method makes of one field."""
    if name not in ("split", "rsplit", "splitlines", "partition", "rpartition"):
        return [trace.value(_METHODS.get(name) or getattr(str, name), (slot,), *args)]
    parts = trace.value(getattr(str, name), (slot,), *args)
    trace.asked(len, (parts,), answer=count)
    return [trace.value(operator.getitem, (parts,), number) for number in range(count)]


def _sliced(text: str, start: int | None, stop: int | None) -> str:
    return text[start:stop]


def has_index(text: str, at: int) -> bool:
    return -len(text) <= at < len(text)


_METHODS: dict[str, Callable[..., str]] = {"sliced": _sliced, "at": operator.getitem}
