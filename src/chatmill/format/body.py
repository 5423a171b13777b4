"""Messages with more than plain content: reasoning, tool calls, and a system message with tool definitions.

The text between two control tokens is encoded as one, so its parts are separated after encoding, by byte offsets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from chatmill.errors import RecordError
from chatmill.format.chat_format import ChatFormat
from chatmill.format.compiled import RenderTokenizer
from chatmill.records import Message, Record, ToolCall
from chatmill.rows import Ids, Index, Part
from chatmill.tokenizer.token_positions import token_positions


@dataclass
class Body:
    """The body of one message: `runs` of text between control tokens, and `pieces` in their order."""

    runs: list[str] = field(default_factory=list)
    pieces: list[tuple[Part, str | None, int, int]] = field(default_factory=list)
    """(part, key of a control token or None, number of the run, bytes of it)"""
    first_text: int = 0
    """The number of its first run among all texts that are encoded."""

    def __len__(self) -> int:
        return len(self.pieces)

    def written(self, tokens: Mapping[str, str]) -> str:
        """The body as text, control tokens written out."""
        out, run = [], -1
        for _, key, of_run, _ in self.pieces:
            if key is not None:
                out.append(tokens[key])
            elif of_run != run:
                run = of_run
                out.append(self.runs[run])
        return "".join(out)

    def add(self, part: Part, key: str | None, text: str) -> None:
        if key is not None:
            self.pieces.append((part, key, 0, 0))
        elif text:
            size = len(text.encode())
            last = self.pieces[-1] if self.pieces else None
            if last is None or last[1] is not None:
                self.runs.append("")
            elif last[0] == part:
                size += self.pieces.pop()[3]
            self.runs[-1] += text
            self.pieces.append((part, None, len(self.runs) - 1, size))


def body_of(message: Message, format: ChatFormat, prefix: str, suffix: str) -> Body:
    """Reasoning, content and tool calls in the order a model writes them."""
    body = Body()

    def add(part: Part, template: str, text: str) -> None:
        # Only the template may hold control tokens; `text` is data.
        before, after = template.split("{}")
        for key, piece in format.split(before):
            body.add(part, key, piece)
        body.add(part, None, text)
        for key, piece in format.split(after):
            body.add(part, key, piece)

    body.add(Part.CONTENT, None, prefix)
    if message.reasoning:
        add(Part.REASONING, format.body["reasoning"], message.reasoning)
    body.add(Part.CONTENT, None, message.content)
    for number, call in enumerate(message.tool_calls):
        if message.content or number:
            body.add(Part.TOOL_CALL, None, "\n")
        add(Part.TOOL_CALL, format.body["tool_call"], call_text(call))
    body.add(Part.CONTENT, None, suffix)
    return body


def record_texts(record: Record) -> Iterator[str]:
    """Every text of a conversation that comes to be encoded, for training a tokenizer on."""
    yield from record.tools
    for message in record.messages:
        yield from filter(None, (message.reasoning, message.content, *map(call_text, message.tool_calls)))


def call_text(call: ToolCall) -> str:
    """A call as compact JSON, the keys of its arguments in the order in which they were given."""
    return f'{{"name":{msgspec.json.encode(call.name).decode()},"arguments":{call.arguments}}}'


def messages_of(record: Record, format: ChatFormat) -> Sequence[Message]:
    """The record's messages as they are written: with the format's system text and the tools, where there are any."""
    messages = record.messages
    if not messages:
        raise RecordError("the record has no messages", "give at least one", kind="empty").at(record.file, record.line)
    has_system = messages[0].role == "system"
    if not record.tools and (has_system or format.default_system is None):
        return messages
    system = messages[0] if has_system else Message(role="system", content=format.default_system or "")
    if record.tools:
        listed = format.body["tools"].replace("{}", "\n".join(record.tools), 1)
        content = f"{system.content}\n\n{listed}" if system.content else listed
        system = msgspec.structs.replace(system, content=content)
    return [system, *(messages[1:] if has_system else messages)]


def split_bodies(
    bodies: Iterable[Body],
    flat: Ids,
    text_start: Index,
    tokenizer: RenderTokenizer,
    control_start: Mapping[str, int],
) -> tuple[Index, Index, NDArray[np.uint8]]:
    """Start, length and part of every piece of these bodies, whose runs are the last of the encoded texts.

    Control tokens start at `control_start` behind the encoded ids. A run that the tokenizer normalizes has no exact
    borders: it becomes one piece of content, its other pieces are empty.
    """
    pieces = [(*piece, body.first_text) for body in bodies for piece in body.pieces]
    parts = np.array([piece[0] for piece in pieces], dtype=np.uint8)
    is_text = np.array([piece[1] is None for piece in pieces], dtype=bool)
    starts = np.array([len(flat) + control_start[piece[1]] if piece[1] else 0 for piece in pieces], dtype=np.int64)
    lengths = np.ones(len(pieces), dtype=np.int64)

    run = np.array([piece[4] + piece[2] for piece in pieces], dtype=np.int64)[is_text]
    if not len(run):
        return starts, lengths, parts
    size = np.array([piece[3] for piece in pieces], dtype=np.int64)[is_text]
    run_start, run_stop = text_start[run], text_start[run + 1]
    run_size = np.bincount(run, weights=size)[run].astype(np.int64)
    end = np.cumsum(size)
    end -= (end - size)[np.searchsorted(run, run)]
    first_token = run_start[0]
    position, _, exact = token_positions(
        tokenizer.byte_lengths(flat[first_token:]),
        run_start - first_token,
        run_stop - first_token,
        size=run_size,
        offset=end,
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
