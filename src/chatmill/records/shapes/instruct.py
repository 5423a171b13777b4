"""The `alpaca` and `dolly` shapes: one instruction, its context, and the answer."""

from __future__ import annotations

from chatmill.errors import RecordError
from chatmill.records.record import Message, new_message
from chatmill.records.shapes import fields
from chatmill.records.shapes.decode import wrong_type
from chatmill.records.shapes.fields import KeyReader, Object, ParsedRecord


def alpaca(record: Object) -> ParsedRecord:
    """Parse a record with the keys `system`, `history`, `instruction`, `input` and `output`."""
    return fields.read_record(record, _alpaca_messages)


def dolly(record: Object) -> ParsedRecord:
    """Parse a record with the keys `system`, `instruction`, `context` and `response`."""
    return fields.read_record(record, lambda record: fields.system(record) + _exchange(record, "context", "response"))


def _alpaca_messages(record: KeyReader) -> list[Message]:
    return fields.system(record) + _history(record) + _exchange(record, "input", "output")


def _exchange(record: KeyReader, context_key: str, answer_key: str) -> list[Message]:
    """Return a user message, with the instruction and its context, and an assistant message with the answer."""
    instruction = record.text("instruction")
    context = record.optional_text(context_key)
    question = "\n\n".join(part for part in (instruction, context) if part)
    return [new_message("user", question), new_message("assistant", record.text(answer_key))]


def _history(record: KeyReader) -> list[Message]:
    history = record.take("history")
    if history is None:
        return []
    right = "expected a list of [question, answer]"
    if type(history) is not list:
        raise RecordError(wrong_type("the record", "history", history), right, kind="type")
    turns = []
    for index, pair in enumerate(history):
        if type(pair) is not list or len(pair) != 2 or not all(type(text) is str for text in pair):
            raise RecordError(f"history {index} is not a pair of strings", right, kind="content")
        turns += [new_message("user", pair[0]), new_message("assistant", pair[1])]
    return turns
