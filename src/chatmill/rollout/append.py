"""What follows a kept prefix: an entry for each missed object and the brace that closes the answer, as text and tokens.

    , "object_3": {"desc": "bird", "bbox_2d": [" | <|coord_1|> | ", " | … | "]}}
    a run of text                                coordinate      a run

Text between two coordinates is a run, and encoded as one. Runs are cached: answers repeat themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from chatmill.errors import DataError, one_line
from chatmill.rollout.schema import STRUCTURE, Detection, Object, Schema, TextPart
from chatmill.rollout.vocabulary import CACHED, COORDINATES, Vocabulary
from chatmill.rows import Part

DETECTION = Detection()
SPACE = " \t\n\r"
OPENING, CLOSING = TextPart("{", STRUCTURE), TextPart("}", int(Part.BRACE))
RANKED = np.array([Part.PREFIX, Part.STRUCTURE, Part.COORD, Part.BRACE, Part.VALUE], dtype=np.uint8)
"""A token with bytes of several parts counts as the last of them in this order."""
RANK = np.zeros(256, dtype=np.uint8)
RANK[RANKED] = range(len(RANKED))
COORD = bytes([Part.COORD])

Run = tuple[TextPart, ...]


class Appended(NamedTuple):
    """Text, its tokens, and the part of each token, one byte each."""

    text: str
    ids: list[int]
    parts: bytes


def serialize_append(
    objects: Sequence[Mapping[str, Any]], start_index: int, prefix_text: str, *, schema: Schema = DETECTION
) -> str:
    """What follows a prefix to name these objects and close the answer; `DataError` if nothing can follow it.

    {"object_2": {…}  ->  , "object_3": {…}, "object_4": {…}}
    After a comma there must be an object, or the answer would not be valid JSON.
    """
    runs, coordinates = _runs([schema.check(thing) for thing in objects], start_index, prefix_text, schema)
    tokens = [*(COORDINATES[k] for k in coordinates), ""]
    return "".join(_text(run) + token for run, token in zip(runs, tokens, strict=True))


def encode_append(
    objects: Sequence[Object],
    start_index: int,
    prefix_text: str,
    schema: Schema,
    vocabulary: Vocabulary,
    *,
    before: str = "",
) -> Appended:
    """The same, with its tokens, of objects that the schema has checked.

    `before` is the end of the prefix that is encoded together with what follows it; the text does not hold it.
    """
    runs, coordinates = _runs(objects, start_index, prefix_text, schema)
    if before:
        runs[0] = (TextPart(before, int(Part.PREFIX)), *runs[0])
    appended = _encode(runs, coordinates, vocabulary)
    return appended._replace(text=appended.text.removeprefix(before))


def encode_answer(objects: Sequence[Object], schema: Schema, vocabulary: Vocabulary) -> Appended:
    """A whole answer that names these objects, from its opening brace on."""
    (first, *runs), coordinates = _runs(objects, 1, OPENING.text, schema)
    return _encode([(OPENING, *first), *runs], coordinates, vocabulary)


def _runs(objects: Sequence[Object], start_index: int, prefix_text: str, schema: Schema) -> tuple[list[Run], list[int]]:
    """Runs of text, and the coordinates between them: one run more than coordinates."""
    last = prefix_text.rstrip(SPACE)[-1:]
    if last not in ("{", ",", "}"):
        shown = f'"{one_line(prefix_text[-20:])}"'
        raise DataError(
            f"a prefix that ends in {shown} cannot be appended to; expected its end to be {{, a comma or }}"
        )
    if last == "," and not objects:
        raise DataError("a prefix that ends in a comma needs an object to append; cut it before the comma")
    runs: list[Run] = []
    coordinates: list[int] = []
    before = ", " if last == "}" else ""
    run: Run = ()
    for number, thing in enumerate(objects, start=start_index):
        head, points, separators, tail = schema.write(thing)
        run = (*run, TextPart(f'{before}"object_{number}": ', STRUCTURE), *head)
        before = ", "
        if points:
            runs += (run, *_between(separators, len(points)))
            coordinates += points
            run = (TextPart(tail, STRUCTURE),)
    return [*runs, (*run, CLOSING)], coordinates


@lru_cache
def _between(separators: tuple[str, ...], count: int) -> tuple[Run, ...]:
    """The runs between `count` coordinates."""
    return tuple((TextPart(separators[at % len(separators)], STRUCTURE),) for at in range(count - 1))


def _encode(runs: Sequence[Run], coordinates: Sequence[int], vocabulary: Vocabulary) -> Appended:
    known: dict[Run, Appended] = vocabulary.runs
    if len(known) > CACHED:
        known.clear()
    if new := [run for run in dict.fromkeys(runs) if run not in known]:
        texts = list(map(_text, new))
        for run, text, ids in zip(new, texts, vocabulary.exact(texts), strict=True):
            known[run] = Appended(text, ids, _parts(run, ids, vocabulary))
    text, ids, parts = known[runs[0]]
    texts, all_ids, all_parts = [text], list(ids), [parts]
    token, coordinate_ids = COORDINATES, vocabulary.coordinate_ids if coordinates else ()
    for coordinate, run in zip(coordinates, runs[1:], strict=True):
        text, ids, parts = known[run]
        texts += (token[coordinate], text)
        all_ids.append(coordinate_ids[coordinate])
        all_ids += ids
        all_parts += (COORD, parts)
    return Appended("".join(texts), all_ids, b"".join(all_parts))


def _text(run: Run) -> str:
    return "".join([piece.text for piece in run])


def _parts(run: Run, ids: Sequence[int], vocabulary: Vocabulary) -> bytes:
    """The part of each token of a run; one that holds any byte of a value counts as that value."""
    if not ids:
        return b""
    ranks = np.repeat(RANK[[piece.part for piece in run]], [len(piece.text.encode()) for piece in run])
    starts = np.minimum(vocabulary.starts(ids)[:-1], len(ranks) - 1)
    return RANKED[np.maximum.reduceat(ranks, starts)].tobytes()
