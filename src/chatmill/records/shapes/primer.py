"""The `primer` shape, strict as its specification: exactly `messages`, each exactly `role` and `content`."""

from __future__ import annotations

from typing import Literal

import msgspec

from chatmill.records.record import Message, Role, new_message
from chatmill.records.shapes import fields
from chatmill.records.shapes.fields import Object, ParsedRecord

_ROLES: dict[str, Role] = {"system": "system", "user": "user", "assistant": "assistant"}


class _PrimerMessage(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    role: Literal["system", "user", "assistant"]
    content: str


class _PrimerRecord(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    messages: list[_PrimerMessage]


_DECODER = msgspec.json.Decoder(_PrimerRecord)


def decode(data: bytes) -> ParsedRecord | None:
    """The conversation of a valid record; None for any other, of which `parse` says what is wrong."""
    try:
        turns = _DECODER.decode(data).messages
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return ParsedRecord([new_message(turn.role, turn.content) for turn in turns]) if turns else None


def parse(record: Object) -> ParsedRecord:
    """The conversation of one record; anything that the specification does not allow is a fault."""
    turns = fields.messages(record, "messages")
    fields.only("the record", record, ("messages",))
    return ParsedRecord([_message(f"message {index}", turn) for index, turn in enumerate(turns)])


def _message(owner: str, turn: Object) -> Message:
    role, content = fields.role(owner, turn, "role", _ROLES), fields.text(owner, turn, "content")
    fields.only(owner, turn, ("role", "content"))
    return new_message(role, content)
