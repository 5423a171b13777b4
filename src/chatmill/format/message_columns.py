"""Sheets: the messages of a chunk in columns, and the texts that are to be encoded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from chatmill.format.body import Body, body_of, messages_of
from chatmill.format.chat_format import ChatFormat
from chatmill.format.compiled import CODE, CompiledFormat
from chatmill.records import ChatColumns, Message, Record
from chatmill.rows import Index, Role, offsets
from chatmill.tokenizer import TextColumns

ODD = 8
"""Added to the role of a message that has more than a content; no role is as large."""


@dataclass(frozen=True)
class MessageColumns:
    """All messages of some records, laid out for printing."""

    records: Sequence[Record]
    messages: Sequence[Message]
    """Empty where they are in columns."""
    first_message: Index
    """Where each record begins among the messages, and their end."""
    lead: Index
    """How many messages of each record the format put in front."""
    roles: NDArray[np.uint8]
    odd: list[int]
    """Messages with more than a role and a content; on the bulk path there are few."""
    bodies: dict[int, Body]
    """Those of them whose body is more than one text."""
    texts: Sequence[str]
    text_of: Index
    """Which of the texts the body of each message is."""


def lay_out(records: Sequence[Record], format: ChatFormat, plates: CompiledFormat) -> MessageColumns:
    """Everything that can be done before the texts are encoded."""
    if isinstance(records, ChatColumns):
        return _in_columns(records, plates)
    written: list[Sequence[Message]] = [record.messages for record in records]
    counts = np.fromiter(map(len, written), dtype=np.int64, count=len(written))
    lead = np.zeros(len(records), dtype=np.int64)
    adds_system = format.default_system is not None
    for at, record in enumerate(records):
        if record.tools or adds_system or not record.messages:
            written[at] = messages_of(record, format)
            lead[at] = len(written[at]) - counts[at]
    messages = list(chain.from_iterable(written))
    # One pass over all messages: who speaks, and whether there is more than a content.
    kinds = np.frombuffer(
        bytes(
            [
                CODE[message.role]
                if message.weight is None and not message.tool_calls and not message.reasoning and message.complete
                else CODE[message.role] + ODD
                for message in messages
            ]
        ),
        dtype=np.uint8,
    )
    odd = np.flatnonzero(kinds >= ODD).tolist()
    roles = kinds % ODD
    bodies = {
        at: body_of(message, format, plates.prefix[roles[at]], plates.suffix[roles[at]] if message.complete else "")
        for at in odd
        if (message := messages[at]).tool_calls or message.reasoning
    }
    texts, text_of = _texts(messages, roles, plates, odd, bodies)
    return MessageColumns(records, messages, offsets(counts + lead), lead, roles, odd, bodies, texts, text_of)


def _in_columns(records: ChatColumns, plates: CompiledFormat) -> MessageColumns:
    before, after = ([text.encode() for text in texts] for texts in (plates.prefix, plates.suffix))
    texts = TextColumns(records.data, records.start, records.stop, records.roles, before, after)
    lead, text_of = np.zeros(len(records), dtype=np.int64), np.arange(len(texts), dtype=np.int64)
    return MessageColumns(records, (), records.first_message, lead, records.roles, [], {}, texts, text_of)


def _texts(
    messages: list[Message], roles: NDArray[np.uint8], plates: CompiledFormat, odd: list[int], bodies: dict[int, Body]
) -> tuple[list[str], Index]:
    """The texts to encode, and which of them each message's body is; system texts that recur stand once."""
    texts = [message.content for message in messages]
    for code, (prefix, suffix) in enumerate(zip(plates.prefix, plates.suffix, strict=True)):
        if prefix or suffix:
            for at in np.flatnonzero(roles == code).tolist():
                texts[at] = prefix + texts[at] + suffix
    for at in odd:
        if not messages[at].complete:
            texts[at] = plates.prefix[roles[at]] + messages[at].content
    text_of = np.arange(len(texts), dtype=np.int64)
    seen: dict[str, int] = {}
    for at in np.flatnonzero(roles == Role.SYSTEM).tolist():
        first = seen.setdefault(texts[at], at)
        if first != at:
            text_of[at] = first
            texts[at] = ""
    for at, body in bodies.items():
        texts[at] = ""
        body.first_text = len(texts)
        texts += body.runs
    return texts, text_of
