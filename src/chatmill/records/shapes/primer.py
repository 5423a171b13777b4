"""The `primer` shape, strict as its specification: exactly `messages`, each exactly `role` and `content`."""

from __future__ import annotations

from typing import Literal

import msgspec

from chatmill.errors import RecordError
from chatmill.records.record import Message, Role
from chatmill.records.shapes import fields
from chatmill.records.shapes.fields import Conversation, Object

_Role = Literal["system", "user", "assistant"]
_ROLES: dict[str, Role] = {"system": "system", "user": "user", "assistant": "assistant"}


class _Message(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    role: _Role
    content: str


class _Record(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    messages: list[_Message]


_STRICT = msgspec.json.Decoder(_Record)


def plain(data: bytes) -> Conversation | None:
    """The conversation where the record is right; None where a careful look must say what is wrong."""
    try:
        found = _STRICT.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return Conversation([Message(turn.role, turn.content) for turn in found.messages]) if found.messages else None


def careful(record: Object) -> Conversation:
    """The conversation of one record, any departure from the specification a fault."""
    turns = fields.messages(record, "messages")
    _only("the record", record, ("messages",))
    return Conversation([_message(f"message {index}", turn) for index, turn in enumerate(turns)])


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
