"""Schema: what an entry of an answer must be, how it is parsed, written, and matched to the truth.

    "object_3": {"desc": "black cat", "bbox_2d": ["<|coord_1|>", "<|coord_2|>", "<|coord_3|>", "<|coord_4|>"]}

Objects are plain data: {"desc": "black cat", "bbox_2d": [1, 2, 3, 4]}, or {"desc": …, "poly": [x1, y1, x2, …]}.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from chatmill.errors import DataError, UsageError, one_line
from chatmill.rollout.match import GATE, Matching, match_equal, match_objects
from chatmill.rollout.scan import JSON, parse_json
from chatmill.rollout.vocabulary import COORDINATE, COORDINATES
from chatmill.rows import Part

Object = dict[str, Any]
KEYS = {"desc", "bbox_2d", "poly"}
PLACES: Mapping[Any, int] = {**COORDINATE, **{k: k for k in COORDINATE.values()}}
"""Coordinates of true objects: tokens, or their numbers."""


class AppendPiece(NamedTuple):
    """A piece of the appended text; a coordinate is one token."""

    text: str
    part: Part
    coordinate: int = -1


class UnfitError(Exception):
    """An entry that does not fit the schema, with the reason it is counted under."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Schema(Protocol):
    """What entries are: how they are read, checked, written and matched."""

    @property
    def uses_coordinates(self) -> bool: ...

    def read(self, body: Object) -> Object:
        """The object of an entry; `UnfitError` if it is none."""

    def check(self, thing: Mapping[str, Any]) -> Object:
        """A true object as it will be written; `DataError` if it does not fit."""

    def write(self, thing: Object) -> Iterator[AppendPiece]:
        """The body of an entry."""

    def match(self, predicted: Sequence[Object], truth: Sequence[Object]) -> Matching: ...


def _no_key_twice(pairs: list[tuple[str, Any]]) -> Object:
    thing = dict(pairs)
    if len(thing) < len(pairs):
        raise UnfitError("key_twice")
    return thing


BODY = json.JSONDecoder(object_pairs_hook=_no_key_twice, parse_constant=JSON.parse_constant)


def read_body(body: bytes, schema: Schema) -> Object:
    """The object in the body of an entry; `UnfitError` with the reason if there is none."""
    try:
        parsed = parse_json(body, BODY)
    except ValueError:
        raise UnfitError("not_json") from None
    return schema.read(parsed)


@dataclass(frozen=True)
class Detection:
    """Things with a description and a box or a polygon, in coordinates from 0 to 999; matched by overlap."""

    gate: float = GATE
    """Pairs that overlap less are never matched."""
    uses_coordinates = True

    def read(self, body: Object) -> Object:
        return self._read(body, COORDINATE)

    def _read(self, body: Mapping[str, Any], places: Mapping[Any, int]) -> Object:
        if not body.keys() <= KEYS:
            raise UnfitError("other_key")
        desc = body.get("desc")
        if not isinstance(desc, str) or not desc.strip():
            raise UnfitError("desc")
        if ("bbox_2d" in body) == ("poly" in body):
            raise UnfitError("geometry")
        if "poly" in body:
            return {"desc": desc, "poly": _polygon(body["poly"], places)}
        return {"desc": desc, "bbox_2d": _box(body["bbox_2d"], places)}

    def check(self, thing: Mapping[str, Any]) -> Object:
        """Coordinates of a true object may be numbers or tokens."""
        try:
            return self._read(thing, PLACES)
        except UnfitError as error:
            right = 'expected "desc" and one of "bbox_2d" [x1, y1, x2, y2] and "poly" [x1, y1, …], each from 0 to 999'
            raise DataError(f"a true object does not fit ({_WORDS[error.reason]}): {_shown(thing)}; {right}") from None

    def write(self, thing: Object) -> Iterator[AppendPiece]:
        yield AppendPiece('{"desc": "', Part.STRUCTURE)
        yield AppendPiece(_inside(thing["desc"]), Part.VALUE)
        if "bbox_2d" in thing:
            yield AppendPiece('", "bbox_2d": ["', Part.STRUCTURE)
            yield from _coordinates(thing["bbox_2d"], ('", "',))
            yield AppendPiece('"]}', Part.STRUCTURE)
        else:
            yield AppendPiece('", "poly": [["', Part.STRUCTURE)
            yield from _coordinates(thing["poly"], ('", "', '"], ["'))
            yield AppendPiece('"]]}', Part.STRUCTURE)

    def match(self, predicted: Sequence[Object], truth: Sequence[Object]) -> Matching:
        return match_objects(predicted, truth, gate=self.gate)


