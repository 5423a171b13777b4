"""Schemas that parse, check and write the entries of an answer, and match them to the ground truth.

    "object_3": {"desc": "black cat", "bbox_2d": ["<|coord_1|>", "<|coord_2|>", "<|coord_3|>", "<|coord_4|>"]}

An object is a dict such as {"desc": "black cat", "bbox_2d": [1, 2, 3, 4]} or {"desc": …, "poly": [x1, y1, x2, …]}.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

from chatmill.errors import DataError, UsageError, one_line
from chatmill.rollout.match import GATE, Matching, match_equal, match_objects
from chatmill.rollout.scan import JSON, parse_json
from chatmill.rollout.vocabulary import CACHED, COORDINATE
from chatmill.rows import Part

Object = dict[str, Any]
STRUCTURE, VALUE = int(Part.STRUCTURE), int(Part.VALUE)
KEYS = {"desc", "bbox_2d", "poly"}
PLACES: Mapping[Any, int] = {**COORDINATE, **{k: k for k in COORDINATE.values()}}
"""Maps coordinate tokens and integers to coordinates, because objects of the ground truth can contain either."""


class TextPart(NamedTuple):
    """A piece of text and the `Part` of its tokens."""

    text: str
    part: int
    """A `Part` as an int, because an int is faster to hash."""


NO_TEXT = TextPart("", STRUCTURE)


class EntryText(NamedTuple):
    """The text of one entry of an answer: the text before the coordinates, the coordinates with their separators, and
    the text after the coordinates.
    """

    head: tuple[TextPart, ...]
    coordinates: Sequence[int] = ()
    separators: tuple[str, ...] = ()
    """Strings to write between the coordinates, used cyclically."""
    tail: TextPart = NO_TEXT


class UnfitError(Exception):
    """Raised if an entry of an answer does not fit the schema; invalid entries are counted by `reason`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Schema(Protocol):
    """Parses, checks, writes and matches the entries of an answer."""

    @property
    def uses_coordinates(self) -> bool: ...

    def read(self, body: Object) -> Object:
        """Convert the parsed JSON of an entry to an object; raise `UnfitError` if the entry does not fit the schema."""

    def check(self, thing: Mapping[str, Any]) -> Object:
        """Convert an object of the ground truth to the form that `read` returns; raise `DataError` if it is invalid."""

    def write(self, thing: Object) -> EntryText:
        """Return the text of the entry that describes an object."""

    def match(self, predicted: Sequence[Object], truth: Sequence[Object]) -> Matching: ...


BOX_KEYS = {"desc", "bbox_2d"}
DESC = TextPart('{"desc": "', STRUCTURE)
BOX, POLYGON = TextPart('", "bbox_2d": ["', STRUCTURE), TextPart('", "poly": [["', STRUCTURE)
BETWEEN, BETWEEN_CORNERS = ('", "',), ('", "', '"], ["')
BOX_END, POLYGON_END = TextPart('"]}', STRUCTURE), TextPart('"]]}', STRUCTURE)


def _no_key_twice(pairs: list[tuple[str, Any]]) -> Object:
    thing = dict(pairs)
    if len(thing) < len(pairs):
        raise UnfitError("key_twice")
    return thing


BODY = json.JSONDecoder(object_pairs_hook=_no_key_twice, parse_constant=JSON.parse_constant)


def read_body(body: bytes, schema: Schema) -> Object:
    """Parse the JSON of an entry; raise `UnfitError` if the entry does not fit the schema."""
    try:
        parsed = parse_json(body, BODY)
    except ValueError:
        raise UnfitError("not_json") from None
    return schema.read(parsed)


@dataclass(frozen=True)
class Detection:
    """A schema for objects with a description and a box or polygon. Predicted objects are matched to true objects by
    their overlap (IoU).
    """

    gate: float = GATE
    """Minimum overlap (IoU) of a matched pair."""
    uses_coordinates = True

    def read(self, body: Object) -> Object:
        return self._read(body, COORDINATE)

    def read_box(self, desc: str, box: list[int]) -> Object:
        """Return an object with a description and a box; raise `UnfitError` if either is invalid."""
        if not desc.strip():
            raise UnfitError("desc")
        if box[0] > box[2] or box[1] > box[3]:
            raise UnfitError("reversed")
        return {"desc": desc, "bbox_2d": box}

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
        """Check an object of the ground truth, whose coordinates can be integers or coordinate tokens."""
        if type(thing) is dict and len(thing) == len(BOX_KEYS) and thing.keys() == BOX_KEYS:
            desc, box = thing["desc"], thing["bbox_2d"]
            if type(desc) is str and type(box) is list and len(box) == 4 and desc.strip():
                x1, y1, x2, y2 = box
                are_numbers = type(x1) is type(y1) is type(x2) is type(y2) is int
                if are_numbers and 0 <= x1 <= x2 <= 999 and 0 <= y1 <= y2 <= 999:
                    return thing
        try:
            return self._read(thing, PLACES)
        except UnfitError as error:
            right = 'expected "desc", and "bbox_2d" [x1, y1, x2, y2] or "poly" [x1, y1, …] with integers from 0 to 999'
            what = f"a ground-truth object does not match the schema ({_WORDS[error.reason]}): {_shown(thing)}"
            raise DataError(f"{what}; {right}") from None

    def write(self, thing: Object) -> EntryText:
        if "bbox_2d" in thing:
            return EntryText(_head(thing["desc"], BOX), thing["bbox_2d"], BETWEEN, BOX_END)
        return EntryText(_head(thing["desc"], POLYGON), thing["poly"], BETWEEN_CORNERS, POLYGON_END)

    def match(self, predicted: Sequence[Object], truth: Sequence[Object]) -> Matching:
        return match_objects(predicted, truth, gate=self.gate)


