"""Traces: what a rendering computed from the texts of a conversation, and what it learned of them on the way.

A rendering is a function of its input. If another conversation of the same shape gives the same answer to every
question that was asked of the first, it is written in the same way, with its own texts in the same places. So a
trace is kept: its steps are run on the texts of the next conversation, and the template is not.

    texts     slot 0   slot 1  …            as they stand in the conversation
    steps     slot n = lstrip(slot 1)       a text made of others
              "</think>" in slot 1 is no    a question, and the answer this trace is good for
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

MISS = object()


class TraceStep(NamedTuple):
    function: Callable[..., Any]
    slots: tuple[int, ...]
    args: tuple[Any, ...]
    answer: Any
    """The answer that is expected; `MISS` for a step that makes the value of the next slot."""


class Trace:
    """Steps over the texts of one conversation, in their order, each of them once."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = texts
        self.count = len(texts)
        """How many slots there are."""
        self.steps: list[TraceStep] = []
        self.whole = True
        """False after something that cannot be run again on another conversation."""
        self._known: dict[Any, Any] = {}

    def value(self, function: Callable[..., Any], slots: tuple[int, ...], *args: Any) -> int:
        """The slot of what `function` gives for these slots and arguments."""
        key = (function, slots, args)
        slot = self._known.get(key)
        if slot is None:
            slot, self.count = self.count, self.count + 1
            self._known[key] = slot
            self.steps.append(TraceStep(function, slots, args, MISS))
        return int(slot)

    def asked(self, function: Callable[..., Any], slots: tuple[int, ...], *args: Any, answer: Any) -> None:
        """Note that the template was given this answer."""
        key = (asked_of, function, slots, args)
        if key not in self._known:
            self._known[key] = answer
            self.steps.append(TraceStep(function, slots, args, answer))

    def undecided(self, function: Callable[..., Any], slots: tuple[int, ...], *args: Any, if_not: bool = False) -> Any:
        """Ask something of the conversation at hand that its template did not; `if_not`: note only a no."""
        values = replay(self.steps, list(self._texts))
        assert values is not None
        answer = function(*[values[slot] for slot in slots], *args)
        if not (if_not and answer):
            self.asked(function, slots, *args, answer=answer)
        return answer

    def give_up(self) -> None:
        self.whole = False


def asked_of() -> None:
    """Marks the questions among what is known."""


def shortened(steps: Sequence[TraceStep], texts: int) -> tuple[TraceStep, ...]:
    """The same steps, with the questions whether texts are empty asked at once."""
    full = [step for step in steps if step.function is bool and step.answer is True and step.slots[0] < texts]
    rest = [step for step in steps if step not in full]
    return (TraceStep(_all_full, tuple(step.slots[0] for step in full), (), True), *rest) if full else tuple(rest)


def _all_full(*texts: str) -> bool:
    return all(texts)


def replay(steps: Sequence[TraceStep], texts: list[Any]) -> list[Any] | None:
    """All slots for the texts of another conversation, or None if it answers a question differently."""
    slots = texts
    for function, where, args, answer in steps:
        if len(where) == 1:
            found = function(slots[where[0]], *args)
        else:
            found = function(*[slots[at] for at in where], *args)
        if answer is MISS:
            slots.append(found)
        elif found != answer:
            return None
    return slots
