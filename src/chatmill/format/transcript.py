"""Written: a conversation as text, markers and all, for tools that read transcripts instead of rows."""

from __future__ import annotations

from chatmill.errors import RecordError
from chatmill.format.body import body_of, messages_of
from chatmill.format.chat_format import ChatFormat
from chatmill.records import Record


def transcript_turns(record: Record, format: ChatFormat) -> list[str]:
    """Each turn as text, in the order of the row that rendering gives.

    Text that holds a marker of the format is a fault: written out, it could not be told from a turn.
    """
    turns = []
    for number, message in enumerate(messages_of(record, format)):
        turn = format.turns[message.role]
        body = body_of(message, format, "", "")
        for token in format.tokens.values():
            if any(token in run for run in body.runs):
                raise RecordError(
                    f"message {number} holds the marker {token} in its text",
                    "a transcript cannot quote its own markers; leave the record out",
                    kind="marker_in_text",
                ).at(record.file, record.line, record.id)
        turns.append(turn.open + body.written(format.tokens) + (turn.close if message.complete else ""))
    return turns
