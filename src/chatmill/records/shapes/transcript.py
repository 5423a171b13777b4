"""The `transcript` shapes: text whose spans run from `<|SYSTEM|>`, `<|USER|>` or `<|ASSISTANT|>` to `<|END|>`.

`<|EOS|>` ends a conversation. All whitespace inside a span is kept; a span that never closes is kept as incomplete.
"""

from __future__ import annotations

import re

from chatmill.errors import RecordError
from chatmill.records.record import Message, Role, new_message
from chatmill.records.shapes import fields
from chatmill.records.shapes.decode import decode, decode_object, decode_text
from chatmill.records.shapes.fields import KeyReader, ParsedRecord, quoted

EOS = b"<|EOS|>"
_OPENERS: dict[str, Role] = {"SYSTEM": "system", "USER": "user", "ASSISTANT": "assistant"}
_EXPECTED = fields.listed([f"<|{name}|>" for name in _OPENERS])
_MARKER = re.compile(r"<\|(SYSTEM|USER|ASSISTANT|END|EOS)\|>")
_ANSWER = re.compile(rb"<\|ASSISTANT\|>(?:(?!<\|(?:SYSTEM|USER|ASSISTANT|EOS)\|>).)*?<\|END\|>")


def from_line(data: bytes) -> list[ParsedRecord]:
    """The conversations of one line: raw text, a JSON string, or an object with `text`."""
    begin = data.lstrip()[:1]
    if begin not in (b'"', b"{"):
        return conversations(decode_text(data))
    unread: dict[str, None] = {}
    if begin == b'"':
        text, name = str(decode(data)), None
    else:
        record = KeyReader("the record", "", decode_object(data), unread)
        text, name = record.text("text"), fields.record_id(record)
        record.finish()
    records = [each._replace(id=name, unread_keys=tuple(unread)) for each in conversations(text)]
    if not records:
        raise RecordError("the transcript has no spans", f"expected {_EXPECTED}", kind="empty")
    return records


def conversations(text: str) -> list[ParsedRecord]:
    """The conversations of a transcript; those without any span are left out."""
    records: list[ParsedRecord] = []
    turns: list[Message] = []
    role: Role | None = None
    position = 0
    for marker in _MARKER.finditer(text):
        kind, content = marker[1], text[position : marker.start()]
        position = marker.end()
        if role is not None:
            turns.append(new_message(role, content, complete=kind == "END"))
        else:
            _check_between(content, len(turns))
            if kind == "END":
                what = f"<|END|> after {len(turns)} spans closes nothing"
                raise RecordError(what, f"expected {_EXPECTED} before it", kind="span")
        role = _OPENERS.get(kind)
        if kind == "EOS" and turns:
            records.append(ParsedRecord(turns))
            turns = []
    if role is not None:
        turns.append(new_message(role, text[position:], complete=False))
    else:
        _check_between(text[position:], len(turns))
    return [*records, ParsedRecord(turns)] if turns else records


def is_line_a_record(first: bytes) -> bool:
    """Whether a file whose first line is `first` holds one record per line, rather than one stream."""
    return first.lstrip()[:1] in (b'"', b"{") or _ANSWER.search(first) is not None


def _check_between(text: str, spans: int) -> None:
    if outside := text.strip():
        what = f"{quoted(outside)} after {spans} spans is outside of every span"
        raise RecordError(what, f"expected {_EXPECTED} before it", kind="span")
