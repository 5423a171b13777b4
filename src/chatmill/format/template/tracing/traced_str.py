"""Traced texts: strings that know where each of their characters came from, whatever a template does to them.

A `TracedStr` is a row of pieces: the template's own words, or (a slice of) a field of a message. Joining, slicing,
stripping and splitting keep the pieces; what a template asks of a text is noted in its trace. A method that neither
keeps nor asks gives a text whose origin is the whole field, and ends the use of the trace.
"""

from __future__ import annotations

import operator
import re
import string
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, SupportsIndex

from chatmill.format.template.tracing.provenance import (
    FieldPath,
    TracedPiece,
    cut,
    cut_rope,
    fill,
    has_index,
    pattern_of,
    pick,
    slots_of,
    slots_of_slices,
)
from chatmill.format.template.tracing.slices import SPANS
from chatmill.format.template.tracing.trace import Trace


class TracedStr(str):
    __slots__ = ("pieces", "trace")

    pieces: tuple[TracedPiece, ...]
    trace: Trace | None
    """None where no piece has a slot, so that nothing need be asked."""

    def plain(self) -> str:
        return str.__str__(self)

    def __str__(self) -> str:
        return self

    def __repr__(self) -> str:
        return str.__repr__(self)

    def __reduce__(self) -> Any:
        raise TypeError("a traced text stays in its process")

    # Joining.

    def __add__(self, other: str) -> TracedStr:
        return joined((self, literal(other))) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> TracedStr:
        return joined((literal(other), self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, times: SupportsIndex) -> TracedStr:
        return joined([self] * operator.index(times))

    __rmul__ = __mul__

    def join(self, parts: Iterable[str], /) -> TracedStr:
        texts: list[TracedStr] = []
        for part in parts:
            if not isinstance(part, str):
                raise TypeError(f"join needs texts, found {type(part).__name__}")
            texts += [self, literal(part)] if texts else [literal(part)]
        return joined(texts)

    def __mod__(self, values: Any) -> TracedStr:
        given = list(values) if isinstance(values, tuple) else [values]
        parts: list[TracedStr] = []
        for words in re.split(r"(%[sd%])", self.plain()):
            if words not in ("%s", "%d", "%%"):
                if "%" in words:
                    return self._opaque(self.plain() % _plain(values), values)
                parts.append(self._words(words))
            elif words == "%%":
                parts.append(self._words("%"))
            else:
                value = given.pop(0) if given else self.plain() % ()
                parts.append(value if isinstance(value, TracedStr) else literal(words % _plain((value,))))
        if given and not isinstance(values, dict):
            raise TypeError("not all arguments converted during string formatting")
        return joined(parts)

    def format(self, *args: Any, **kwargs: Any) -> TracedStr:
        parts: list[TracedStr] = []
        unnamed = iter(range(len(args)))
        for words, name, spec, conversion in string.Formatter().parse(self.plain()):
            parts.append(self._words(words))
            if name is None:
                continue
            if not re.fullmatch(r"\w*", name):
                raise TypeError("a template's format names its values and nothing inside them")
            value = kwargs[name] if name and not name.isdigit() else args[int(name or next(unnamed))]
            if spec or conversion:
                return self._opaque(self.plain().format(*_plain(args), **_plain(kwargs)), (args, kwargs))
            parts.append(value if isinstance(value, TracedStr) else literal(str(value)))
        return joined(parts)

    def format_map(self, mapping: Any, /) -> TracedStr:
        return self.format(**mapping)

    # Slices.

    def __getitem__(self, key: SupportsIndex | slice) -> TracedStr:
        if isinstance(key, slice):
            start, stop, step = key.start, key.stop, 1 if key.step is None else key.step
            if step != 1:
                return self._opaque(self.plain()[key])
            return self._slice("sliced", start, stop)
        at = operator.index(key)
        if not self.ask(has_index, at):
            raise IndexError("string index out of range")
        return self._slice("at", at)

    def strip(self, chars: str | None = None, /) -> TracedStr:
        return self._slice("strip", *_chars(chars))

    def lstrip(self, chars: str | None = None, /) -> TracedStr:
        return self._slice("lstrip", *_chars(chars))

    def rstrip(self, chars: str | None = None, /) -> TracedStr:
        return self._slice("rstrip", *_chars(chars))

    def removeprefix(self, prefix: str, /) -> TracedStr:
        return self._slice("removeprefix", _known(prefix))

    def removesuffix(self, suffix: str, /) -> TracedStr:
        return self._slice("removesuffix", _known(suffix))

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[TracedStr]:  # type: ignore[override]
        return self._slices("split", *_chars(sep, keep=True), operator.index(maxsplit))

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[TracedStr]:  # type: ignore[override]
        return self._slices("rsplit", *_chars(sep, keep=True), operator.index(maxsplit))

    def splitlines(self, keepends: bool = False) -> list[TracedStr]:  # type: ignore[override]
        return self._slices("splitlines", bool(keepends))

    def partition(self, sep: str, /) -> tuple[TracedStr, TracedStr, TracedStr]:
        before, found, after = self._slices("partition", _known(sep))
        return before, found, after

    def rpartition(self, sep: str, /) -> tuple[TracedStr, TracedStr, TracedStr]:
        before, found, after = self._slices("rpartition", _known(sep))
        return before, found, after

    def __iter__(self) -> Iterator[TracedStr]:
        return (self[at] for at in range(len(self)))

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> TracedStr:
        if old not in self:
            return self
        if self.trace is not None:
            self.trace.give_up()
        parts = TracedStr.split(_untraced(self), _known(old), operator.index(count))
        return literal(new).join(parts)

    # Questions.

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, str):
            return False
        if self.trace is None and getattr(other, "trace", None) is None:
            return str.__eq__(self, other)
        return bool(self.ask(operator.eq, other))

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __lt__(self, other: str) -> bool:
        return bool(self.ask(operator.lt, other))

    def __le__(self, other: str) -> bool:
        return bool(self.ask(operator.le, other))

    def __gt__(self, other: str) -> bool:
        return bool(self.ask(operator.gt, other))

    def __ge__(self, other: str) -> bool:
        return bool(self.ask(operator.ge, other))

    def __contains__(self, part: object) -> bool:
        if not isinstance(part, str):
            raise TypeError(f"'in <string>' requires string as left operand, not {type(part).__name__}")
        return bool(self.ask(operator.contains, part))

    def __bool__(self) -> bool:
        return bool(self.ask(bool)) if self.trace is not None else str.__len__(self) > 0

    def __len__(self) -> int:
        return int(self.ask(len))

    def __hash__(self) -> int:
        # Looking up by hash asks something that no step could ask again.
        if self.trace is not None:
            self.trace.give_up()
        return str.__hash__(self)

    # How it is done.

    def ask(self, function: Callable[..., Any], *args: Any) -> Any:
        """The answer to a question, noted if another conversation may give another one."""
        traces = [part.trace for part in texts_in((self, args)) if part.trace is not None]
        answer = function(self.plain(), *_plain(args))
        if traces:
            trace = traces[0]
            slots, plain = [_slot(self, trace)], []
            for part in args:
                if isinstance(part, TracedStr) and part.trace is not None:
                    slots.append(_slot(part, trace))
                else:
                    plain.append(_plain(part))
            inside = [text for part in args if not isinstance(part, TracedStr) for text in texts_in(part)]
            if (len(slots) > 1 and plain) or any(text.trace is not None for text in inside):
                trace.give_up()
            else:
                trace.asked(function, tuple(slots), *plain, answer=answer)
        return answer

    def _slice(self, name: str, *args: Any) -> TracedStr:
        return self._slices(name, *args)[0]

    def _slices(self, name: str, *args: Any) -> list[TracedStr]:
        """The slices that a method gives, each with its pieces."""
        spans = SPANS[name](self.plain(), *args)
        if self.trace is None:
            return [made([piece for _, piece in cut(self.pieces, span)], None) for span in spans]
        trace = self.trace
        if len(self.pieces) == 1:
            piece = self.pieces[0]
            slots = slots_of_slices(trace, _slot(self, trace), name, args, len(spans))
            return [
                made([piece._replace(text=piece.text[start:stop], slot=slot)], trace)
                for (start, stop), slot in zip(spans, slots, strict=True)
            ]
        cuts = [cut(self.pieces, span) for span in spans]
        shape = tuple(tuple((at, None if p.slot is not None else p.text) for at, p in found) for found in cuts)
        pattern = pattern_of(self.pieces)
        whole = trace.value(cut_rope, slots_of(self.pieces), name, args, pattern)
        trace.asked(operator.getitem, (whole,), 0, answer=shape)
        numbers = iter(range(len(self.pieces) * len(cuts)))
        return [
            made(
                [
                    p if p.slot is None else p._replace(slot=trace.value(pick, (whole,), next(numbers)))
                    for _, p in found
                ],
                trace,
            )
            for found in cuts
        ]

    def _mapped(self, name: str) -> TracedStr:
        """What a method makes of every character; the field stays the origin of them all."""
        method: Callable[..., str] = getattr(str, name)
        if len(self.pieces) == 1 and self.trace is not None:
            piece = self.pieces[0]
            slot = self.trace.value(method, (_slot(self, self.trace),))
            return made([piece._replace(text=method(piece.text), slot=slot)], self.trace)
        if self.trace is None and (len(self.pieces) <= 1 or (name in ("lower", "upper") and self.isascii())):
            return made([piece._replace(text=method(piece.text)) for piece in self.pieces], None)
        return self._opaque(method(self.plain()))

    def _opaque(self, text: str, *others: Any) -> TracedStr:
        """A text made in a way that is not followed: of the first field that is in it, as a whole."""
        return opaque(text, (self, *others))

    def _words(self, words: str) -> TracedStr:
        """Words of this text, which is a pattern of the template."""
        return made([TracedPiece(words, self.pieces[0].line if self.pieces else 0)], None)


