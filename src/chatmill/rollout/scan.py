"""Find the `key: value` entries of the JSON object in a rollout, which may be incomplete or invalid.

    {"object_1": {"desc": "cat", …}, "note": 3, "object_2": {"desc": "do
     entry 0, complete               entry 1    entry 2, incomplete

Tokens are decoded to bytes, not to text, because a character may span several tokens. The scan ends at invalid JSON in
the root object. Inside the value of an entry, only strings and braces are checked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, NoReturn

import numpy as np

from chatmill.rollout.vocabulary import COORDINATE, Vocabulary, id_array
from chatmill.rows import Index

try:
    from chatmill._native import _rollout
except ImportError:  # pragma: no cover
    _rollout = None  # type: ignore[assignment]

STOP_TEXTS = ("<|im_end|>",)

# Matches a brace, a bracket, or a closed or unclosed string with an optional colon after it.
_LEXEME = re.compile(rb'"([^"\\]*+(?:\\.[^"\\]*+)*+\\?)("?)([ \t\n\r]*+:)?|[{}\[\]]', re.DOTALL)
# Matches everything up to the next brace outside a string.
_TO_BRACE = re.compile(rb'[^"{}]*+(?:"[^"\\]*+(?:\\.[^"\\]*+)*+"[^"{}]*+)*+', re.DOTALL)
_SCALAR = re.compile(rb"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null")
_WORD = re.compile(rb"[-+.0-9A-Za-z]*+")
_SPACE = re.compile(rb"[ \t\n\r]*+")
# Python limits the number of digits that `int` parses.
_NUMBERED = re.compile(r"object_([0-9]{1,4000})", re.ASCII)
_COORDINATE = {token.encode(): k for token, k in COORDINATE.items()}
# Matches a box entry in printable ASCII with chatmill's exact formatting.
_BOX = re.compile(
    rb'"(object_([0-9]{1,9}))": \{"desc": "([ !#-\[\]-~]+)", "bbox_2d": \['
    + b", ".join([rb'"<\|coord_(0|[1-9][0-9]{0,2})\|>"'] * 4)
    + rb"\]\}"
)
_COORD_TEXT = len("<|coord_")

Box = tuple[str, int, int, int, int, int, bool, bool, tuple[str, list[int], list[int]]]
"""The fields of a `ParsedEntry` for a box, as a plain tuple."""
Ended = Literal["closed", "open", "fault", "no_root"]


class ParsedEntry(NamedTuple):
    """A `key: value` pair of the root object, with byte offsets in the rollout."""

    key: str
    number: int | None
    """The number n if the key is object_{n}, otherwise None."""
    largest: int
    """The largest n of all keys object_{n} in the entry, including nested keys; -1 if there are none."""
    start: int
    value_start: int
    stop: int
    is_object: bool
    """Whether the value starts with a brace."""
    complete: bool
    box: tuple[str, list[int], list[int]] | None = None
    """The description of a box, its coordinates, and their byte offsets; None if the entry is formatted differently
    from what chatmill writes.
    """


@dataclass(frozen=True)
class Scan:
    """The decoded bytes of a rollout, and the entries of its JSON object."""

    data: bytes
    """The bytes of the rollout before the stop token or stop string."""
    token_start: Index
    """The byte offset of each token, followed by the total number of bytes."""
    root: int
    """The byte offset of the opening brace; -1 if the rollout has no root object."""
    entries: tuple[ParsedEntry, ...]
    ended: Ended
    """How the root object ends: `closed` by a brace, `open` at the end of the rollout, or at invalid JSON (`fault`);
    `no_root` if the rollout has no root object.
    """

    def coordinates(self, entry: ParsedEntry) -> tuple[list[int], list[int]]:
        """Return the values of all coordinate tokens in an entry, and their byte offsets."""
        if entry.box is not None:
            return entry.box[1:]
        starts: list[int] = []
        places: list[int] = []
        brackets = 0
        for lexeme in _LEXEME.finditer(self.data, entry.value_start, entry.stop):
            raw = lexeme[1]
            if raw is None:
                brackets += {b"[": 1, b"]": -1}.get(lexeme[0], 0)
            elif brackets > 0 and not lexeme[3] and raw in _COORDINATE:
                starts.append(lexeme.start(1))
                places.append(_COORDINATE[raw])
        return places, starts

    def tokens(self, start: int, stop: int) -> tuple[int, int]:
        """Return the start and stop index of the tokens that contain the bytes [start, stop)."""
        first = int(np.searchsorted(self.token_start, start, side="right")) - 1
        return first, max(first, int(np.searchsorted(self.token_start, stop, side="left")))

    def characters(self, start: int, stop: int) -> tuple[int, int]:
        """Return the start and stop character offset of the bytes [start, stop) in the decoded text."""
        first = len(self.data[:start].decode("utf-8", "replace"))
        return first, first + len(self.data[start:stop].decode("utf-8", "replace"))


def scan_rollout(
    ids: Sequence[int] | Index,
    vocabulary: Vocabulary,
    *,
    stop_ids: Collection[int] = (),
    stop_texts: Sequence[str] = STOP_TEXTS,
) -> Scan:
    """Find the entries of the JSON object at the start of a rollout.

    Everything from the first stop token, stop string or unknown token id onwards is ignored.
    """
    before_stop = id_array(ids)
    for id in stop_ids:
        places = np.flatnonzero(before_stop == id)
        if len(places):
            before_stop = before_stop[: places[0]]
    data, token_start = vocabulary.decode(before_stop)
    for text in stop_texts:
        if (at := data.find(text.encode())) >= 0:
            data = data[:at]
    root = _space(data, 0)
    if data[root : root + 1] != b"{":
        return Scan(data, token_start, -1, (), "no_root")
    entries, ended = _entries(data, root + 1)
    return Scan(data, token_start, root, tuple(entries), ended)


def number_of(key: str) -> int | None:
    """Return the number n of a key of the form object_{n}, or None for other keys."""
    match = _NUMBERED.fullmatch(key)
    return None if match is None else int(match[1])


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


JSON = json.JSONDecoder(parse_constant=_refuse)


def parse_json(text: str | bytes, decoder: json.JSONDecoder = JSON) -> Any:
    """Parse JSON; raise `ValueError` for invalid JSON, NaN and infinities."""
    try:
        return decoder.decode(text.decode() if isinstance(text, bytes) else text)
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None


def _space(data: bytes, at: int) -> int:
    match = _SPACE.match(data, at)
    return match.end() if match else at


class _EndError(Exception):
    def __init__(self, ended: Ended) -> None:
        self.ended = ended


def _entries(data: bytes, at: int) -> tuple[list[ParsedEntry], Ended]:
    """Return the entries of the root object from byte offset `at` on, and how the scan ended."""
    entries: list[ParsedEntry] = []
    start = _space(data, at)
    if data[start : start + 1] == b"}":
        return entries, "closed"
    while True:
        if boxes := _boxes(data, start):
            entries += [tuple.__new__(ParsedEntry, box) for box in boxes]
            stop = entries[-1].stop
        else:
            entry, ended = _entry(data, start)
            if entry is not None:
                entries.append(entry)
            if entry is None or ended is not None:
                return entries, ended or "fault"
            stop = entry.stop
        at = _space(data, stop)
        if data[at : at + 1] != b",":
            return entries, "closed" if data[at : at + 1] == b"}" else _at_end(data, at)
        start = _space(data, at + 1)


def _boxes(data: bytes, at: int) -> list[Box]:
    """Return the consecutive box entries at byte offset `at` that have exactly the formatting that chatmill writes."""
    if _rollout is not None:
        return _rollout.boxes(data, at)
    boxes: list[Box] = []
    while (box := _BOX.match(data, at)) is not None:
        key, digits, desc, *places = box.groups()
        number, value, stop = int(digits), box.end(1) + len('": '), box.end()
        starts = [box.start(group) - _COORD_TEXT for group in (4, 5, 6, 7)]
        of_box = desc.decode(), [int(place) for place in places], starts
        boxes.append((key.decode(), number, number, at, value, stop, True, True, of_box))
        if not data.startswith(b", ", stop):
            break
        at = stop + len(", ")
    return boxes


def _entry(data: bytes, start: int) -> tuple[ParsedEntry | None, Ended | None]:
    """Return two values: the entry at byte offset `start`, or None if there is none; and how the scan ended, or None if
    it continues.
    """
    key, value = "", start
    try:
        key, value = _key(data, start)
        stop, is_object, largest = _value(data, value)
    except _EndError as end:
        if data[start : start + 1] != b'"':
            return None, end.ended
        is_object = data[value : value + 1] == b"{"
        return ParsedEntry(key, number_of(key), -1, start, value, len(data), is_object, False), end.ended
    of_key = number_of(key)
    largest = largest if of_key is None else max(of_key, largest)
    return ParsedEntry(key, of_key, largest, start, value, stop, is_object, True), None


def _at_end(data: bytes, at: int) -> Ended:
    return "open" if at >= len(data) else "fault"


def _key(data: bytes, at: int) -> tuple[str, int]:
    match = _LEXEME.match(data, at)
    if match is None or match[1] is None:
        raise _EndError(_at_end(data, at))
    if not match[2]:
        raise _EndError("open")
    if match[3] is None:
        raise _EndError(_at_end(data, _space(data, match.end(2))))
    if (key := _string(match[1])) is None:
        raise _EndError("fault")
    return key, _space(data, match.end())


def _value(data: bytes, at: int) -> tuple[int, bool, int]:
    """Return the end offset of a JSON value, whether the value is an object, and the largest n of its keys object_{n}.

    Keys of nested objects are included. Without such a key, n is -1.
    """
    first = data[at : at + 1]
    if first == b"{":
        return _body(data, at)
    if first == b"[":
        return _array(data, at)
    if first == b'"':
        match = _LEXEME.match(data, at)
        if match is None or not match[2]:
            raise _EndError("open")
        if _string(match[1]) is None:
            raise _EndError("fault")
        return match.end(2), False, -1
    word = _WORD.match(data, at)
    stop = at if word is None else word.end()
    if not _SCALAR.fullmatch(data, at, stop):
        raise _EndError(_at_end(data, stop))
    return stop, False, -1


def _body(data: bytes, at: int) -> tuple[int, bool, int]:
    """Return the result of `_value` for an object. Only strings and braces are checked, so the object may be invalid
    JSON.
    """
    depth, stop = 0, at
    while True:
        match = _TO_BRACE.match(data, stop)
        stop = len(data) if match is None else match.end() + 1
        what = data[stop - 1 : stop] if stop <= len(data) else b""
        if what == b"{":
            depth += 1
        elif what == b"}":
            depth -= 1
            if not depth:
                return stop, True, _largest(data, at, stop)
        else:
            # The closing brace is missing, or a string is not closed.
            raise _EndError("open")


def _array(data: bytes, at: int) -> tuple[int, bool, int]:
    """Return the result of `_value` for an array, which must be valid JSON."""
    stack: list[int] = []
    for match in _LEXEME.finditer(data, at):
        if match[1] is None:
            what = data[match.start()]
            if what in b"{[":
                stack.append(what + 2)  # ASCII code of the matching closing bracket
            elif stack.pop() != what:
                raise _EndError("fault")
            if not stack:
                try:
                    parse_json(data[at : match.end()])
                except ValueError:
                    raise _EndError("fault") from None
                return match.end(), False, _largest(data, at, match.end())
        elif not match[2]:
            break
    raise _EndError("open")


def _largest(data: bytes, start: int, stop: int) -> int:
    # Fast path: most values contain neither "object_" nor an escape.
    if data.find(b"object_", start, stop) < 0 and data.find(b"\\", start, stop) < 0:
        return -1
    keys = [match[1] for match in _LEXEME.finditer(data, start, stop) if match[3]]
    return max((number for key in keys if (number := number_of(_string(key) or "")) is not None), default=-1)


def _string(raw: bytes) -> str | None:
    """Parse the bytes between the quotes of a JSON string; return None if the string is invalid."""
    try:
        text = raw.decode()
        # Fast path: most strings need no parsing.
        return text if "\\" not in text and text.isprintable() else parse_json(f'"{text}"')
    except ValueError:
        return None
