"""Convert the messages of many records to columns: message bodies, and the texts to encode.

The body of a message with reasoning or tool calls has several pieces. The text between two control tokens is encoded as
a whole, and the encoded tokens are then assigned to parts by byte offset.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from chatmill.errors import RecordError
from chatmill.format.chat_format import ROLE_CODES, ChatFormat, CompiledFormat, TurnMarkers
from chatmill.records import NO_ROLE, ChatColumns, Message, Record, ToolCall
from chatmill.records.record import is_layout
from chatmill.rows import Ids, Index, Part, Role, offsets
from chatmill.tokenizer import TextColumns, Tokenizer


class BodyPiece(NamedTuple):
    """A control token inside a message body, or a piece of text that belongs to a single part."""

    part: Part
    token: str | None
    """Key of the control token, or None if the piece is text."""
    text: str
    content_at: int = -1
    """Offset of the message's content in `text`; -1 if `text` does not contain it."""


Body = list[BodyPiece]


def body_of(message: Message, format: ChatFormat, prefix: str, suffix: str) -> Body:
    """Return the body of a message: reasoning, content and tool calls, in the order in which a model generates them."""
    body: Body = []

    def add(part: Part, *pieces: tuple[str | None, str], is_content: bool = False) -> None:
        for token, text in pieces:
            if token is None and body and body[-1].token is None and body[-1].part == part:
                last = body[-1]
                content_at = len(last.text) if is_content else last.content_at
                body[-1] = last._replace(text=last.text + text, content_at=content_at)
            elif text:
                body.append(BodyPiece(part, token, text, 0 if is_content else -1))

    def add_filled(part: Part, template: str, text: str) -> None:
        # Search for control tokens only in the template, because `text` is data.
        before, after = template.split("{}")
        add(part, *format.split(before), (None, text), *format.split(after))

    add(Part.CONTENT, (None, prefix))
    if message.reasoning:
        add_filled(Part.REASONING, format.body["reasoning"], message.reasoning)
    add(Part.CONTENT, (None, message.content), is_content=True)
    for number, call in enumerate(message.tool_calls):
        if message.content or number:
            add(Part.TOOL_CALL, (None, "\n"))
        add_filled(Part.TOOL_CALL, format.body["tool_call"], call_text(call))
    add(Part.CONTENT, (None, suffix))
    return body


def text_runs(body: Body) -> list[str]:
    """Return the text runs of a message body: the texts between control tokens, each of which is encoded as a whole."""
    runs = groupby(body, key=lambda piece: piece.token is None)
    return ["".join(piece.text for piece in pieces) for is_text, pieces in runs if is_text]


def content_place(body: Body) -> tuple[int, int]:
    """Return the index of the text run that contains the message's content, and the content's offset in that run."""
    runs = groupby(body, key=lambda piece: piece.token is None)
    for number, pieces in enumerate([*pieces] for is_text, pieces in runs if is_text):
        start = 0
        for piece in pieces:
            if piece.content_at >= 0:
                return number, start + piece.content_at
            start += len(piece.text)
    raise ValueError("the body has no content")


def record_texts(record: Record) -> Iterator[str]:
    """Yield all texts of a conversation, to train a tokenizer on them."""
    yield from record.tools
    for message in record.messages:
        yield from filter(None, (message.reasoning, message.content, *map(call_text, message.tool_calls)))


def call_text(call: ToolCall) -> str:
    """Return a tool call as compact JSON. The arguments keep their key order."""
    return f'{{"name":{msgspec.json.encode(call.name).decode()},"arguments":{call.arguments}}}'


