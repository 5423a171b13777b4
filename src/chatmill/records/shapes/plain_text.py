"""The `text` and `prompt-completion` shapes."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import msgspec

from chatmill.errors import RecordError
from chatmill.records.record import Message, Role, new_message
from chatmill.records.shapes import fields
from chatmill.records.shapes.decode import wrong_type
from chatmill.records.shapes.fields import KeyReader, Object, ParsedRecord
from chatmill.records.shapes.messages import PLAIN, read_message


@dataclass(frozen=True)
class TextTemplates:
    """The markers in a plain text: `response` precedes each answer, and `instruction` precedes each question."""

    response: str
    instruction: str | None = None

    def train(self, text: str) -> Message:
        """Return the text as a message whose loss mask includes only the answers.

        ### Q: 1+1? ### A: 2 ### Q: 2+2? ### A: 4        with the templates "### A:" and "### Q:"
                           --                   --
        """
        ranges: list[tuple[int, int, float]] = []
        at = 0
        while (start := text.find(self.response, at)) >= 0:
            start += len(self.response)
            stop = text.find(self.instruction, start) if self.instruction else -1
            stop = len(text) if stop < 0 else stop
            ranges += [(at, start, 0.0)] + ([(start, stop, 1.0)] if start < stop else [])
            at = stop
            if stop == len(text):
                return new_message("assistant", text, train_ranges=tuple(ranges))
        # The text does not end with an answer, so the end token gets weight 0.
        return new_message("assistant", text, weight=0.0, train_ranges=tuple(each for each in ranges if each[2]))


def text(record: Object, templates: TextTemplates | None = None) -> ParsedRecord:
    """Parse plain text. Without templates, the loss mask includes the whole text."""

    def read(record: KeyReader) -> list[Message]:
        text = record.text("text")
        if not text:
            raise RecordError("the record has an empty text", "expected at least one character", kind="empty")
        return [new_message("assistant", text) if templates is None else templates.train(text)]

    return fields.read_record(record, read)._replace(is_text=True)


def prompt_completion(record: Object) -> ParsedRecord:
    """Parse `system`, `prompt` and `completion`; a prompt or completion is a string or a list of messages.

    By default, the loss mask excludes the prompt.
    """

    def read(record: KeyReader) -> list[Message]:
        system = fields.system(record)
        if record.take("history"):
            right = "use the shape alpaca, which reads a history: --columns instruction=prompt,output=completion"
            raise RecordError('the record has a "history"', right, kind="keys")
        prompt = [
            msgspec.structs.replace(message, weight=0.0)
            if message.role == "assistant" and message.weight is None
            else message
            for message in _messages(record, "prompt", "user")
        ]
        if system and prompt and prompt[0].role == "system":
            raise RecordError(
                "the record has a system text and a system message", "expected only one system text", kind="keys"
            )
        completion = _messages(record, "completion", "assistant")
        _refuse_repeated_prompt(prompt, completion)
        return system + prompt + completion

    return fields.read_record(record, read)


def _refuse_repeated_prompt(prompt: list[Message], completion: list[Message]) -> None:
    """Raise `RecordError` if the completion repeats the prompt, as `chosen` does in many preference datasets."""
    for message in takewhile(lambda message: message.role != "assistant", completion):
        if prompt and (message.role, message.content) == (prompt[-1].role, prompt[-1].content):
            right = (
                "expected only the answer; if a column contains the whole conversation, use --columns messages=COLUMN"
            )
            raise RecordError("the completion repeats the prompt", right, kind="content")


def _messages(record: KeyReader, key: str, role: Role) -> list[Message]:
    value: Any = record.peek(key)
    if type(value) is str:
        record.take(key)
        return [new_message(role, value)] if value or role == "assistant" else []
    if type(value) is not list:
        what = wrong_type("the record", key, value) if key in record else f"the record has no {key}"
        raise RecordError(what, "expected a string or a list of messages", kind="type")
    return fields.messages(record, key, read_message, PLAIN)