_WORDS = {
    "other_key": "it has a key that objects have not",
    "desc": "its desc is no text, or blank",
    "geometry": "it has no geometry, or two",
    "coordinate": "a coordinate is not a whole number from 0 to 999",
    "length": "it has not the right number of coordinates",
    "reversed": "the box ends before it begins",
}


def _coordinates(points: Sequence[int], between: tuple[str, ...]) -> Iterator[AppendPiece]:
    """Coordinates, and the separators between them in turn."""
    for at, k in enumerate(points):
        if at:
            yield AppendPiece(between[(at - 1) % len(between)], Part.STRUCTURE)
        yield AppendPiece(COORDINATES[k], Part.COORD, k)


def _box(items: Any, places: Mapping[Any, int]) -> list[int]:
    box = _places(items, places)
    if len(box) != 4:
        raise UnfitError("length")
    if box[0] > box[2] or box[1] > box[3]:
        raise UnfitError("reversed")
    return box


def _polygon(items: Any, places: Mapping[Any, int]) -> list[int]:
    """x1, y1, x2, y2 … of a polygon, given flat or as pairs."""
    if isinstance(items, list | tuple) and items and all(isinstance(item, list | tuple) for item in items):
        if any(len(item) != 2 for item in items):
            raise UnfitError("length")
        items = [part for item in items for part in item]
    polygon = _places(items, places)
    if len(polygon) < 6 or len(polygon) % 2:
        raise UnfitError("length")
    return polygon


def _places(items: Any, places: Mapping[Any, int]) -> list[int]:
    """The k of each coordinate of a list."""
    if not isinstance(items, list | tuple):
        raise UnfitError("coordinate")
    numbers = [places.get(item, -1) if type(item) in (str, int) else -1 for item in items]
    if -1 in numbers:
        raise UnfitError("coordinate")
    return numbers


@dataclass(frozen=True)
class Fields:
    """Entries that all have the same fields, each a text, a number, true, false or null; matched if all are equal."""

    names: tuple[str, ...]
    uses_coordinates = False

    def __post_init__(self) -> None:
        if not self.names or len(set(self.names)) < len(self.names):
            raise UsageError(f"fields {', '.join(self.names) or '(none)'}; give at least one, and none twice")

    def read(self, body: Object) -> Object:
        if any(key not in self.names for key in body):
            raise UnfitError("other_key")
        if any(name not in body for name in self.names):
            raise UnfitError("field_missing")
        if any(isinstance(value, dict | list) for value in body.values()):
            raise UnfitError("not_plain")
        return {name: body[name] for name in self.names}

    def check(self, thing: Mapping[str, Any]) -> Object:
        right = f"expected the fields {', '.join(self.names)}, each a text, a number, true, false or null"
        try:
            json.dumps(thing, allow_nan=False)
            return self.read(dict(thing))
        except (UnfitError, TypeError, ValueError):
            raise DataError(f"a true object does not fit: {_shown(thing)}; {right}") from None

    def write(self, thing: Object) -> Iterator[AppendPiece]:
        before = "{"
        for name in self.names:
            value = thing[name]
            yield AppendPiece(f'{before}"{_inside(name)}": ', Part.STRUCTURE)
            if isinstance(value, str):
                yield AppendPiece('"', Part.STRUCTURE)
                yield AppendPiece(_inside(value), Part.VALUE)
                yield AppendPiece('"', Part.STRUCTURE)
            else:
                yield AppendPiece(json.dumps(value), Part.VALUE)
            before = ", "
        yield AppendPiece("}", Part.STRUCTURE)

    def match(self, predicted: Sequence[Object], truth: Sequence[Object]) -> Matching:
        return match_equal(predicted, truth)


def _inside(text: str) -> str:
    """A JSON string without its quotes; non-ASCII characters are not escaped."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _shown(thing: Any) -> str:
    return one_line(json.dumps(thing, ensure_ascii=False, default=str))
