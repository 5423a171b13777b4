"""The messages of a chunk of records in columns, and the texts that are to be encoded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from chatmill.format.body import Body, body_of, messages_of, text_runs
from chatmill.format.chat_format import ChatFormat
from chatmill.format.compiled import ROLE_CODES, CompiledFormat
from chatmill.records import ChatColumns, Message, Record
from chatmill.rows import Index, Role, offsets
from chatmill.tokenizer import TextColumns

EXTENDED = 8
"""Added to the role code of an extended message; no role code is as large."""


@dataclass(frozen=True)
class MessageColumns:
    """All messages of some records, ready to be encoded."""

    records: Sequence[Record]
    messages: Sequence[Message]
    """Empty for records that are in columns already."""
    first_message: Index
    """By record: its first message; one entry more for the end."""
    added: Index
    """By record: how many messages the format puts in front."""
    roles: NDArray[np.uint8]
    extended: list[int]
    """Messages with tool calls, reasoning, a weight of their own, or without an end; few, as a rule."""
    bodies: dict[int, Body]
    """The bodies of messages with tool calls or reasoning."""
    texts: Sequence[str]
    text_of: Index
    """By message: which of the texts its body is."""


def message_columns(records: Sequence[Record], format: ChatFormat, compiled: CompiledFormat) -> MessageColumns:
    """Everything that can be done before the texts are encoded."""
    if isinstance(records, ChatColumns):
        return _from_chat_columns(records, compiled)
    messages_by_record: list[Sequence[Message]] = [record.messages for record in records]
    counts = np.fromiter(map(len, messages_by_record), dtype=np.int64, count=len(records))
    added = np.zeros(len(records), dtype=np.int64)
    adds_system = format.default_system is not None
    for at, record in enumerate(records):
        if record.tools or adds_system or not record.messages:
            messages_by_record[at] = messages_of(record, format)
            added[at] = len(messages_by_record[at]) - counts[at]
    messages = list(chain.from_iterable(messages_by_record))
    # The only pass over all messages: their role, and whether they are extended.
    codes = np.frombuffer(
        bytes(
            [
                ROLE_CODES[message.role]
                if message.weight is None and not message.tool_calls and not message.reasoning and message.complete
                else ROLE_CODES[message.role] + EXTENDED
                for message in messages
            ]
        ),
        dtype=np.uint8,
    )
    extended = np.flatnonzero(codes >= EXTENDED).tolist()
    roles = codes % EXTENDED
    bodies = {
        at: body_of(message, format, compiled.prefix[roles[at]], compiled.suffix[roles[at]] if message.complete else "")
        for at in extended
        if (message := messages[at]).tool_calls or message.reasoning
    }
    texts, text_of = _texts(messages, roles, compiled, extended, bodies)
    return MessageColumns(records, messages, offsets(counts + added), added, roles, extended, bodies, texts, text_of)


def _from_chat_columns(records: ChatColumns, compiled: CompiledFormat) -> MessageColumns:
    before, after = ([text.encode() for text in texts] for texts in (compiled.prefix, compiled.suffix))
    texts = TextColumns(records.data, records.start, records.stop, records.roles, before, after)
    added, text_of = np.zeros(len(records), dtype=np.int64), np.arange(len(texts), dtype=np.int64)
    return MessageColumns(records, (), records.first_message, added, records.roles, [], {}, texts, text_of)


def _texts(
    messages: list[Message],
    roles: NDArray[np.uint8],
    compiled: CompiledFormat,
    extended: list[int],
    bodies: dict[int, Body],
) -> tuple[list[str], Index]:
    """The texts to encode, and which of them each message's body is; a recurring system text is encoded once."""
    texts = [message.content for message in messages]
    for code, (prefix, suffix) in enumerate(zip(compiled.prefix, compiled.suffix, strict=True)):
        if prefix or suffix:
            for at in np.flatnonzero(roles == code).tolist():
                texts[at] = prefix + texts[at] + suffix
    for at in extended:
        if not messages[at].complete:
            texts[at] = compiled.prefix[roles[at]] + messages[at].content
    text_of = np.arange(len(texts), dtype=np.int64)
    first_with: dict[str, int] = {}
    for at in np.flatnonzero(roles == Role.SYSTEM).tolist():
        first = first_with.setdefault(texts[at], at)
        if first != at:
            text_of[at] = first
            texts[at] = ""
    for at, body in bodies.items():
        texts[at] = ""
        texts += text_runs(body)
    return texts, text_of