def made(pieces: Sequence[TracedPiece], trace: Trace | None) -> TracedStr:
    """The text that these pieces make."""
    text = str.__new__(TracedStr, pieces[0].text if len(pieces) == 1 else "".join([piece.text for piece in pieces]))
    text.pieces = tuple(pieces)
    text.trace = trace if any(piece.slot is not None for piece in pieces) else None
    return text


def literal(text: str, line: int = 0) -> TracedStr:
    """Words of the template; a traced text is itself."""
    return text if isinstance(text, TracedStr) else made([TracedPiece(str(text), line)], None)


def field(text: str, source: FieldPath, slot: int | None, trace: Trace | None) -> TracedStr:
    """A field of a conversation; without a slot it is the same in all of its shape."""
    return made([TracedPiece(text, source=source, slot=slot)], trace if slot is not None else None)


def joined(texts: Sequence[str]) -> TracedStr:
    """Texts one after the other."""
    if len(texts) == 1 and isinstance(texts[0], TracedStr):
        return texts[0]
    pieces: list[TracedPiece] = []
    trace = None
    for text in texts:
        if isinstance(text, TracedStr):
            # Words that are not there leave no trace; an empty field may be full in the next conversation.
            pieces += [piece for piece in text.pieces if piece.text or piece.slot is not None]
            trace = trace or text.trace
        elif text:
            pieces.append(TracedPiece(text))
    return made(pieces, trace)


