"""Where the slices that the methods of a string give lie in it, as (start, stop)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Span = tuple[int, int]


def _stripped(text: str, chars: str | None = None, *, left: bool = True, right: bool = True) -> list[Span]:
    start = len(text) - len(text.lstrip(chars)) if left else 0
    stop = len(text.rstrip(chars)) if right else len(text)
    return [(start, max(start, stop))]


def _in_order(text: str, parts: Sequence[str], gap: int | None) -> list[Span]:
    """Parts that stand in a text one after the other, `gap` characters apart; None: the next place where they are."""
    spans, at = [], 0
    for part in parts:
        start = text.index(part, at) if gap is None else at
        spans.append((start, start + len(part)))
        at = start + len(part) + (gap or 0)
    return spans


def _split(method: str) -> Callable[..., list[Span]]:
    def spans(text: str, sep: str | None, maxsplit: int) -> list[Span]:
        return _in_order(text, getattr(text, method)(sep, maxsplit), None if sep is None else len(sep))

    return spans


def _lines(text: str, keepends: bool) -> list[Span]:
    whole = _in_order(text, text.splitlines(True), 0)
    return [(start, start + len(line)) for (start, _), line in zip(whole, text.splitlines(keepends), strict=True)]


def _slice_span(text: str, start: int | None, stop: int | None) -> list[Span]:
    first, last, _ = slice(start, stop).indices(len(text))
    return [(first, max(first, last))]


SPANS: dict[str, Callable[..., list[Span]]] = {
    "strip": _stripped,
    "lstrip": lambda text, chars=None: _stripped(text, chars, right=False),
    "rstrip": lambda text, chars=None: _stripped(text, chars, left=False),
    "removeprefix": lambda text, prefix: [(len(prefix) if text.startswith(prefix) else 0, len(text))],
    "removesuffix": lambda text, suffix: [(0, len(text.removesuffix(suffix)))],
    "split": _split("split"),
    "rsplit": _split("rsplit"),
    "splitlines": _lines,
    "partition": lambda text, sep: _in_order(text, text.partition(sep), 0),
    "rpartition": lambda text, sep: _in_order(text, text.rpartition(sep), 0),
    "sliced": _slice_span,
    "at": lambda text, at: [(at % len(text), at % len(text) + 1)],
}
