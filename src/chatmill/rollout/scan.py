"""Scan: the entries of the JSON object that a rollout wrote, found in one pass over its bytes.

    {"object_1": {"desc": "cat", …}, "note": 3, "object_2": {"desc": "do
     entry 0, complete               entry 1    entry 2, incomplete

Each token is taken alone as bytes, so a character may be split over tokens. The root object itself is read
strictly: where it stops being JSON, the scan ends. Inside the body of an entry only strings and braces count, so
that any other fault there, such as a bracket that never closes, spoils that entry alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, NoReturn

import numpy as np

from chatmill.rollout.vocabulary import COORDINATE, Vocabulary
from chatmill.rows import Index, offsets

STOP_TEXTS = ("<|im_end|>",)

# A string, its closing quote if it has one, and the colon that makes it a key; or a bracket of either kind.
_LEXEME = re.compile(rb'"([^"\\]*+(?:\\.[^"\\]*+)*+\\?)("?)([ \t\n\r]*+:)?|[{}\[\]]', re.DOTALL)
_SCALAR = re.compile(rb"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null")
_WORD = re.compile(rb"[-+.0-9A-Za-z]*+")
_SPACE = re.compile(rb"[ \t\n\r]*+")
# Python converts no number with many more digits; such a key is none of ours.
_NUMBERED = re.compile(r"object_([0-9]{1,4000})", re.ASCII)
_COORDINATE = {token.encode(): k for token, k in COORDINATE.items()}

Ended = Literal["closed", "open", "fault", "no_root"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One `key: value` of the root object; places are bytes of the rollout."""

    key: str
    number: int | None
    """n, if the key is object_{n}."""
    largest: int
    """The largest n of all such keys in the entry, its own and those inside; -1 for none."""
    start: int
    value_start: int
    stop: int
    is_object: bool
    """The value begins as an object."""
    complete: bool
    coordinates: tuple[tuple[int, int], ...] = ()
    """Where a coordinate's text begins, and its k, for every array item of the body that is one."""


@dataclass(frozen=True)
class Scan:
    data: bytes
    """What the tokens before the hard stop say."""
    token_start: Index
    """Where each token begins in the bytes of the rollout, and their end."""
    root: int
    """The place of the root's opening brace; -1 if there is no root object."""
    entries: tuple[Entry, ...]
    ended: Ended
    """How: the root closed, it was still open when the tokens ended, it broke, or it never was."""

    def tokens(self, start: int, stop: int) -> tuple[int, int]:
        """The tokens, half-open, that hold bytes of a range."""
        first = int(np.searchsorted(self.token_start, start, side="right")) - 1
        return first, max(first, int(np.searchsorted(self.token_start, stop, side="left")))

    def characters(self, start: int, stop: int) -> tuple[int, int]:
        """The characters, half-open, of a range of bytes; bytes that are no UTF-8 count as they are shown."""
        first = len(self.data[:start].decode("utf-8", "replace"))
        return first, first + len(self.data[start:stop].decode("utf-8", "replace"))


def scan(
    ids: Sequence[int],
    vocabulary: Vocabulary,
    *,
    stop_ids: Collection[int] = (),
    stop_texts: Sequence[str] = STOP_TEXTS,
) -> Scan:
    """The entries of the first JSON object of a rollout, which must begin it but for whitespace.

    A stop token ends the rollout wherever it stands, and so does a stop text, even inside a string, and an id that
    the vocabulary does not have.
    """
    pieces = vocabulary.pieces(ids)
    end = next((at for at, id in enumerate(ids) if id in stop_ids or pieces[at] is None), len(ids))
    said = [piece or b"" for piece in pieces[:end]]
    data = b"".join(said)
    for text in stop_texts:
        if (at := data.find(text.encode())) >= 0:
            data = data[:at]
    token_start = offsets(np.fromiter(map(len, said), dtype=np.int64, count=len(said)))
    root = _space(data, 0)
    if data[root : root + 1] != b"{":
        return Scan(data, token_start, -1, (), "no_root")
    entries, ended = _entries(data, root + 1)
    return Scan(data, token_start, root, tuple(entries), ended)


def number_of(key: str) -> int | None:
    """n of a key object_{n}; None for any other."""
    found = _NUMBERED.fullmatch(key)
    return None if found is None else int(found[1])


def parse_json(text: str | bytes, **hooks: Any) -> Any:
    """JSON as the standard has it: UTF-8, no NaN; `ValueError` for anything else."""
    try:
        decoded = text.decode() if isinstance(text, bytes) else text
        return json.loads(decoded, parse_constant=_refuse, **hooks)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _space(data: bytes, at: int) -> int:
    """The first place from `at` on that is no whitespace."""
    found = _SPACE.match(data, at)
    return found.end() if found else at


