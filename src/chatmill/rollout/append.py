"""Complete a prefix of an answer: append an entry for each missed object, and the closing brace.

For example, `, "object_3": {"desc": "bird", "bbox_2d": ["<|coord_1|>", …]}}` completes an answer with two objects.

A `Stretch` is a text and the coordinates after it. The token ids of a stretch are cached without the coordinate values,
because the same text often occurs with different coordinates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from chatmill.errors import DataError, one_line
from chatmill.rollout.schema import STRUCTURE, Detection, Object, Schema, TextPart
from chatmill.rollout.vocabulary import CACHED, COORDINATES, Vocabulary
from chatmill.rows import Ids, Part

DETECTION = Detection()
SPACE = " \t\n\r"
OPENING, CLOSING = TextPart("{", STRUCTURE), TextPart("}", int(Part.BRACE))
RANKED = np.array([Part.PREFIX, Part.STRUCTURE, Part.COORD, Part.BRACE, Part.VALUE], dtype=np.uint8)
"""Parts in order of precedence: a token that spans several parts belongs to the part that is last in this list."""
RANK = np.zeros(256, dtype=np.uint8)
RANK[RANKED] = range(len(RANKED))
COORD = bytes([Part.COORD])

Run = tuple[TextPart, ...]


class Stretch(NamedTuple):
    """A text, the number of coordinates after the text, and the separators between these coordinates."""

    run: Run
    separators: tuple[str, ...] = ()
    coordinates: int = 0


class EncodedStretch(NamedTuple):
    """The text before each coordinate of a `Stretch`, and the token ids, with 0 in place of each coordinate."""

    texts: tuple[str, ...]
    ids: bytes
    """Token ids, as bytes of uint32 values."""
    parts: bytes


class Appended(NamedTuple):
    """Appended text, its token ids, and the `Part` of each token as one byte."""

    text: str
    ids: Ids
    parts: bytes


def serialize_append(
    objects: Sequence[Mapping[str, Any]], start_index: int, prefix_text: str, *, schema: Schema = DETECTION
) -> str:
    """Return the text that appends objects to a prefix and closes the answer.

    {"object_2": {…}  ->  , "object_3": {…}, "object_4": {…}}
    If the prefix ends in a comma, at least one object is required.
    """
    checked = [schema.check(thing) for thing in objects]
    stretches, coordinates = _stretches(checked, start_index, prefix_text, schema)
    return _with_coordinates([text for stretch in stretches for text in _texts(stretch)], coordinates)


def encode_append(
    objects: Sequence[Object],
    start_index: int,
    prefix_text: str,
    schema: Schema,
    vocabulary: Vocabulary,
    *,
    before: str = "",
) -> Appended:
    """Return the text of `serialize_append` and its tokens. The objects must be results of `schema.check`.

    `before` is the end of the prefix, which is encoded again together with the appended text. The returned tokens
    include `before`, but the returned text does not.
    """
    stretches, coordinates = _stretches(objects, start_index, prefix_text, schema)
    if before:
        first = stretches[0]
        stretches[0] = first._replace(run=(TextPart(before, int(Part.PREFIX)), *first.run))
    appended = _encode(stretches, coordinates, vocabulary)
    return appended._replace(text=appended.text.removeprefix(before))


def encode_answer(objects: Sequence[Object], schema: Schema, vocabulary: Vocabulary) -> Appended:
    """Encode a complete answer that contains the given objects."""
    (first, *others), coordinates = _stretches(objects, 1, OPENING.text, schema)
    return _encode([first._replace(run=(OPENING, *first.run)), *others], coordinates, vocabulary)


def _stretches(
    objects: Sequence[Object], start_index: int, prefix_text: str, schema: Schema
) -> tuple[list[Stretch], list[int]]:
    last = prefix_text.rstrip(SPACE)[-1:]
    if last not in ("{", ",", "}"):
        shown = f'"{one_line(prefix_text[-20:])}"'
        raise DataError(
            f"cannot append to a prefix that ends in {shown}; expected a prefix that ends in {{, a comma or }}"
        )
    if last == "," and not objects:
        raise DataError(
            "the prefix ends in a comma, but there are no objects to append; end the prefix before the comma"
        )
    stretches: list[Stretch] = []
    coordinates: list[int] = []
    before = ", " if last == "}" else ""
    run: Run = ()
    for number, thing in enumerate(objects, start=start_index):
        head, points, separators, tail = schema.write(thing)
        run = (*run, _key(before, number), *head)
        before = ", "
        if points:
            stretches.append(Stretch(run, separators, len(points)))
            coordinates += points
            run = (tail,)
    return [*stretches, Stretch((*run, CLOSING))], coordinates


@lru_cache(CACHED)
def _key(before: str, number: int) -> TextPart:
    return TextPart(f'{before}"object_{number}": ', STRUCTURE)


def _texts(stretch: Stretch) -> list[str]:
    """Return the text before each coordinate, or the whole text if the stretch has no coordinates."""
    run, separators, count = stretch
    return [_text(run), *(separators[at % len(separators)] for at in range(count - 1))]


def _with_coordinates(texts: Sequence[str], coordinates: Sequence[int]) -> str:
    tokens = [*map(COORDINATES.__getitem__, coordinates), ""]
    return "".join(chain.from_iterable(zip(texts, tokens, strict=True)))


def _encode(stretches: Sequence[Stretch], coordinates: Sequence[int], vocabulary: Vocabulary) -> Appended:
    known: dict[Stretch, EncodedStretch] = vocabulary.stretches
    encoded = list(map(known.get, stretches))
    if None in encoded:
        _encode_new(stretches, vocabulary)
        encoded = list(map(known.get, stretches))
    texts, ids, parts = zip(*encoded, strict=True)
    all_ids, all_parts = np.frombuffer(bytearray().join(ids), dtype=np.uint32), b"".join(parts)
    if coordinates:
        places = np.frombuffer(all_parts, dtype=np.uint8) == Part.COORD
        all_ids[places] = vocabulary.coordinate_array[coordinates]
    return Appended(_with_coordinates(list(chain.from_iterable(texts)), coordinates), all_ids, all_parts)


def _encode_new(stretches: Sequence[Stretch], vocabulary: Vocabulary) -> None:
    known: dict[Stretch, EncodedStretch] = vocabulary.stretches
    if len(known) > CACHED:
        known.clear()
    new = [stretch for stretch in dict.fromkeys(stretches) if stretch not in known]
    texts = list(map(_texts, new))
    encoded = iter(vocabulary.exact(list(chain.from_iterable(texts))))
    for stretch, of_stretch in zip(new, texts, strict=True):
        separators = ((TextPart(text, STRUCTURE),) for text in of_stretch[1:])
        ids: list[int] = []
        parts = b""
        for run in (stretch.run, *separators):
            of_run = next(encoded)
            ids += of_run
            parts += _parts(run, of_run, vocabulary)
            if stretch.coordinates:
                ids.append(0)
                parts += COORD
        known[stretch] = EncodedStretch(tuple(of_stretch), np.array(ids, dtype=np.uint32).tobytes(), parts)


def _text(run: Run) -> str:
    return "".join([piece.text for piece in run])


def _parts(run: Run, ids: Sequence[int], vocabulary: Vocabulary) -> bytes:
    if not ids:
        return b""
    ranks = np.repeat(RANK[[piece.part for piece in run]], [len(piece.text.encode()) for piece in run])
    starts = np.minimum(vocabulary.starts(ids)[:-1], len(ranks) - 1)
    return RANKED[np.maximum.reduceat(ranks, starts)].tobytes()
