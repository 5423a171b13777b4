"""The `alpaca` and `dolly` shapes: one instruction, its context, and the answer."""

from __future__ import annotations

from chatmill.errors import RecordError
from chatmill.records.record import Message, new_message
from chatmill.records.shapes import fields
from chatmill.records.shapes.decode import named
from chatmill.records.shapes.fields import Object, ParsedRecord


def alpaca(record: Object) -> ParsedRecord:
    """`system` if given, the pairs of `history`, then instruction with input, and output."""
    turns = fields.system(record) + _history(record) + _exchange(record, "input", "output")
    return ParsedRecord(turns, fields.record_id(record))


def dolly(record: Object) -> ParsedRecord:
    """instruction with context, and response; `category` is not read."""
    return ParsedRecord(_exchange(record, "context", "response"), fields.record_id(record))


def _exchange(record: Object, context_key: str, answer_key: str) -> list[Message]:
    """The instruction, with its context below it after a blank line, and the answer."""
    instruction = fields.text("the record", record, "instruction")
    context = fields.optional_text("the record", record, context_key)
    question = "\n\n".join(part for part in (instruction, context) if part)
    answer = fields.text("the record", record, answer_key)
    return [new_message("user", question), new_message("assistant", answer)]


def _history(record: Object) -> list[Message]:
    history = record.get("history")
    if history is None:
        return []
    right = "expected a list of [question, answer]"
    if type(history) is not list:
        raise RecordError(f"the record has {named(history)} as history", right, kind="type")
    turns = []
    for index, pair in enumerate(history):
        if type(pair) is not list or len(pair) != 2 or not all(type(text) is str for text in pair):
            raise RecordError(f"history {index} is not a pair of strings", right, kind="content")
        turns += [new_message("user", pair[0]), new_message("assistant", pair[1])]
    return turns
