"""Traces of template renderings, which can be replayed for other conversations if all guards pass, as in TorchDynamo.

The output of a template depends only on the conversation. A trace records the string operations of one rendering, and
the conditions that the template checked:

    texts     slot 0   slot 1  …            the texts of the conversation
    steps     slot n = lstrip(slot 1)       a text computed from others
              "</think>" in slot 1: False   a guard: a result that the template observed

If all guards give the same results for another conversation with the same structure, the template would render it in
the same way. A conversation for which all guards pass is rendered by replaying the steps with its strings, without
running the template.

A `TracedPiece` is a piece of the rendered text with its origin: the template or a field of a message. Traces and pieces
are plain data that can be sent between processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from chatmill.format.template.tracing.steps import SPLIT, STEP_FUNCTIONS, Range, cut_ranges


class TraceStep(NamedTuple):
    """A recorded call `function(*slots, *args)`. Its result becomes the next slot or, for a guard, must equal
    `expected`.
    """

    function: str
    """A key of `STEP_FUNCTIONS`."""
    slots: tuple[int, ...]
    args: tuple[Any, ...]
    is_guard: bool = False
    expected: Any = None


class ReadyStep(NamedTuple):
    """A `TraceStep` with the function itself instead of its name, for faster replay."""

    call: Callable[..., Any]
    slots: tuple[int, ...]
    args: tuple[Any, ...]
    is_guard: bool
    expected: Any


class Trace:
    """The recorded steps of one template rendering, in order and without duplicates."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = texts
        self.num_slots = len(texts)
        self.steps: list[TraceStep] = []
        self.cacheable = True
        """Whether the trace can be replayed for other conversations; false if an operation cannot be replayed."""
        self._recorded: dict[Any, int] = {}

    def value(self, function: str, slots: tuple[int, ...], *args: Any) -> int:
        """Add the step `function(*slots, *args)`, unless it is already in the trace; return the slot of its result."""
        key = (function, slots, args)
        if key not in self._recorded:
            self._recorded[key] = self.num_slots
            self.num_slots += 1
            self.steps.append(TraceStep(*key))
        return self._recorded[key]

    def guard(self, function: str, slots: tuple[int, ...], *args: Any, expected: Any) -> None:
        """Add a guard: in a replay, `function(*slots, *args)` must return `expected`."""
        key = ("guard", function, slots, args)
        if key not in self._recorded:
            self._recorded[key] = -1
            self.steps.append(TraceStep(function, slots, args, True, expected))

    def evaluate(self, function: str, slots: tuple[int, ...], *args: Any, guard_true: bool) -> bool:
        """Evaluate a condition on the traced conversation.

        Add a guard if the condition is false or `guard_true` is set.
        """
        values = replay(ready(self.steps), list(self._texts))
        assert values is not None
        result: bool = STEP_FUNCTIONS[function].call(*[values[slot] for slot in slots], *args)
        if guard_true or not result:
            self.guard(function, slots, *args, expected=result)
        return result


def merge_guards(steps: Sequence[TraceStep], texts: int) -> tuple[TraceStep, ...]:
    """Return the steps, with all guards that require a string of the conversation to be non-empty merged into one
    guard.
    """
    slots: list[int] = []
    others: list[TraceStep] = []
    for step in steps:
        if step.function == "bool" and step.expected is True and step.slots[0] < texts:
            slots.append(step.slots[0])
        else:
            others.append(step)
    return (TraceStep("none_empty", tuple(slots), (), True, True), *others) if slots else tuple(others)


def ready(steps: Iterable[TraceStep]) -> tuple[ReadyStep, ...]:
    """Return the steps with function objects instead of function names."""
    return tuple(ReadyStep(STEP_FUNCTIONS[step.function].call, *step[1:]) for step in steps)


def replay(steps: Sequence[ReadyStep], texts: list[Any]) -> list[Any] | None:
    """Append the results of the steps to `texts` and return `texts`, or return None if the conversation does not match
    the trace.

    A conversation does not match a trace if a guard fails or a function raises an error.
    """
    slots = texts
    try:
        for call, where, args, is_guard, expected in steps:
            if len(where) == 1:
                result = call(slots[where[0]], *args)
            else:
                result = call(*[slots[at] for at in where], *args)
            if not is_guard:
                slots.append(result)
            elif result != expected:
                return None
    except (ValueError, TypeError, LookupError, StopIteration):
        return None
    return slots


