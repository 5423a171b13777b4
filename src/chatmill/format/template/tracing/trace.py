"""Traces of template renderings, replayed on other conversations while their guards hold, as in TorchDynamo.

A rendering is a function of the conversation. A trace records what it computed from the texts of one conversation:

    texts     slot 0   slot 1  …            the texts of the conversation
    steps     slot n = lstrip(slot 1)       a text computed from others
              "</think>" in slot 1: False   a guard: what the template observed

Another conversation of the same shape for which all guards give the same results is rendered the same way, with its
own texts in the slots. So the steps are run on its texts, and the template is not run again.

`TracedPiece` is a piece of text with its origin; steps that operate on several pieces follow it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

NOT_A_GUARD = object()


class TraceStep(NamedTuple):
    """`function(*slots, *args)`: a guard with its expected result, or the value of the next slot."""

    function: Callable[..., Any]
    slots: tuple[int, ...]
    args: tuple[Any, ...]
    expected: Any = NOT_A_GUARD


class Trace:
    """The steps of one rendering, in order and without duplicates."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = texts
        self.num_slots = len(texts)
        self.steps: list[TraceStep] = []
        self.cacheable = True
        """False after an operation that cannot be replayed on another conversation."""
        self._recorded: dict[Any, int] = {}

    def value(self, function: Callable[..., Any], slots: tuple[int, ...], *args: Any) -> int:
        """The slot that holds `function(*slots, *args)`."""
        key = (function, slots, args)
        if key not in self._recorded:
            self._recorded[key] = self.num_slots
            self.num_slots += 1
            self.steps.append(TraceStep(*key))
        return self._recorded[key]

    def guard(self, function: Callable[..., Any], slots: tuple[int, ...], *args: Any, expected: Any) -> None:
        """Record a result that the template observed."""
        key = ("guard", function, slots, args)
        if key not in self._recorded:
            self._recorded[key] = -1
            self.steps.append(TraceStep(function, slots, args, expected))

    def evaluate(self, function: Callable[..., bool], slots: tuple[int, ...], *args: Any, guard_true: bool) -> bool:
        """Evaluate a condition on the traced conversation and guard its result; a true one only if `guard_true`."""
        values = replay(self.steps, list(self._texts))
        assert values is not None
        result = function(*[values[slot] for slot in slots], *args)
        if guard_true or not result:
            self.guard(function, slots, *args, expected=result)
        return result


def merge_guards(steps: Sequence[TraceStep], texts: int) -> tuple[TraceStep, ...]:
    """The same steps, with all guards that a text of the conversation is not empty as one."""
    nonempty = [step for step in steps if step.function is bool and step.expected is True and step.slots[0] < texts]
    others = tuple(step for step in steps if step not in nonempty)
    if not nonempty:
        return others
    return (TraceStep(_none_empty, tuple(step.slots[0] for step in nonempty), (), True), *others)


def _none_empty(*texts: str) -> bool:
    return all(texts)


def replay(steps: Sequence[TraceStep], texts: list[Any]) -> list[Any] | None:
    """All slots for the texts of another conversation (the list is extended), or None if a guard fails."""
    slots = texts
    for function, where, args, expected in steps:
        if len(where) == 1:
            result = function(slots[where[0]], *args)
        else:
            result = function(*[slots[at] for at in where], *args)
        if expected is NOT_A_GUARD:
            slots.append(result)
        elif result != expected:
            return None
    return slots


OUTSIDE = -1
"""In place of a message: for fields of no message, such as tool definitions, and text outside of message loops."""

TextItem = str | int
"""A literal text, or the slot of one."""
Range = tuple[int, int]


class FieldPath(NamedTuple):
    """A field of the conversation: the index of its message, and the keys that lead to it."""

    message: int
    path: tuple[str | int, ...]


class TracedPiece(NamedTuple):
    """Consecutive characters of one origin: a literal of the template, or (a slice of) a field."""

    text: str
    line: int = 0
    """The line of the template that wrote it; 0: not known yet."""
    source: FieldPath | None = None
    """The field that it came from; None for literals of the template."""
    slot: int | None = None
    """Its slot in the trace; None for text that is the same in all conversations of this shape."""
    tagged: bool = False
    """Whether it stands between generation tags."""
    mixed: bool = False
    """Whether literals and fields are mixed in it inseparably."""
    owner: int = OUTSIDE
    """The message of the innermost loop that the template was in when it wrote the piece."""


def slots_of(pieces: Sequence[TracedPiece]) -> tuple[int, ...]:
    return tuple(piece.slot for piece in pieces if piece.slot is not None)


def pattern_of(pieces: Sequence[TracedPiece]) -> tuple[str | None, ...]:
    """The literals, and None for each slot."""
    return tuple(None if piece.slot is not None else piece.text for piece in pieces)


def merge_literals(items: Iterable[TextItem]) -> tuple[TextItem, ...]:
    """The same items, neighbouring literals joined."""
    merged: list[TextItem] = []
    for item in items:
        if isinstance(item, str) and merged and isinstance(merged[-1], str):
            merged[-1] += item
        else:
            merged.append(item)
    return tuple(merged)