_WORDS = {
    "other_key": "the object has an unknown key",
    "desc": "desc is blank, or not a string",
    "geometry": "the object must have either bbox_2d or poly",
    "coordinate": "a coordinate is not an integer from 0 to 999",
    "length": "the number of coordinates is wrong",
    "reversed": "the box has x1 > x2 or y1 > y2",
}


def _box(items: Any, places: Mapping[Any, int]) -> list[int]:
    box = _places(items, places)
    if len(box) != 4:
        raise UnfitError("length")
    if box[0] > box[2] or box[1] > box[3]:
        raise UnfitError("reversed")
    return box


def _polygon(items: Any, places: Mapping[Any, int]) -> list[int]:
    """Return the coordinates x1, y1, x2, y2 … of a polygon, given as a flat list or as pairs."""
    if isinstance(items, list | tuple) and items and all(isinstance(item, list | tuple) for item in items):
        if any(len(item) != 2 for item in items):
            raise UnfitError("length")
        items = [part for item in items for part in item]
    polygon = _places(items, places)
    if len(polygon) < 6 or len(polygon) % 2:
        raise UnfitError("length")
    return polygon


def _places(items: Any, places: Mapping[Any, int]) -> list[int]:
    if not isinstance(items, list | tuple):
        raise UnfitError("coordinate")
    numbers = [places.get(item, -1) if type(item) in (str, int) else -1 for item in items]
    if -1 in numbers:
        raise UnfitError("coordinate")
    return numbers


@dataclass(frozen=True)
class Fields:
    """A schema for entries with fixed fields. Entries match if all fields are equal."""

    names: tuple[str, ...]
    uses_coordinates = False

    def __post_init__(self) -> None:
        if not self.names or len(set(self.names)) < len(self.names):
            raise UsageError(
                f"fields are {', '.join(self.names) or '(none)'}; expected at least one field, without duplicates"
            )

    def read(self, body: Object) -> Object:
        if any(key not in self.names for key in body):
            raise UnfitError("other_key")
        if any(name not in body for name in self.names):
            raise UnfitError("field_missing")
        if any(isinstance(value, dict | list) for value in body.values()):
            raise UnfitError("not_plain")
        return {name: body[name] for name in self.names}

    def check(self, thing: Mapping[str, Any]) -> Object:
        right = f"expected the fields {', '.join(self.names)}, each with a string, a number, true, false or null"
        try:
            json.dumps(thing, allow_nan=False)
            return self.read(dict(thing))
        except (UnfitError, TypeError, ValueError):
            raise DataError(f"a ground-truth object does not match the schema: {_shown(thing)}; {right}") from None

    def write(self, thing: Object) -> EntryText:
        parts = []
        before = "{"
        for name in self.names:
            value = thing[name]
            parts.append(TextPart(f'{before}"{_inside(name)}": ', STRUCTURE))
            if isinstance(value, str):
                quote = TextPart('"', STRUCTURE)
                parts += [quote, TextPart(_inside(value), VALUE), quote]
            else:
                parts.append(TextPart(json.dumps(value), VALUE))
            before = ", "
        return EntryText((*parts, TextPart("}", STRUCTURE)))

    def match(self, predicted: Sequence[Object], truth: Sequence[Object]) -> Matching:
        return match_equal(predicted, truth)


@lru_cache(CACHED)
def _head(desc: str, geometry: TextPart) -> tuple[TextPart, ...]:
    return DESC, TextPart(_inside(desc), VALUE), geometry


def _inside(text: str) -> str:
    """Escape text for use inside the quotes of a JSON string."""
    if text.isprintable() and '"' not in text and "\\" not in text:
        return text
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _shown(thing: Any) -> str:
    return one_line(json.dumps(thing, ensure_ascii=False, default=str))
