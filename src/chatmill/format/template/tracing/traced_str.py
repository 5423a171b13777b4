"""Strings that keep the origin of every character through the string operations of a template.

A `TracedStr` consists of pieces: literals of the template, and fields of messages or slices of fields. Joining,
slicing, stripping and splitting keep the pieces. Conditions on a text (`in`, `==`, `len`, …) become guards of its
trace. If a string method cannot be traced, the origin of its result is the whole field, and the trace is not cacheable.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, SupportsIndex

from chatmill.format.template.tracing.formatting import format_fields, format_percent
from chatmill.format.template.tracing.steps import MAPPED, OBSERVED, ORDERED, RANGES, STEP_FUNCTIONS, STRIPPED
from chatmill.format.template.tracing.trace import (
    FieldPath,
    Trace,
    TracedPiece,
    cut,
    pattern_of,
    slots_of,
    slots_of_slices,
)


class TracedStr(str):
    __slots__ = ("pieces", "trace")

    pieces: tuple[TracedPiece, ...]
    trace: Trace | None
    """The trace that guards are added to, or None if the text is the same in all conversations."""

    def plain(self) -> str:
        return str.__str__(self)

    def __str__(self) -> str:
        return self

    def __repr__(self) -> str:
        return str.__repr__(self)

    def __reduce__(self) -> Any:
        raise TypeError("a traced text cannot be sent to another process")

    def __add__(self, other: str) -> TracedStr:
        return added(self, literal(other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> TracedStr:
        return added(literal(other), self) if isinstance(other, str) else NotImplemented

    def __mul__(self, times: SupportsIndex) -> TracedStr:
        return joined([self] * operator.index(times))

    __rmul__ = __mul__

    def join(self, parts: Iterable[str], /) -> TracedStr:
        texts: list[TracedStr] = []
        for part in parts:
            if not isinstance(part, str):
                raise TypeError(f"join needs text, found {type(part).__name__}")
            texts += [self, literal(part)] if texts else [literal(part)]
        return joined(texts)

    def __mod__(self, values: Any) -> TracedStr:
        return self._formatted(format_percent(self.plain(), values))

    def format(self, *args: Any, **kwargs: Any) -> TracedStr:
        return self._formatted(format_fields(self.plain(), args, kwargs))

    def _formatted(self, parts: Iterable[tuple[str, Any]]) -> TracedStr:
        """Join the literal parts of this format string with the formatted values."""
        if any(piece.source is not None for piece in self.pieces):
            written = list(parts)
            return opaque("".join([text for text, _ in written]), (self, [value for _, value in written]))
        texts: list[TracedStr] = []
        for text, value in parts:
            if value is None:
                texts.append(self._own_literal(text))
            elif isinstance(value, TracedStr) and text == value.plain():
                texts.append(value)
            else:
                texts.append(opaque(text, value) if any(True for _ in texts_in(value)) else literal(text))
        return joined(texts)

    def __getitem__(self, key: SupportsIndex | slice) -> TracedStr:
        if isinstance(key, slice):
            if key.step not in (None, 1):
                return opaque(self.plain()[key], self)
            return self._slices("sliced", key.start, key.stop)[0]
        at = operator.index(key)
        if not self.observe("has_index", at):
            raise IndexError("string index out of range")
        return self._slices("at", at)[0]

    def __iter__(self) -> Iterator[TracedStr]:
        return (self[at] for at in range(len(self)))

    def splitlines(self, keepends: bool = False) -> list[TracedStr]:  # type: ignore[override]
        return self._slices("splitlines", bool(keepends))

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> TracedStr:
        if old not in self:
            return self
        self._not_cacheable()
        without_slots = made([piece._replace(slot=None) for piece in self.pieces], None)
        return literal(new).join(without_slots.split(_known(old), operator.index(count)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, str):
            return False
        if self.trace is None and (type(other) is str or getattr(other, "trace", None) is None):
            return str.__eq__(self, other)
        return bool(self.observe("eq", other))

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __contains__(self, part: object) -> bool:
        if not isinstance(part, str):
            raise TypeError(f"'in <string>' requires string as left operand, not {type(part).__name__}")
        return bool(self.observe("contains", part))

    def __bool__(self) -> bool:
        return bool(self.observe("bool")) if self.trace is not None else str.__len__(self) > 0

    def __len__(self) -> int:
        return int(self.observe("len"))

    def __hash__(self) -> int:
        # The trace is not cacheable, because a lookup by hash cannot be expressed as a guard.
        self._not_cacheable()
        return str.__hash__(self)

    def observe(self, function: str, *args: Any) -> Any:
        """Call a function in `STEP_FUNCTIONS` with this text, and return the result.

        Add a guard if the result may differ for another conversation.
        """
        traces = [part.trace for part in texts_in((self, args)) if part.trace is not None]
        result = STEP_FUNCTIONS[function].call(self.plain(), *untraced(args))
        if traces:
            trace = traces[0]
            slots, plain = [_slot(self, trace)], []
            for part in args:
                if isinstance(part, TracedStr) and part.trace is not None:
                    slots.append(_slot(part, trace))
                else:
                    plain.append(untraced(part))
            inside = [text for part in args if not isinstance(part, TracedStr) for text in texts_in(part)]
            if (len(slots) > 1 and plain) or any(text.trace is not None for text in inside):
                trace.cacheable = False
            else:
                trace.guard(function, tuple(slots), *plain, expected=result)
        return result

    def _slices(self, name: str, *args: Any) -> list[TracedStr]:
        """Return the slices of this text that a string method such as `split` returns, with their pieces."""
        ranges = RANGES[name](self.plain(), *args)
        if self.trace is None:
            return [made([piece for _, piece in inside], None) for inside in cut(self.pieces, ranges)]
        trace = self.trace
        if len(self.pieces) == 1:
            piece = self.pieces[0]
            slots = slots_of_slices(trace, _slot(self, trace), name, args, len(ranges))
            return [
                made([piece.sliced(start, stop)._replace(slot=slot)], trace)
                for (start, stop), slot in zip(ranges, slots, strict=True)
            ]
        cuts = cut(self.pieces, ranges)
        shape = tuple(tuple((at, None if p.slot is not None else p.text) for at, p in inside) for inside in cuts)
        whole = trace.value("cut_pattern", slots_of(self.pieces), name, args, pattern_of(self.pieces), len(cuts))
        trace.guard("shape", (whole,), expected=shape)
        numbers = iter(range(len(self.pieces) * len(cuts)))

        def with_slot(piece: TracedPiece) -> TracedPiece:
            if piece.slot is None:
                return piece
            return piece._replace(slot=trace.value("cut_text", (whole,), next(numbers)))

        return [made([with_slot(piece) for _, piece in inside], trace) for inside in cuts]

    def _mapped(self, name: str) -> TracedStr:
        """Return the result of a method that maps every character, such as `upper`."""
        method: Callable[..., str] = getattr(str, name)
        if len(self.pieces) == 1 and self.trace is not None:
            piece = self.pieces[0]
            slot = self.trace.value(name, (_slot(self, self.trace),))
            return made([piece.changed(method(piece.text))._replace(slot=slot)], self.trace)
        if self.trace is None and (len(self.pieces) <= 1 or (name in ("lower", "upper") and self.isascii())):
            return made([piece.changed(method(piece.text)) for piece in self.pieces], None)
        return opaque(method(self.plain()), self)

    def _own_literal(self, text: str) -> TracedStr:
        """Return a part of this format string as a literal with the line number of the format string."""
        return made([TracedPiece(text, self.pieces[0].line if self.pieces else 0)], None)

    def _not_cacheable(self) -> None:
        if self.trace is not None:
            self.trace.cacheable = False


def total(texts: Sequence[str]) -> TracedStr:
    """Concatenate texts faster than `joined`, because a template may concatenate texts thousands of times."""
    text = str.__new__(TracedStr, "".join(texts))
    pieces: tuple[TracedPiece, ...] = ()
    trace = None
    for part in texts:
        if type(part) is TracedStr:
            trace = trace or part.trace
            # Drop texts that are empty in all conversations.
            if part.trace is not None or str.__len__(part):
                pieces += part.pieces
        elif part:
            pieces += (TracedPiece(part),)
    text.pieces, text.trace = pieces, trace
    return text


def added(left: TracedStr, right: TracedStr) -> TracedStr:
    text = str.__new__(TracedStr, str.__add__(left, right))
    text.pieces = tuple([piece for piece in left.pieces + right.pieces if piece.text or piece.slot is not None])
    text.trace = left.trace or right.trace
    return text


def made(pieces: Sequence[TracedPiece], trace: Trace | None) -> TracedStr:
    """Return a traced text that consists of the given pieces."""
    text = str.__new__(TracedStr, pieces[0].text if len(pieces) == 1 else "".join([piece.text for piece in pieces]))
    text.pieces = tuple(pieces)
    text.trace = trace if any(piece.slot is not None for piece in pieces) else None
    return text


def literal(text: str, line: int = 0) -> TracedStr:
    """Return `text` as a literal of the template, or unchanged if it is already traced."""
    if isinstance(text, TracedStr):
        return text
    out = str.__new__(TracedStr, text)
    out.pieces, out.trace = (TracedPiece(str(text), line),), None
    return out


def field(text: str, source: FieldPath, slot: int | None, trace: Trace | None) -> TracedStr:
    """Return a field of a conversation as traced text.

    `slot` is None if the text of the field is the same in all records that share the trace.
    """
    return made([TracedPiece(text, source=source, slot=slot)], trace)


def joined(texts: Sequence[str]) -> TracedStr:
    if len(texts) == 1 and type(texts[0]) is TracedStr:
        return texts[0]
    pieces: list[TracedPiece] = []
    trace = None
    for text in texts:
        if isinstance(text, TracedStr):
            # Drop empty literals, but keep empty fields, which may have text in another conversation.
            pieces += [piece for piece in text.pieces if piece.text or piece.slot is not None]
            trace = trace or text.trace
        elif text:
            pieces.append(TracedPiece(text))
    return made(pieces, trace)


def opaque(text: str, inputs: Any) -> TracedStr:
    """Return a text that was computed from `inputs` without tracing.

    The origin of the text is the first field in `inputs`.
    """
    pieces: list[TracedPiece] = []
    for value in texts_in(inputs):
        pieces += value.pieces
        value._not_cacheable()
    sources = [piece.source for piece in pieces if piece.source is not None]
    if not sources:
        return made([TracedPiece(text, pieces[0].line if pieces else 0)], None)
    has_literals = any(piece.text and piece.source is None for piece in pieces)
    return made([TracedPiece(text, source=sources[0], mixed=has_literals, start=-1)], None)


def texts_in(value: Any) -> Iterator[TracedStr]:
    """Yield all traced texts in a value, including those in nested lists, tuples and dicts."""
    if isinstance(value, TracedStr):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from texts_in(key)
            yield from texts_in(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from texts_in(inner)


def untraced(value: Any) -> Any:
    """Return a value with all traced strings inside it replaced by plain strings."""
    if isinstance(value, TracedStr):
        return value.plain()
    if isinstance(value, list | tuple):
        parts = [untraced(part) for part in value]
        return tuple(parts) if isinstance(value, tuple) else parts
    if isinstance(value, dict):
        return {untraced(key): untraced(inner) for key, inner in value.items()}
    return value


def _known(text: str) -> str:
    """Return a method argument as a plain string.

    If the argument contains text of a conversation, mark its trace as not cacheable.
    """
    if isinstance(text, TracedStr):
        text._not_cacheable()
        return text.plain()
    if not isinstance(text, str):
        raise TypeError(f"expected text, found {type(text).__name__}")
    return text


def _slot(text: TracedStr, trace: Trace) -> int:
    """Return the slot number of the whole text in the trace; add a slot if necessary."""
    if len(text.pieces) == 1 and text.pieces[0].slot is not None:
        return text.pieces[0].slot
    return trace.value("fill_pattern", slots_of(text.pieces), pattern_of(text.pieces))


def _observing(name: str) -> Callable[..., Any]:
    return lambda self, *args: self.observe(name, *args)


def _slicing(name: str) -> Callable[..., TracedStr]:
    return lambda self, *args: self._slices(name, *(_known(arg) for arg in args if arg is not None))[0]


def _partitioning(name: str) -> Callable[..., tuple[TracedStr, ...]]:
    return lambda self, sep: tuple(self._slices(name, _known(sep)))


def _splitting(name: str) -> Callable[..., list[TracedStr]]:
    return lambda self, sep=None, maxsplit=-1: self._slices(
        name, None if sep is None else _known(sep), operator.index(maxsplit)
    )


def _mapping(name: str) -> Callable[[TracedStr], TracedStr]:
    return lambda self: self._mapped(name)


def _untraced(name: str) -> Callable[..., TracedStr]:
    method = getattr(str, name)
    return lambda self, *args: opaque(method(self.plain(), *untraced(args)), (self, args))


def _unavailable(name: str) -> Callable[..., Any]:
    def called(self: TracedStr, *_: Any, **__: Any) -> Any:
        raise TypeError(f"{name} is not available to templates")

    return called


_KINDS: dict[Callable[[str], Callable[..., Any]], Sequence[str]] = {
    _observing: OBSERVED,
    _slicing: STRIPPED,
    _partitioning: ("partition", "rpartition"),
    _splitting: ("split", "rsplit"),
    _mapping: MAPPED,
    _untraced: ("center", "expandtabs", "ljust", "rjust", "zfill"),
    _unavailable: ("encode", "format_map", "maketrans", "translate"),
}
for _kind, _names in _KINDS.items():
    for _name in _names:
        setattr(TracedStr, _name, _kind(_name))
for _name in ORDERED:
    setattr(TracedStr, f"__{_name}__", _observing(_name))
