"""Decode the JSON of one record, report the position of errors, and encode values as JSON."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from chatmill.errors import RecordError, one_line

try:
    from chatmill._native._columns import may_repeat_key as may_repeat_key
except ImportError:  # pragma: no cover

    def may_repeat_key(text: bytes, /) -> bool:
        return True


BYTES = {"(bytes)": True}
"""Placeholder for binary table values."""
_DECODER = msgspec.json.Decoder()
# Matches an escaped surrogate that is not part of a pair, unless its backslash is escaped.
_LONE_SURROGATE = re.compile(
    rb"(?<!\\)(?:\\\\)*+(\\u[dD](?:[89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    rb"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD])[c-fC-F]))"
)
_REASON = re.compile(r"JSON is malformed: (.*) \(byte (\d+)\)")


def decode(data: bytes) -> Any:
    """Decode JSON; raise `RecordError` if it is invalid, or if an object has duplicate keys.

    Deep nesting raises a `RecursionError`.
    """
    try:
        value = _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _diagnose(data, str(error)) from None
    if (key := repeated_key(data)) is not None:
        what = f'the key "{one_line(key)}" is given twice in one object'
        raise RecordError(what, "expected each key once", kind="duplicate_key")
    return value


class _RepeatedKeyError(Exception):
    pass


def _unique(pairs: list[tuple[str, Any]]) -> None:
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise _RepeatedKeyError(key)
        seen.add(key)


def repeated_key(data: bytes) -> str | None:
    """Return a key that occurs twice in an object of valid JSON, or None if all keys are unique."""
    if not may_repeat_key(data):
        return None
    try:
        # Keep numbers as text, because Python limits the digits of an integer.
        json.loads(data, object_pairs_hook=_unique, parse_int=str, parse_float=str)
    except _RepeatedKeyError as error:
        return str(error)
    return None


def decode_object(data: bytes) -> dict[str, Any]:
    """Decode a JSON object; raise `RecordError` for any other JSON value."""
    value = decode(data)
    if type(value) is not dict:
        raise RecordError(f"the record is {named(value)}", "expected one JSON object", kind="object")
    return value


def decode_text(data: bytes) -> str:
    """Decode UTF-8 text; raise `RecordError` if it is invalid or contains a NUL byte."""
    if fault := _text_fault(data):
        raise fault
    return data.decode()


def compact(value: Any) -> str:
    """Encode a value as JSON without spaces."""
    return msgspec.json.encode(value).decode()


def json_line(value: Any) -> bytes:
    """Encode a value as a line of JSON; its strings can contain file names that are not valid UTF-8."""
    try:
        return msgspec.json.encode(value) + b"\n"
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def named(value: Any) -> str:
    """Return the type of a JSON value for an error message, such as `a number` or `an object`."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if value == BYTES:
        return "bytes"
    names: dict[type, str] = {str: "a string", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return names.get(type(value), f"a Python {type(value).__name__}")


def wrong_type(owner: str, key: str, value: Any) -> str:
    """Return the first part of an error message about a wrong type, such as `message 1: role is a number`."""
    what = f"{key} is {named(value)}"
    return what if owner == "the record" else f"{owner}: {what}"


def _diagnose(data: bytes, error: str) -> RecordError:
    if fault := _text_fault(data):
        return fault
    if lone := _LONE_SURROGATE.search(data):
        what = f"unpaired surrogate at {_place(data, lone.start(1))}"
        return RecordError(what, "expected a surrogate pair, or the character itself", kind="surrogate")
    if match := _REASON.match(error):
        # For trailing characters, the decoder reports the position one byte after the first trailing character.
        reason, at = match[1], int(match[2]) - (match[1] == "trailing characters")
    elif "out of range" in error:
        return RecordError("a number is out of range", "expected numbers that fit in a double", kind="json")
    else:
        reason, at = "unexpected end", len(data)
    return RecordError(f"invalid JSON at {_place(data, at)} ({reason})", "expected one JSON object", kind="json")


def _text_fault(data: bytes) -> RecordError | None:
    if (at := data.find(b"\0")) >= 0:
        return RecordError(f"a NUL byte at {_place(data, at)}", "expected text without NUL bytes", kind="nul")
    try:
        data.decode()
    except UnicodeDecodeError as error:
        what = f"not UTF-8 at {_place(data, error.start)} (byte 0x{data[error.start]:02x})"
        return RecordError(what, "expected UTF-8 text", kind="utf8")
    return None


def _place(data: bytes, at: int) -> str:
    """Format a byte offset as a column, such as `column 5`; if it is not in the first line, add the line number."""
    column = len(data[data.rfind(b"\n", 0, at) + 1 : at].decode(errors="replace")) + 1
    below = data.count(b"\n", 0, at)
    return f"column {column}" + (f" of line {below + 1} of the record" if below else "")
