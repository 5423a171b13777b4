"""The `primer` shape, strict as its specification: exactly `messages`, each exactly `role` and `content`."""

from __future__ import annotations

from typing import Literal

import msgspec

from chatmill.errors import RecordError
from chatmill.records.record import Message, Role
from chatmill.records.shapes import fields
from chatmill.records.shapes.fields import Object, ParsedRecord

_Role = Literal["system", "user", "assistant"]
_ROLES: dict[str, Role] = {"system": "system", "user": "user", "assistant": "assistant"}


class _PrimerMessage(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    role: _Role
    content: str


class _PrimerRecord(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    messages: list[_PrimerMessage]


_STRICT = msgspec.json.Decoder(_PrimerRecord)


def plain(data: bytes) -> ParsedRecord | None:
    """The conversation where the record is right; None where a careful look must say what is wrong."""
    try:
        found = _STRICT.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return ParsedRecord([Message(turn.role, turn.content) for turn in found.messages]) if found.messages else None


def careful(record: Object) -> ParsedRecord:
    """The conversation of one record, any departure from the specification a fault."""
    turns = fields.messages(record, "messages")
    _only("the record", record, ("messages",))
    return ParsedRecord([_message(f"message {index}", turn) for index, turn in enumerate(turns)])


def _message(owner: str, turn: Object) -> Message:
    role = fields.role(owner, turn, "role", _ROLES)
    content = fields.text(owner, turn, "content")
    _only(owner, turn, ("role", "content"))
    return Message(role, content)


def _only(owner: str, given: Object, known: tuple[str, ...]) -> None:
    unknown = [key for key in given if key not in known]
    if unknown:
        noun = "key" if len(unknown) == 1 else "keys"
        what = f"{owner} has the unknown {noun} {fields.keys_shown(unknown)}"
        raise RecordError(what, f"expected only {' and '.join(known)}", kind="keys")