def messages_of(record: Record, format: ChatFormat) -> Sequence[Message]:
    """Return the messages to render, with the default system message and the tool definitions added."""
    messages = record.messages
    if not messages:
        raise RecordError("the record has no messages", "expected at least one message", kind="empty").at(
            record.file, record.line
        )
    first = next((at for at, message in enumerate(messages) if message.role != NO_ROLE), 0)
    has_system = messages[first].role == "system"
    if not record.tools and (has_system or format.default_system is None):
        return messages
    system = messages[first] if has_system else Message(role="system", content=format.default_system or "")
    if record.tools:
        tools = format.body["tools"].replace("{}", "\n".join(record.tools), 1)
        content = f"{system.content}\n\n{tools}" if system.content else tools
        system = msgspec.structs.replace(system, content=content)
    return [*messages[:first], system, *messages[first + 1 :]] if has_system else [system, *messages]


def split_bodies(
    bodies: Sequence[Body], flat: Ids, text_start: Index, tokenizer: Tokenizer, control_start: Mapping[str, int]
) -> tuple[Index, Index, NDArray[np.uint8]]:
    """Return the start, length and part of each piece of `bodies`. `flat` must end with the ids of the text runs of
    `bodies`.

    The start of a control token is `len(flat)` plus its offset in `control_start`. If the tokenizer changes the text of
    a run, the boundaries between the pieces of the run are unknown; one content piece then covers the whole run, and
    the other pieces of the run are empty.
    """
    pieces = [piece for body in bodies for piece in body]
    parts = np.array([piece.part for piece in pieces], dtype=np.uint8)
    starts = np.array([len(flat) + control_start[piece.token] if piece.token else 0 for piece in pieces])
    lengths = np.ones(len(pieces), dtype=np.int64)
    is_text = np.array([piece.token is None for piece in pieces])
    begins_run = is_text & ~np.append(False, is_text[:-1])
    begins_run[offsets(np.array([len(body) for body in bodies]))[:-1]] = True
    begins_run &= is_text
    if not begins_run.any():
        return starts, lengths, parts
    run = (np.cumsum(begins_run) + len(text_start) - 2 - begins_run.sum())[is_text]
    size = np.array([len(piece.text.encode()) for piece in pieces], dtype=np.int64)[is_text]
    run_start, run_stop = text_start[run], text_start[run + 1]
    run_size = np.bincount(run, weights=size)[run].astype(np.int64)
    end = np.cumsum(size)
    end -= (end - size)[np.searchsorted(run, run)]
    first_token = run_start[0]
    position, _, exact = tokenizer.positions(
        flat[first_token:], run_start - first_token, run_stop - first_token, size=run_size, offset=end
    )
    is_last = np.append(run[1:] != run[:-1], True)
    is_first = np.append(True, is_last[:-1])
    inexact = ~exact & ~(is_first & is_last)
    stop = np.where(is_last | inexact, run_stop, position + first_token)
    parts[np.flatnonzero(is_text)[inexact]] = Part.CONTENT
    start = np.where(is_first, run_start, np.append(0, stop[:-1]))
    starts[is_text] = start
    lengths[is_text] = stop - start
    return starts, lengths, parts


def transcript_turns(record: Record, format: ChatFormat) -> list[str]:
    """Return the rendered text of each turn, in order.

    Raise a `RecordError` if a text contains a marker of the format, because the text would look like a turn.
    """
    turns = []
    for number, message in enumerate(messages_of(record, format)):
        outside = TurnMarkers("", format.tokens[format.eot])
        turn = outside if message.role == NO_ROLE else format.turns[message.role]
        body = body_of(message, format, "", "")
        for token in format.tokens.values():
            if any(token in text for text in text_runs(body)):
                raise RecordError(
                    f"the text of message {number} contains the marker {token}",
                    "a transcript cannot contain its own markers as text; remove the record",
                    kind="marker_in_text",
                ).at(record.file, record.line, record.id)
        text = "".join(piece.text for piece in body)
        turns.append(turn.open + text + (turn.close if message.complete else ""))
    return turns


EXTENDED = 8
"""Offset added to the role codes of the messages in `MessageColumns.extended`; larger than every role code."""


