"""Conversations as text with their markers, for tools that read transcripts."""

from __future__ import annotations

from chatmill.errors import RecordError
from chatmill.format.body import body_of, messages_of, text_runs
from chatmill.format.chat_format import ChatFormat
from chatmill.records import Record


def transcript_turns(record: Record, format: ChatFormat) -> list[str]:
    """Each turn as text, in the order of the rendered row.

    Text that holds a marker of the format is an error: it could not be distinguished from a turn.
    """
    turns = []
    for number, message in enumerate(messages_of(record, format)):
        turn = format.turns[message.role]
        body = body_of(message, format, "", "")
        for token in format.tokens.values():
            if any(token in text for text in text_runs(body)):
                raise RecordError(
                    f"message {number} holds the marker {token} in its text",
                    "a transcript cannot quote its own markers; leave the record out",
                    kind="marker_in_text",
                ).at(record.file, record.line, record.id)
        text = "".join(piece.text for piece in body)
        turns.append(turn.open + text + (turn.close if message.complete else ""))
    return turns
