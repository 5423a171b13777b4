"""Traced texts that a template has escaped or marked as `safe`, which behave like Jinja's Markup.

Templates in transformers do not autoescape, but text that is joined with safe text is escaped: `('a' | safe) + '<'` is
`a&lt;`. A safe text loses its mark when it is output, or joined by `~`, by a filter or by the `join` method of a plain
text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, SupportsIndex

from jinja2.exceptions import SecurityError

from chatmill.format.template.tracing.steps import STEP_FUNCTIONS
from chatmill.format.template.tracing.traced_str import TracedStr, joined, literal, made


class TracedMarkup(TracedStr):
    __slots__ = ()

    def __html__(self) -> TracedMarkup:
        return self

    def __repr__(self) -> str:
        return f"Markup({str.__repr__(self)})"

    def __add__(self, other: str) -> TracedMarkup:
        return marked(joined((self, escaped(other)))) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> TracedMarkup:
        return marked(joined((escaped(other), self))) if isinstance(other, str) else NotImplemented

    def __mul__(self, times: SupportsIndex) -> TracedMarkup:
        return marked(super().__mul__(times))

    __rmul__ = __mul__

    def join(self, parts: Iterable[str], /) -> TracedMarkup:
        return marked(super().join([escaped(part) for part in parts]))

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> TracedMarkup:
        return marked(super().replace(old, unmarked(escaped(new)), count))

    def __getitem__(self, key: SupportsIndex | slice) -> TracedMarkup:
        return marked(super().__getitem__(key))

    def __iter__(self) -> Iterator[TracedStr]:
        return iter(unmarked(self))

    def __mod__(self, values: Any) -> TracedStr:
        raise SecurityError("'%' on safe text is not available to templates")

    def format(self, *args: Any, **kwargs: Any) -> TracedStr:
        raise SecurityError("'format' on safe text is not available to templates")

    def _slices(self, name: str, *args: Any) -> list[TracedStr]:
        return [marked(text) for text in super()._slices(name, *args)]

    def _mapped(self, name: str) -> TracedStr:
        return marked(super()._mapped(name))

    def _padded(self, *args: Any) -> TracedStr:
        raise TypeError("padding of safe text is not available to templates")

    center = expandtabs = ljust = rjust = zfill = _padded  # type: ignore[assignment]


def marked(text: TracedStr) -> TracedMarkup:
    """Return a text marked as safe."""
    safe = str.__new__(TracedMarkup, text.plain())
    safe.pieces, safe.trace = text.pieces, text.trace
    return safe


def unmarked(text: TracedStr) -> TracedStr:
    """Return a text without the safe mark."""
    return made(text.pieces, text.trace) if isinstance(text, TracedMarkup) else text


def escaped(text: str) -> TracedMarkup:
    """Escape the HTML characters of a text, unless the text is marked as safe."""
    if isinstance(text, TracedMarkup):
        return text
    if not isinstance(text, str):
        raise TypeError(f"expected text, found {type(text).__name__}")
    return marked(mapped(literal(text), "escape_html"))


def mapped(text: TracedStr, function: str, *args: Any) -> TracedStr:
    """Apply a function in `STEP_FUNCTIONS` that maps each character independently."""
    call = STEP_FUNCTIONS[function].call
    if text.trace is None:
        return made([piece.changed(call(piece.text, *args)) for piece in text.pieces], None)
    if len(text.pieces) == 1:
        piece = text.pieces[0]
        assert piece.slot is not None
        slot = text.trace.value(function, (piece.slot,), *args)
        return made([piece.changed(call(piece.text, *args))._replace(slot=slot)], text.trace)
    return joined([mapped(made([piece], text.trace), function, *args) for piece in text.pieces])