@dataclass(frozen=True)
class MessageColumns:
    """The messages of several records, prepared for encoding."""

    records: Sequence[Record]
    messages: Sequence[Message]
    """All messages in order, or an empty sequence if the records are `ChatColumns`."""
    first_message: Index
    """Index of the first message of each record. The last entry is the total number of messages."""
    added: Index
    """Number of messages that the format adds at the start of each record."""
    roles: NDArray[np.uint8]
    extended: list[int]
    """Indices of messages that are incomplete or have tool calls, reasoning, a weight or train ranges."""
    bodies: dict[int, Body]
    """The bodies of messages with tool calls, reasoning or train ranges, by message index."""
    texts: Sequence[str]
    text_of: Index
    """For each message, the index of its text in `texts`."""
    layout: int = 0
    """Number of records in which the format drops whitespace between turns."""

    @property
    def outside(self) -> list[int]:
        """Indices of the messages without a role, whose text is outside all turns."""
        numbers: list[int] = np.flatnonzero(self.roles == ROLE_CODES[NO_ROLE]).tolist()
        return numbers


def message_columns(records: Sequence[Record], format: ChatFormat, compiled: CompiledFormat) -> MessageColumns:
    """Collect the messages of `records` in columns and list the texts to encode."""
    if isinstance(records, ChatColumns):
        before, after = ([text.encode() for text in texts] for texts in (compiled.prefix, compiled.suffix))
        columns = TextColumns(records.data, records.start, records.stop, records.roles, before, after)
        added, text_of = np.zeros(len(records), dtype=np.int64), np.arange(len(columns), dtype=np.int64)
        return MessageColumns(records, (), records.first_message, added, records.roles, [], {}, columns, text_of)
    messages_by_record: list[Sequence[Message]] = [record.messages for record in records]
    counts = np.fromiter(map(len, messages_by_record), dtype=np.int64, count=len(records))
    added = np.zeros(len(records), dtype=np.int64)
    adds_system = format.default_system is not None
    for at, record in enumerate(records):
        if record.tools or adds_system or not record.messages:
            messages_by_record[at] = messages_of(record, format)
            added[at] = len(messages_by_record[at]) - counts[at]
    messages = list(chain.from_iterable(messages_by_record))
    # For speed, one loop collects the role codes and marks the messages that belong in `extended`.
    listed = [
        ROLE_CODES[message.role]
        if message.weight is None
        and not message.tool_calls
        and not message.reasoning
        and message.complete
        and not message.train_ranges
        else ROLE_CODES[message.role] + EXTENDED
        for message in messages
    ]
    codes = np.frombuffer(bytes(listed), dtype=np.uint8)
    extended = np.flatnonzero(codes >= EXTENDED).tolist()
    roles = codes % EXTENDED
    bodies = {
        at: body_of(message, format, compiled.prefix[roles[at]], compiled.suffix[roles[at]] if message.complete else "")
        for at in extended
        if (message := messages[at]).tool_calls or message.reasoning or message.train_ranges
    }
    texts = [message.content for message in messages]
    for code, (prefix, suffix) in enumerate(zip(compiled.prefix, compiled.suffix, strict=True)):
        if prefix or suffix:
            for at in np.flatnonzero(roles == code).tolist():
                texts[at] = prefix + texts[at] + suffix
    for at in extended:
        if not messages[at].complete:
            texts[at] = compiled.prefix[roles[at]] + messages[at].content
    layout = 0
    if not format.requires_user:
        left_out = [at for at in np.flatnonzero(roles == ROLE_CODES[NO_ROLE]).tolist() if is_layout(messages[at])]
        for at in left_out:
            texts[at] = ""
        layout = len(np.unique(np.searchsorted(offsets(counts + added), left_out, side="right")))
    # Encode a recurring system message only once.
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
    first_message = offsets(counts + added)
    return MessageColumns(records, messages, first_message, added, roles, extended, bodies, texts, text_of, layout)
