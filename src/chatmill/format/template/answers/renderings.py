"""Render the first messages of a conversation, with and without the generation prompt.

Deriving the answers of a conversation renders each of its prompts. Conversations that begin with the same messages have
the same prompts, which `KeptRenderings` renders once for all of these conversations.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from chatmill.errors import RecordError
from chatmill.format.template.template import ChatTemplate, traced_input
from chatmill.format.template.template_input import plain_input, shape_and_texts
from chatmill.format.template.tracing.trace import Rendering, Trace
from chatmill.records.record import Record


class Renderings:
    """The renderings of the first messages of one conversation. Each rendering is computed once.

    `kept` may contain the renderings of a longer conversation that begins with the messages of `record`.
    """

    def __init__(self, record: Record, template: ChatTemplate, kept: KeptRenderings | None = None) -> None:
        self.trace = Trace(shape_and_texts(record, template.style)[1])
        self.given = traced_input(record, template.style, self.trace)
        plain = plain_input(record, template.style)

        @cache
        def text(messages: int, prompt: bool) -> str:
            known = kept.text(messages, prompt) if kept else None
            return template.render(plain, messages, prompt=prompt) if known is None else known

        @cache
        def traced(messages: int, prompt: bool) -> Rendering:
            known = kept.traced(messages, prompt) if kept else None
            if known is not None:
                return known.add_to(self.trace)
            return without_empty(template.trace(self.given, messages, prompt=prompt), self.trace)

        self.text, self.traced = text, traced


class KeptRenderings:
    """The renderings of the first messages of a conversation, for other conversations that begin with these messages.

    A rendering is None if the template fails. `Renderings` then renders its own conversation, so that the error and the
    limits are the same as without kept renderings.
    """

    def __init__(self, record: Record, template: ChatTemplate) -> None:
        self._record, self._template = record, template
        trace = _LoggedTrace(shape_and_texts(record, template.style)[1])
        # The limits on the output grow with the conversation. Use the lowest limits, which no conversation exceeds.
        plain = replace(plain_input(record, template.style), characters=0)
        given = replace(traced_input(record, template.style, trace), characters=0)

        @cache
        def text(messages: int, prompt: bool) -> str | None:
            try:
                return template.render(plain, messages, prompt=prompt)
            except RecordError:
                return None

        @cache
        def traced(messages: int, prompt: bool) -> _LoggedRendering | None:
            trace.calls, trace.cacheable = {}, True
            try:
                rendering = without_empty(template.trace(given, messages, prompt=prompt), trace)
            except RecordError:
                return None
            return _LoggedRendering(rendering, tuple(trace.calls.values()), trace.cacheable)

        self.text, self.traced = text, traced

    def contains(self, record: Record, template: ChatTemplate) -> bool:
        """Whether `record` consists of the first messages of the kept conversation. Tools are not supported."""
        if template is not self._template or record.tools or self._record.tools:
            return False
        return record.messages == self._record.messages[: len(record.messages)]


@dataclass(frozen=True)
class _Call:
    """A call of `Trace.value`, with its result, or a call of `Trace.guard`, with the expected result."""

    function: str
    slots: tuple[int, ...]
    args: tuple[Any, ...]
    is_guard: bool
    result: Any


class _LoggedTrace(Trace):
    """A trace that logs the calls of `value` and `guard`, without repeated calls."""

    def __init__(self, texts: list[str]) -> None:
        super().__init__(texts)
        self.calls: dict[Any, _Call] = {}

    def value(self, function: str, slots: tuple[int, ...], *args: Any) -> int:
        slot = super().value(function, slots, *args)
        self.calls.setdefault((False, function, slots, args), _Call(function, slots, args, False, slot))
        return slot

    def guard(self, function: str, slots: tuple[int, ...], *args: Any, expected: Any) -> None:
        self.calls.setdefault((True, function, slots, args), _Call(function, slots, args, True, expected))


@dataclass(frozen=True)
class _LoggedRendering:
    """A rendering, and the calls that a trace received during the rendering."""

    rendering: Rendering
    calls: tuple[_Call, ...]
    cacheable: bool

    def add_to(self, trace: Trace) -> Rendering:
        """Repeat the calls on another trace, and return the rendering with the slots of that trace.

        The texts of the conversation have the same slots in both traces; computed texts may have other slots.
        """
        slot_of: dict[int | None, int] = {}
        for call in self.calls:
            slots = tuple([slot_of.get(slot, slot) for slot in call.slots])
            if call.is_guard:
                trace.guard(call.function, slots, *call.args, expected=call.result)
            else:
                slot_of[call.result] = trace.value(call.function, slots, *call.args)
        if not self.cacheable:
            trace.cacheable = False
        if not slot_of:
            return self.rendering
        pieces = self.rendering.pieces
        return Rendering(tuple([piece._replace(slot=slot_of.get(piece.slot, piece.slot)) for piece in pieces]))


def without_empty(rendering: Rendering, trace: Trace) -> Rendering:
    """Remove empty pieces from a rendered conversation. For each slot, add a guard to the trace that records whether
    the text of the slot is empty.
    """
    for piece in rendering.pieces:
        if piece.slot is not None:
            trace.guard("bool", (piece.slot,), expected=bool(piece.text))
    return Rendering(tuple(piece for piece in rendering.pieces if piece.text))