class _EndError(Exception):
    """The scan goes no further: the tokens ran out, or what stands there is no JSON."""

    def __init__(self, ended: Ended) -> None:
        self.ended = ended


class _Value(NamedTuple):
    stop: int
    is_object: bool = False
    largest: int = -1
    coordinates: tuple[tuple[int, int], ...] = ()


def _entries(data: bytes, at: int) -> tuple[list[Entry], Ended]:
    """Entries from behind the opening brace on, and how they ended."""
    entries: list[Entry] = []
    start = _space(data, at)
    if data[start : start + 1] == b"}":
        return entries, "closed"
    while True:
        key, value = "", start
        try:
            key, value = _key(data, start)
            found = _value(data, value)
        except _EndError as end:
            if data[start : start + 1] == b'"':
                is_object = data[value : value + 1] == b"{"
                entries.append(Entry(key, number_of(key), -1, start, value, len(data), is_object, False))
            return entries, end.ended
        number = number_of(key)
        largest = found.largest if number is None else max(number, found.largest)
        entries.append(Entry(key, number, largest, start, value, found.stop, found.is_object, True, found.coordinates))
        at = _space(data, found.stop)
        if data[at : at + 1] != b",":
            return entries, "closed" if data[at : at + 1] == b"}" else _at_end(data, at)
        start = _space(data, at + 1)


def _at_end(data: bytes, at: int) -> Ended:
    return "open" if at >= len(data) else "fault"


def _key(data: bytes, at: int) -> tuple[str, int]:
    """The key that begins here, and where its value does."""
    found = _LEXEME.match(data, at)
    if found is None or found[1] is None:
        raise _EndError(_at_end(data, at))
    if not found[2]:
        raise _EndError("open")
    if found[3] is None:
        raise _EndError(_at_end(data, _space(data, found.end(2))))
    if (key := _string(found[1])) is None:
        raise _EndError("fault")
    return key, _space(data, found.end())


def _value(data: bytes, at: int) -> _Value:
    """The value that begins here, up to its end."""
    first = data[at : at + 1]
    if first == b"{":
        return _body(data, at)
    if first == b"[":
        return _array(data, at)
    if first == b'"':
        found = _LEXEME.match(data, at)
        if found is None or not found[2]:
            raise _EndError("open")
        if _string(found[1]) is None:
            raise _EndError("fault")
        return _Value(found.end(2))
    word = _WORD.match(data, at)
    stop = at if word is None else word.end()
    if not _SCALAR.fullmatch(data, at, stop):
        raise _EndError(_at_end(data, stop))
    return _Value(stop)


def _body(data: bytes, at: int) -> _Value:
    """An object, up to where its braces balance, whatever stands between them."""
    largest, braces, brackets = -1, 0, 0
    coordinates: list[tuple[int, int]] = []
    for found in _LEXEME.finditer(data, at):
        raw, closing, colon = found.groups()
        if raw is None:
            what = data[found.start()]
            if what == 0x7D:
                braces -= 1
                if not braces:
                    return _Value(found.end(), True, largest, tuple(coordinates))
            elif what == 0x7B:
                braces += 1
            else:
                brackets += 1 if what == 0x5B else -1
        elif not closing:
            break
        elif colon:
            largest = max(largest, _number_in(raw))
        elif brackets > 0 and (k := _COORDINATE.get(raw)) is not None:
            coordinates.append((found.start(1), k))
    raise _EndError("open")


def _array(data: bytes, at: int) -> _Value:
    """An array, which must be JSON: what stands before the last object must leave the root readable."""
    largest, stack = -1, list[int]()
    for found in _LEXEME.finditer(data, at):
        raw, closing, colon = found.groups()
        if raw is None:
            what = data[found.start()]
            if what in b"{[":
                stack.append(what + 2)  # The code of the bracket that closes it.
            elif stack.pop() != what:
                raise _EndError("fault")
            if not stack:
                try:
                    parse_json(data[at : found.end()])
                except ValueError:
                    raise _EndError("fault") from None
                return _Value(found.end(), False, largest)
        elif not closing:
            break
        elif colon:
            largest = max(largest, _number_in(raw))
    raise _EndError("open")


def _string(raw: bytes) -> str | None:
    """What a string says, from what stands between its quotes; None if that is no JSON."""
    try:
        text = raw.decode()
        # The quick way is right for what has nothing to unescape and nothing to refuse.
        return text if "\\" not in text and text.isprintable() else parse_json(f'"{text}"')
    except ValueError:
        return None


def _number_in(raw: bytes) -> int:
    """n of a key object_{n} as it is written; -1 for any other."""
    if not raw.startswith(b"object_") and b"\\" not in raw:
        return -1
    number = number_of(_string(raw) or "")
    return -1 if number is None else number
