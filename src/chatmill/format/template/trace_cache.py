"""A cache of chat template traces, keyed by the structure of the conversations that can reuse them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from chatmill.format.template.control_tokens import ControlTokens
from chatmill.format.template.encode import LaidOut
from chatmill.format.template.layout_table import simple_sections
from chatmill.format.template.tracing.trace import ReadyStep, TraceStep, merge_guards, ready, replay
from chatmill.tokenizer.control_encoder import ControlEncoder

MAX_MESSAGES = 64
"""Maximum number of messages in a cached trace.

The cost of guards for prefixes is quadratic in the number of messages.
"""
MAX_TRACES = 16
"""Maximum number of cached traces per shape.

If no cached trace matches a conversation, the conversation is rendered with the template.
"""
MAX_CELLS = 2**20
"""Maximum size of the cache: the total number of layout cells and trace steps in all cached traces."""
MAX_SHAPES = 2**17
"""Maximum number of shapes that the cache remembers."""
LAST_ONLY = b"\xfe"
"""Suffix of a shape key for conversations in which only the last answer is trained.

Keys of other conversations never end with this byte.
"""

ShapeKey = tuple[bool, bytes]
"""The key of a cached trace: whether the conversation has tools, and the shape of the conversation."""


@dataclass
class CachedTrace:
    """A cached trace, and the token layout of all conversations that match the trace."""

    steps: tuple[ReadyStep, ...]
    laid_out: LaidOut
    """The token layout, with empty slots for the texts of a conversation."""
    is_plain: bool
    """Whether every conversation of this shape without empty texts matches the trace and keeps its texts unchanged."""
    needs_empty: bool
    """Whether only conversations with an empty text match the trace."""
    uses: int = 0

    def use(self, times: int = 1) -> bool:
        """Count uses of the trace. If use number 1, 2, 4, 8 or another power of two is among them, return true, so that
        the trace is checked against the template.
        """
        before, self.uses = self.uses, self.uses + times
        return self.uses.bit_length() > before.bit_length()


def cached_trace(
    steps: Sequence[TraceStep], laid_out: LaidOut, num_texts: int, text_tokens: ControlTokens, encoder: ControlEncoder
) -> CachedTrace:
    """Return the trace to cache for a conversation with `num_texts` text fields."""
    simple = simple_sections(laid_out.layout, num_texts, text_tokens, encoder)
    merged = merge_guards(steps, num_texts)
    guards_of_texts = [step for step in merged if step.is_guard and all(slot < num_texts for slot in step.slots)]
    return CachedTrace(
        ready(merged),
        laid_out._replace(layout=replace(laid_out.layout, simple=simple)),
        is_plain=simple is not None and simple.takes_columns and all(step.function == "none_empty" for step in merged),
        needs_empty=any(step.function == "bool" and step.expected is False for step in guards_of_texts),
    )


class TraceCache:
    """The cached traces of one renderer."""

    def __init__(self) -> None:
        self._traces: dict[ShapeKey, list[CachedTrace]] = {}
        self._plain: dict[ShapeKey, CachedTrace | None] = {}
        self._met_shapes: set[int] = set()
        self._cells = 0

    def __len__(self) -> int:
        return len(self._traces)

    def clear(self) -> None:
        self._traces.clear()
        self._plain.clear()

    def follow(self, key: ShapeKey, texts: list[str]) -> tuple[CachedTrace, list[str]] | None:
        """Return the trace that matches a conversation, with the texts for its slots, or None if no trace matches."""
        for trace in self._traces.get(key, ()):
            slots = replay(trace.steps, texts.copy())
            if slots is not None:
                return trace, slots
        return None

    def plain(self, key: ShapeKey) -> CachedTrace | None:
        """Return the trace that matches all conversations with this structure and without empty texts, or None."""
        return self._plain.get(key)

    def may_add(self, key: ShapeKey, num_messages: int) -> bool:
        """Whether to cache the trace of a conversation that matches no cached trace."""
        recurs = num_messages <= MAX_MESSAGES and self._may_recur(key)
        return recurs and len(self._traces.get(key, ())) < MAX_TRACES and self._cells < MAX_CELLS

    def add(self, key: ShapeKey, trace: CachedTrace) -> None:
        self._cells += len(trace.laid_out.layout.tokens) + len(trace.steps)
        traces = self._traces.setdefault(key, [])
        traces.append(trace)
        first = next((each for each in traces if not each.needs_empty), None)
        self._plain[key] = first if first is not None and first.is_plain else None

    def _may_recur(self, key: ShapeKey) -> bool:
        """Whether the structure of a conversation is likely to recur: it consists only of roles, or has occurred
        before.
        """
        hashed = hash(key)
        met = hashed in self._met_shapes
        if len(self._met_shapes) < MAX_SHAPES:
            self._met_shapes.add(hashed)
        return met or not key[1].startswith(b"\xff")
