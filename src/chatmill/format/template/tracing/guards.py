"""Settling: making sure that prefixes would say the same of every conversation that follows a trace.

Whether one rendering begins with another is mostly decided by how the two are made: the same words, the same texts
in the same places. Where it hangs on what a text holds, that is asked, and so becomes a step of the trace.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

from chatmill.errors import RecordError
from chatmill.format.template.answers.by_prefix import opener_of
from chatmill.format.template.control_tokens import common_length
from chatmill.format.template.tracing.trace import Trace
from chatmill.format.template.tracing.traced_template import Rendering

Item = str | int
"""Words, or the slot of a text."""


def settle(
    trace: Trace,
    full: Rendering,
    tracing: Callable[[int, bool], Rendering],
    assistants: Sequence[int],
    token: re.Pattern[str],
) -> None:
    """Ask everything that decides what prefixes say of the answers."""
    whole = _items(full)
    openers: list[str] = []

    def items(messages: int, prompt: bool) -> list[Item] | None:
        try:
            return _items(tracing(messages, prompt))
        except RecordError:
            return None

    for message in assistants:
        prompt, before = items(message, True), items(message, False)
        if prompt is None or not trace.whole:
            continue
        _settle(trace, whole, prompt)
        alone, asked = items(message + 1, False), items(message + 1, True)
        if alone is not None:
            _settle(trace, whole, alone)
        if before is None:
            continue
        (asked_of, words), (said, less) = _parted(prompt), _parted(before)
        if asked_of != said:
            # What the prompt adds is not words alone; nothing is said of other conversations then.
            trace.give_up()
            return
        opener = openers[0] if openers and words.endswith(openers[0]) else opener_of(words, less, token)
        if openers and len(words) < len(openers[0]):
            trace.give_up()
            return
        if not opener and openers:
            _settle(trace, whole, [*asked_of, words + openers[0]])
        if opener and full.text.startswith(tracing(message, True).text):
            openers.append(opener)
        if opener and asked is not None:
            body, end = _parted(asked)
            if len(end) < len(opener):
                trace.give_up()
            elif end.endswith(opener):
                _settle(trace, whole, [*body, *filter(None, [end[: -len(opener)]])])


def _parted(items: list[Item]) -> tuple[list[Item], str]:
    """Items without the words that they end in, and those."""
    return (items[:-1], items[-1]) if items and isinstance(items[-1], str) else (items, "")


def _items(rendering: Rendering) -> list[Item]:
    """The pieces of a rendering, neighbouring words joined."""
    out: list[Item] = []
    for piece in rendering.pieces:
        if piece.slot is not None:
            out.append(piece.slot)
        elif out and isinstance(out[-1], str):
            out[-1] += piece.text
        else:
            out.append(piece.text)
    return out


def _settle(trace: Trace, whole: Sequence[Item], beginning: Sequence[Item]) -> None:
    rest, left = _past(whole, beginning)
    if not left or _decided(rest, left):
        return
    if isinstance(left[0], str) and not trace.undecided(*_question(rest, left[:1]), if_not=True):
        return
    trace.undecided(*_question(rest, left))


def _question(rest: Sequence[Item], left: Sequence[Item]) -> tuple[Any, ...]:
    """Whether the one begins with the other, as a step."""
    if _is_words(left):
        # Of what it is compared with no more is needed than that many characters; no text in it is empty.
        size = 0
        for number, item in enumerate(rest):
            size += len(item) if isinstance(item, str) else 1
            if size >= sum(map(len, left)):
                rest = rest[: number + 1]
                break
    slots = tuple(item for item in (*rest, *left) if isinstance(item, int))
    pattern = tuple(None if isinstance(item, int) else item for item in rest)
    other = tuple(None if isinstance(item, int) else item for item in left)
    return begins_with, slots, pattern, other


def _is_words(items: Sequence[Item]) -> TypeGuard[Sequence[str]]:
    return all(isinstance(item, str) for item in items)


def _decided(rest: Sequence[Item], left: Sequence[Item]) -> bool:
    """Whether the words alone say that one does not begin with the other."""
    return not rest or (isinstance(rest[0], str) and isinstance(left[0], str))


def _past(whole: Sequence[Item], beginning: Sequence[Item]) -> tuple[list[Item], list[Item]]:
    """Both without what they have in common at their beginning."""
    one, other = list(whole), list(beginning)
    while one and other:
        if one[0] == other[0]:
            del one[0], other[0]
        elif isinstance(one[0], str) and isinstance(other[0], str):
            common = common_length(one[0], other[0])
            one[0], other[0] = one[0][common:], other[0][common:]
            if one[0] and other[0]:
                break
            if not one[0]:
                del one[0]
            if other and not other[0]:
                del other[0]
        else:
            break
    return one, other


def begins_with(*args: object) -> bool:
    """Whether the text of one pattern begins with that of another; slots fill both, one after the other."""
    *values, pattern, other = args
    given = iter(values)
    assert isinstance(pattern, tuple) and isinstance(other, tuple)
    count = sum(part is None for part in pattern)
    left = iter(values[count:])
    sought = "".join([str(next(left)) if part is None else part for part in other])
    need = len(sought)
    head: list[str] = []
    for part in pattern:
        text = (str(next(given)) if part is None else part)[:need]
        head.append(text)
        need -= len(text)
        if need <= 0:
            break
    return "".join(head) == sought
