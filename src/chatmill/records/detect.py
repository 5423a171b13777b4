"""Detect the shape of a file from the keys of its first records."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

from chatmill.errors import DataError, RecordError
from chatmill.records.shapes import SHAPES
from chatmill.records.shapes.decode import decode
from chatmill.records.shapes.fields import Object, keys_shown
from chatmill.records.shapes.tool_turns import TOOL_ROLES

_RECORDS = 16
_UNITS = 1000
_HINT = f"name it with --shape: {', '.join(SHAPES)}"


def detect(file: str, units: Iterable[tuple[int, bytes]]) -> str:
    """The one shape that the first records of a file have in common; several or none is an error.

    `primer` is never detected, because all of its records are also `messages`.
    """
    possible: set[str] | None = None
    unknown: Object | None = None
    seen = 0
    for line, data in islice(units, _UNITS):
        record = _value(data)
        if record is None:
            continue
        votes = shapes_of(record)
        if votes:
            if possible is not None and not possible & votes:
                both = " and ".join(" or ".join(sorted(names)) for names in (possible, votes))
                raise DataError(f"{file}:{line}: records of shape {both} in one file; split it or {_HINT}")
            possible = votes if possible is None else possible & votes
        elif isinstance(record, dict):
            unknown = record if unknown is None else unknown
        seen += 1
        if seen == _RECORDS:
            break
    if possible is None and unknown is not None:
        keys = keys_shown(list(unknown)) or "none"
        raise DataError(f"{file}: no shape is told by records with the keys {keys}; {_HINT}")
    if possible is None or "messages" in possible:
        # If no record is an object, every shape reports the same faults.
        return "messages"
    if len(possible) > 1:
        raise DataError(f"{file}: its records can be {' or '.join(sorted(possible))}; {_HINT}")
    return possible.pop()


def shapes_of(record: Any) -> set[str]:
    """The shapes that a decoded record can have, by its keys; none if they are unknown."""
    if isinstance(record, str):
        return {"transcript"} if _has_marker(record) else set()
    if not isinstance(record, dict):
        return set()
    keys = {key for key, value in record.items() if value is not None}
    shapes = set()
    if "messages" in keys:
        shapes |= _chat_shapes(record)
    if "conversations" in keys:
        shapes.add("sharegpt")
    if {"instruction", "output"} <= keys:
        shapes.add("alpaca")
    if {"instruction", "response"} <= keys:
        shapes.add("dolly")
    if isinstance(record.get("prompt"), dict) or {"message_id", "message_tree_id", "text"} <= keys:
        shapes.add("oasst1")
    elif _has_marker(record.get("text")):
        shapes.add("transcript")
    return shapes


def _chat_shapes(record: Object) -> set[str]:
    """`messages`, `tool`, or both: they share plain turns and differ in roles and keys."""
    turns = record["messages"] if isinstance(record["messages"], list) else []
    turns = [turn for turn in turns if isinstance(turn, dict)]
    roles = {turn.get("role") for turn in turns if isinstance(turn.get("role"), str)}
    if record.get("system") is not None or roles & {"assistant_toolcall", "toolresult"}:
        return {"tool"}
    if roles - set(TOOL_ROLES) or any(isinstance(turn.get("content"), list) for turn in turns):
        return {"messages"}
    return {"messages"} if any(turn.get("tool_calls") for turn in turns) else {"messages", "tool"}


def _value(data: bytes) -> Any:
    """The decoded record, or raw transcript text; None if it cannot be decoded."""
    if data.lstrip()[:2] == b"<|":
        return data.decode(errors="replace")
    try:
        return decode(data)
    except (RecordError, RecursionError):
        return None


def _has_marker(text: Any) -> bool:
    return isinstance(text, str) and any(mark in text for mark in ("<|SYSTEM|>", "<|USER|>", "<|ASSISTANT|>"))
