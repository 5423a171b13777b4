"""Weights for character ranges of an answer: `train_ranges`, and Axolotl's `train_detail`."""

from __future__ import annotations

from typing import Any

from chatmill.errors import RecordError
from chatmill.records.record import Role
from chatmill.records.shapes.decode import named, wrong_type
from chatmill.records.shapes.fields import KeyReader, listed, read_weight

TrainRanges = tuple[tuple[int, int, float], ...]

RANGE_KEYS = ("train_ranges", "train_detail", "training_detail")
"""The key for ranges in chatmill, in Axolotl's docs, and in Axolotl's code."""
_DETAIL_KEYS = ("begin_offset", "end_offset", "train")


def read_ranges(turn: KeyReader, role: Role, content: Any, weight: float | None) -> tuple[TrainRanges, float | None]:
    """Return the character ranges of a message with their weights, and the weight of the message.

    `content` is the unparsed content, which must be a string if there are ranges.
    """
    given = {key: entries for key in RANGE_KEYS if (entries := turn.take(key)) is not None}
    if not given:
        return (), weight
    owner, (key, entries) = turn.owner, next(iter(given.items()))
    if len(given) > 1:
        raise RecordError(f"{owner} has both {' and '.join(given)}", "expected only one of these keys", kind="ranges")
    if type(entries) not in (list, tuple):
        raise RecordError(wrong_type(owner, key, entries), "expected a list of ranges", kind="ranges")
    if role != "assistant" and entries:
        what = f"{owner} has {key}, but its role is {role}"
        raise RecordError(what, "expected ranges only in assistant messages", kind="ranges")
    if type(content) is not str and entries:
        what = f"{owner} has {key}, but content is {named(content)}"
        raise RecordError(what, "expected the content as a string", kind="ranges")
    read = _range if key == "train_ranges" else _detail
    ranges = sorted(read(turn, f"{owner}, {key} {index}", entry) for index, entry in enumerate(entries))
    for index, (start, stop, _) in enumerate(ranges):
        where = f"{owner} has {key} for characters {start} to {stop - 1}"
        if index and start < ranges[index - 1][1]:
            what = f"{where}, which overlap another range"
            raise RecordError(what, "expected ranges that do not overlap", kind="ranges")
        if stop > len(content):
            raise RecordError(where, f"the content has only {len(content)} characters", kind="ranges")
    if key == "train_ranges":
        return tuple(ranges), weight
    return _as_axolotl(ranges, len(content or ""), weight)


def _range(turn: KeyReader, owner: str, entry: Any) -> tuple[int, int, float]:
    """Parse [start, stop], [start, stop, weight], or an object with start, stop, and weight or train."""
    right = "expected [start, stop, weight]"
    if type(entry) in (list, tuple):
        if len(entry) not in (2, 3):
            raise RecordError(f"{owner} has {len(entry)} values", right, kind="ranges")
        start, stop, value = (*entry, 1.0)[:3]
        key = "train" if type(value) is bool else "weight"
        number = read_weight(turn.child(owner, "", {key: value}), "assistant")
        if number is None:
            raise RecordError(wrong_type(owner, "weight", None), right, kind="ranges")
    elif type(entry) is dict:
        keys = turn.child(owner, "", entry)
        keys.only(("start", "stop", "weight", "train"))
        start, stop, number = keys.required("start"), keys.required("stop"), read_weight(keys, "assistant")
    else:
        raise RecordError(f"{owner} is {named(entry)}", right, kind="ranges")
    return *_places(owner, start, stop), 1.0 if number is None else number


def _detail(turn: KeyReader, owner: str, entry: Any) -> tuple[int, int, float]:
    """Parse an Axolotl range, whose `end_offset` is inclusive."""
    if type(entry) is not dict:
        right = f"expected an object with {listed(_DETAIL_KEYS, 'and')}"
        raise RecordError(f"{owner} is {named(entry)}", right, kind="ranges")
    keys = turn.child(owner, "", entry)
    keys.only(_DETAIL_KEYS)
    begin, end, train = (keys.required(key) for key in _DETAIL_KEYS)
    if type(train) is not bool:
        raise RecordError(wrong_type(owner, "train", train), "expected true or false", kind="ranges")
    return *_places(owner, begin, end + 1 if type(end) is int else end), float(train)


def _places(owner: str, start: Any, stop: Any) -> tuple[int, int]:
    for value in (start, stop):
        if type(value) is not int:
            raise RecordError(wrong_type(owner, "position", value), "expected an integer", kind="ranges")
    if not 0 <= start < stop:
        what = f"{owner} is empty"
        raise RecordError(what, "expected 0 <= start < stop", kind="ranges")
    return start, stop


def _as_axolotl(
    ranges: list[tuple[int, int, float]], size: int, weight: float | None
) -> tuple[TrainRanges, float | None]:
    """Apply Axolotl's rules: text outside ranges has weight 0, and ranges in a message with weight 0 are ignored."""
    if weight == 0:
        return (), weight
    if not ranges:
        return (), 0.0 if weight is None else weight
    out: list[tuple[int, int, float]] = []
    at = 0
    for start, stop, train in ranges:
        out += [(at, start, 0.0)] if at < start else []
        out.append((start, stop, train and (1.0 if weight is None else weight)))
        at = stop
    return tuple([*out, (at, size, 0.0)] if at < size else out), weight