OUTSIDE = -1
"""Message index for fields outside messages, such as tool definitions, and for text outside message loops."""

TextItem = str | int
"""A literal string of the template, or the index of a slot in the trace."""


class FieldPath(NamedTuple):
    """The path of a field in the conversation: the index of its message and the keys inside the message."""

    message: int
    path: tuple[str | int, ...]


class TracedPiece(NamedTuple):
    """Consecutive characters with the same origin: a literal of the template, a field, or a slice of a field."""

    text: str
    line: int = 0
    """The template line that produced the piece, or 0 if the line is not known yet."""
    source: FieldPath | None = None
    """The field that the text comes from, or None for a literal of the template."""
    slot: int | None = None
    """The slot in the trace, or None for text that is the same in all conversations with this structure."""
    tagged: bool = False
    """Whether the piece is inside a `{% generation %}` block."""
    mixed: bool = False
    """Whether the piece contains text from template literals and fields that cannot be separated."""
    owner: int = OUTSIDE
    """The index of the current message in the innermost message loop that produced the piece."""
    start: int = 0
    """Offset of the text in the field, or -1 if the text is not a slice of the field."""

    def sliced(self, start: int, stop: int) -> TracedPiece:
        return self._replace(text=self.text[start:stop], start=-1 if self.start < 0 else self.start + start)

    def changed(self, text: str) -> TracedPiece:
        """Return a copy of the piece with `text`, which was computed from the text of the piece."""
        return self if text == self.text else self._replace(text=text, start=-1)


@dataclass(frozen=True)
class Rendering:
    """The output of a template as a sequence of pieces."""

    pieces: tuple[TracedPiece, ...]

    @cached_property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    @cached_property
    def items(self) -> tuple[TextItem, ...]:
        """The text as slots, with the literals between them."""
        return merge_literals([piece.text if piece.slot is None else piece.slot for piece in self.pieces])

    def before(self, stop: int) -> Rendering:
        """Return the rendering up to character `stop`."""
        pieces, size = [], 0
        for piece in self.pieces:
            if size < stop:
                pieces.append(piece._replace(text=piece.text[: stop - size]))
            size += len(piece.text)
        return Rendering(tuple(pieces))


def slots_of(pieces: Sequence[TracedPiece]) -> tuple[int, ...]:
    return tuple(piece.slot for piece in pieces if piece.slot is not None)


def pattern_of(pieces: Sequence[TracedPiece]) -> tuple[str | None, ...]:
    """Return the text of each piece, with None for pieces that have a slot."""
    return tuple(None if piece.slot is not None else piece.text for piece in pieces)


def merge_literals(items: Iterable[TextItem]) -> tuple[TextItem, ...]:
    """Return the items with adjacent literal strings joined."""
    merged: list[TextItem] = []
    literals: list[str] = []
    for item in items:
        if isinstance(item, str):
            literals.append(item)
            continue
        if literals:
            merged.append("".join(literals))
            literals.clear()
        merged.append(item)
    return (*merged, "".join(literals)) if literals else tuple(merged)


def common_length(one: str, other: str) -> int:
    """Return the length of the common prefix of two strings."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one.startswith(other[low:middle], low):
            low = middle
        else:
            high = middle - 1
    return low


def fill_slots(items: Iterable[TextItem], slots: Sequence[str]) -> str:
    """Concatenate the items, with each slot index replaced by the text of the slot."""
    return "".join([item if isinstance(item, str) else slots[item] for item in items])


def cut(pieces: Sequence[TracedPiece], ranges: Sequence[Range]) -> list[list[tuple[int, TracedPiece]]]:
    """Return, for each range of characters, the pieces inside the range with their indices."""
    return [
        [(at, pieces[at].sliced(start, stop)) for at, start, stop in inside]
        for inside in cut_ranges([len(piece.text) for piece in pieces], ranges)
    ]


def slots_of_slices(trace: Trace, slot: int, name: str, args: tuple[Any, ...], count: int) -> list[int]:
    """Add the call of a string method on one field to the trace, and return the slots of the results."""
    if name not in SPLIT:
        return [trace.value(name, (slot,), *args)]
    parts = trace.value(name, (slot,), *args)
    trace.guard("num_parts", (parts,), expected=count)
    return [trace.value("part", (parts,), number) for number in range(count)]