def common_length(one: str, other: str) -> int:
    """The length of the common prefix of two texts."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def fill_slots(items: Iterable[TextItem], slots: Sequence[str]) -> str:
    """The text of these items."""
    return "".join([item if isinstance(item, str) else slots[item] for item in items])


def cut(pieces: Sequence[TracedPiece], span: Range) -> list[tuple[int, TracedPiece]]:
    """The pieces inside of a range of characters, each with its index."""
    inside = []
    at = 0
    for number, piece in enumerate(pieces):
        start, stop = max(span[0] - at, 0), min(span[1] - at, len(piece.text))
        at += len(piece.text)
        if start < stop:
            inside.append((number, piece._replace(text=piece.text[start:stop])))
    return inside


# Trace steps: functions of plain strings.


def fill_pattern(*args: Any) -> str:
    """A pattern with its Nones replaced by the values before it."""
    *values, pattern = args
    given = iter(values)
    return "".join([next(given) if literal is None else literal for literal in pattern])


def cut_pattern(*args: Any) -> tuple[Any, ...]:
    """How a method cuts a text of several pieces: ((index, literal or None) …) a result, and the texts of the Nones."""
    *values, name, method_args, pattern = args
    given = iter(values)
    parts = [next(given) if literal is None else literal for literal in pattern]
    pieces = [TracedPiece(part) for part in parts]
    cuts = [cut(pieces, span) for span in RANGES[name]("".join(parts), *method_args)]
    shape = tuple(tuple((at, None if pattern[at] is None else p.text) for at, p in inside) for inside in cuts)
    return shape, tuple(p.text for inside in cuts for at, p in inside if pattern[at] is None)


def cut_text(cuts: tuple[Any, ...], number: int) -> str:
    """One of the texts of `cut_pattern`."""
    return str(cuts[1][number])


def slots_of_slices(trace: Trace, slot: int, name: str, args: tuple[Any, ...], count: int) -> list[int]:
    """The slots of what a method makes of one field."""
    if name not in ("split", "rsplit", "splitlines", "partition", "rpartition"):
        return [trace.value(_METHODS.get(name) or getattr(str, name), (slot,), *args)]
    parts = trace.value(getattr(str, name), (slot,), *args)
    trace.guard(len, (parts,), expected=count)
    return [trace.value(operator.getitem, (parts,), number) for number in range(count)]


def has_index(text: str, at: int) -> bool:
    return -len(text) <= at < len(text)


def _sliced(text: str, start: int | None, stop: int | None) -> str:
    return text[start:stop]


_METHODS: dict[str, Callable[..., str]] = {"sliced": _sliced, "at": operator.getitem}


# The ranges of characters that the methods of a string return.


def _stripped(text: str, chars: str | None = None, *, left: bool = True, right: bool = True) -> list[Range]:
    start = len(text) - len(text.lstrip(chars)) if left else 0
    stop = len(text.rstrip(chars)) if right else len(text)
    return [(start, max(start, stop))]


def _consecutive(text: str, parts: Sequence[str], gap: int | None) -> list[Range]:
    """Parts that follow each other, `gap` characters apart; None: each where it occurs next."""
    ranges, at = [], 0
    for part in parts:
        start = text.index(part, at) if gap is None else at
        ranges.append((start, start + len(part)))
        at = start + len(part) + (gap or 0)
    return ranges


def _split(method: str) -> Callable[..., list[Range]]:
    def ranges(text: str, sep: str | None, maxsplit: int) -> list[Range]:
        return _consecutive(text, getattr(text, method)(sep, maxsplit), None if sep is None else len(sep))

    return ranges


def _lines(text: str, keepends: bool) -> list[Range]:
    whole = _consecutive(text, text.splitlines(True), 0)
    return [(start, start + len(line)) for (start, _), line in zip(whole, text.splitlines(keepends), strict=True)]


def _slice_range(text: str, start: int | None, stop: int | None) -> list[Range]:
    first, last, _ = slice(start, stop).indices(len(text))
    return [(first, max(first, last))]


RANGES: dict[str, Callable[..., list[Range]]] = {
    "strip": _stripped,
    "lstrip": lambda text, chars=None: _stripped(text, chars, right=False),
    "rstrip": lambda text, chars=None: _stripped(text, chars, left=False),
    "removeprefix": lambda text, prefix: [(len(prefix) if text.startswith(prefix) else 0, len(text))],
    "removesuffix": lambda text, suffix: [(0, len(text.removesuffix(suffix)))],
    "split": _split("split"),
    "rsplit": _split("rsplit"),
    "splitlines": _lines,
    "partition": lambda text, sep: _consecutive(text, text.partition(sep), 0),
    "rpartition": lambda text, sep: _consecutive(text, text.rpartition(sep), 0),
    "sliced": _slice_range,
    "at": lambda text, at: [(at % len(text), at % len(text) + 1)],
}
