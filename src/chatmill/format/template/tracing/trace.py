"""Traces of template renderings, replayed on other conversations while their guards hold, as in TorchDynamo.

A rendering is a function of the conversation. A trace records what it computed from the texts of one conversation:

    texts     slot 0   slot 1  …            the texts of the conversation
    steps     slot n = lstrip(slot 1)       a text computed from others
              "</think>" in slot 1: False   a guard: what the template observed

Another conversation of the same shape for which all guards give the same results is rendered the same way, with its
own texts in the slots. So the steps are run on its texts, and the template is not run again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