def tagged(text: TracedStr) -> TracedStr:
    """The same text, as standing between generation tags."""
    return made([piece._replace(tagged=True) for piece in text.pieces], text.trace)


def opaque(text: str, of: Any) -> TracedStr:
    """A text that was made of these values in a way that is not followed."""
    pieces = [piece for found in texts_in(of) for piece in found.pieces]
    for found in texts_in(of):
        if found.trace is not None:
            found.trace.give_up()
    sources = [piece.source for piece in pieces if piece.source is not None]
    words = any(piece.text and piece.source is None for piece in pieces)
    if not sources:
        return made([TracedPiece(text, pieces[0].line if pieces else 0)], None)
    # It has no slot: the trace is of no more use, and the text stands as it is.
    return made([TracedPiece(text, source=sources[0], mixed=words)], None)


def texts_in(value: Any) -> Iterator[TracedStr]:
    """All traced texts inside a value."""
    if isinstance(value, TracedStr):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from texts_in(key)
            yield from texts_in(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from texts_in(inner)


def _untraced(text: TracedStr) -> TracedStr:
    return made([piece._replace(slot=None) for piece in text.pieces], None)


def _plain(value: Any) -> Any:
    """The same value with traced texts as plain ones."""
    if isinstance(value, TracedStr):
        return value.plain()
    if isinstance(value, tuple):
        return tuple(_plain(part) for part in value)
    if isinstance(value, list):
        return [_plain(part) for part in value]
    if isinstance(value, dict):
        return {_plain(key): _plain(inner) for key, inner in value.items()}
    return value


def _known(text: str) -> str:
    """An argument of a method as a plain string; one that comes from a conversation ends the use of its trace."""
    if isinstance(text, TracedStr):
        if text.trace is not None:
            text.trace.give_up()
        return text.plain()
    if not isinstance(text, str):
        raise TypeError(f"expected a text, found {type(text).__name__}")
    return text


def _chars(chars: str | None, *, keep: bool = False) -> tuple[Any, ...]:
    if chars is None:
        return (None,) if keep else ()
    return (_known(chars),)


def _slot(text: TracedStr, trace: Trace) -> int:
    """The slot that holds all of a text."""
    if len(text.pieces) == 1 and text.pieces[0].slot is not None:
        return text.pieces[0].slot
    return trace.value(fill, slots_of(text.pieces), pattern_of(text.pieces))


def _question(name: str) -> Callable[..., Any]:
    method = getattr(str, name)

    def asked(self: TracedStr, *args: Any) -> Any:
        return self.ask(method, *args)

    return asked


def _mapping(name: str) -> Callable[[TracedStr], TracedStr]:
    return lambda self: self._mapped(name)


def _unfollowed(name: str) -> Callable[..., Any]:
    method = getattr(str, name)

    def called(self: TracedStr, *args: Any, **kwargs: Any) -> Any:
        out = method(self.plain(), *_plain(args), **_plain(kwargs))
        if not isinstance(out, str):
            raise TypeError(f"a template cannot use {name}")
        return self._opaque(out, args, kwargs)

    return called


_ASK = ("startswith", "endswith", "find", "rfind", "index", "rindex", "count")
_MAP = ("lower", "upper", "capitalize", "title", "swapcase", "casefold")
for _name in dir(str):
    if not _name.startswith("_") and _name not in TracedStr.__dict__:
        _make = _question if _name in _ASK or _name.startswith("is") else _mapping if _name in _MAP else _unfollowed
        setattr(TracedStr, _name, _make(_name))
