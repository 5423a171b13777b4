"""The `transcript` shapes: spans of text from `<|SYSTEM|>`, `<|USER|>` or `<|ASSISTANT|>` to `<|END|>`.

`<|EOS|>` ends a conversation. All text is kept. Text outside spans becomes a message with role "none", and a span
without an end marker becomes an incomplete message.
"""

from __future__ import annotations

import re
from typing import Literal

from chatmill.errors import RecordError
from chatmill.records.record import NO_ROLE, Message, Role, new_message
from chatmill.records.shapes import fields
from chatmill.records.shapes.decode import decode, decode_object, decode_text, named
from chatmill.records.shapes.fields import KeyReader, ParsedRecord

EOS = b"<|EOS|>"
_OPENERS: dict[str, Role] = {"SYSTEM": "system", "USER": "user", "ASSISTANT": "assistant"}
_EXPECTED = fields.listed([f"<|{name}|>" for name in _OPENERS])
_MARKER = re.compile(r"<\|(SYSTEM|USER|ASSISTANT|END)\|>")
_SPACE = " \t\n\r\v\f"


def from_line(data: bytes) -> list[ParsedRecord]:
    """Parse the conversations of one line: raw text, a JSON string, or an object with `text`."""
    begin = data.lstrip()[:1]
    if begin not in (b'"', b"{"):
        _refuse_json(data)
        return from_text(data)
    unread: dict[str, None] = {}
    if begin == b'"':
        text, name = str(decode(data)), None
    else:
        record = KeyReader("the record", "", decode_object(data), unread)
        text, name = record.text("text"), fields.record_id(record)
        record.finish()
    records = [each._replace(id=name, unread_keys=tuple(unread)) for each in conversations(text)]
    if not records:
        raise RecordError("the transcript has no text", f"expected {_EXPECTED}", kind="empty")
    return records


def _refuse_json(data: bytes) -> None:
    """Raise `RecordError` if a line is a JSON value other than a string or an object."""
    if b"<|" in data:
        return
    try:
        value = decode(data)
    except (RecordError, RecursionError):
        return
    raise RecordError(f"the record is {named(value)}", 'expected text, a string, or an object with "text"', kind="type")


def from_text(data: bytes) -> list[ParsedRecord]:
    """Parse raw text into conversations, without the whitespace before and after each conversation."""
    return conversations(decode_text(data), trim=True)


def conversations(text: str, *, trim: bool = False) -> list[ParsedRecord]:
    """Parse the conversations of a transcript; skip blank conversations.

    If `trim` is set, drop whitespace before the first and after the last span of each conversation.
    """
    pieces = (piece for piece in text.split(EOS.decode()) if piece.strip(_SPACE))
    return [ParsedRecord(_messages(piece, trim=trim)) for piece in pieces]


def _messages(text: str, *, trim: bool) -> list[Message]:
    """Return the messages of one conversation: its spans, and the text outside spans.

    x U u E A a   ->   none "x", user "u", assistant "a" (incomplete)
    """
    content, *marked = _MARKER.split(text.lstrip(_SPACE) if trim else text)
    turns: list[Message] = []
    role: Role | Literal["none"] = NO_ROLE
    for kind, following in zip(marked[::2], marked[1::2], strict=True):
        if content or role != NO_ROLE or kind == "END":
            turns.append(new_message(role, content, complete=kind == "END"))
        role, content = _OPENERS.get(kind, NO_ROLE), following
    if role == NO_ROLE and trim:
        content = content.rstrip(_SPACE)
    if content or role != NO_ROLE:
        turns.append(new_message(role, content, complete=False))
    return turns
