"""Whether a text file of transcripts holds one record a line, or one stream: decided by the whole file.

Text is reduced to letters, a line at a time: S, U and A for the markers of spans, E for `<|END|>`, X for `<|EOS|>`, x
for text that is not blank, j for such text that begins as JSON does.

    <|USER|> hi <|END|> <|ASSISTANT|> yo <|END|>   ->   UxEAxE

Both readings walk over the lines, one that begins anew with each line and one that only `<|EOS|>` parts. Files have few
different lines in this form, so that each is walked over once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

_MARKS = {b"<|SYSTEM|>": "S", b"<|USER|>": "U", b"<|ASSISTANT|>": "A", b"<|END|>": "E", b"<|EOS|>": "X", b"\n": "\n"}
_MARK = rb"<\|(?:SYSTEM|USER|ASSISTANT|END|EOS)\|>"
_PIECE = re.compile(_MARK + rb"|\n|(?:[^<\n]++|<(?!" + _MARK[1:] + rb"))++")
_LONGEST = max(map(len, _MARKS))


@dataclass
class TranscriptLayout:
    """What the two readings of a file have found."""

    markers: bool = False
    """There is a marker at all."""
    json: bool = False
    """A line is JSON."""
    joins: bool = False
    """The stream has text of several lines in one conversation."""
    crosses: bool = False
    """A span that closes goes over the end of a line: as lines, both of its parts would be broken."""
    second_system: bool = False
    """Within a conversation of the stream a system span follows other spans, as if another record began there."""
    line_answers: bool = False
    """A line has an answer after its user span, so that lines would train something."""
    stream_answers: bool = False
    lines: int = 0
    """Records of one line each."""
    conversations: int = 0
    """Conversations of the stream."""

    @property
    def shape(self) -> str | None:
        """The shape of the file; None if both readings are possible, or none, and they have different records."""
        if not self.joins and not self.json:
            return "transcript-lines"
        as_lines = not self.crosses and (self.line_answers or self.json or not self.stream_answers)
        as_stream = not self.second_system and not self.json
        if as_lines == as_stream:
            return None
        return "transcript-lines" if as_lines else "transcript-stream"


def transcript_layout(chunks: Iterable[bytes]) -> TranscriptLayout:
    """Read a file, given in chunks of any size."""
    layout, stream, alone = TranscriptLayout(), StreamState(), StreamState()
    # Whether the line has had no text yet, and whether it is JSON.
    begins, is_json = True, False
    for letters in _line_parts(chunks):
        ends = letters[-1:] == "\n"
        if begins and letters not in ("", "\n"):
            begins = False
            is_json = letters[0] == "j" and not stream.span
            layout.joins |= stream.begun and letters[0] != "X"
            layout.json |= is_json
            layout.lines += is_json
        if not is_json:
            # In JSON markers are part of a string, and the stream would take it for text outside of spans.
            layout.markers |= any(mark in letters for mark in "SUAEX")
            of_line, of_stream = _walk(alone, letters), _walk(stream, letters)
            layout.line_answers |= of_line.answers
            layout.stream_answers |= of_stream.answers
            layout.crosses |= of_stream.crosses
            layout.second_system |= of_stream.second_system
            layout.lines += of_line.conversations
            layout.conversations += of_stream.conversations
            alone, stream = of_line.end, of_stream.end
        if ends:
            alone, begins, is_json = StreamState(), True, False
    return layout


class StreamState(NamedTuple):
    """Where a reading is in a conversation."""

    begun: bool = False
    """It has text since EOS."""
    spans: bool = False
    """It has a span since EOS."""
    span: str = ""
    """The span that is open."""
    over: bool = False
    """The open span began on an earlier line."""
    has_user: bool = False
    """The last user span is complete."""
    left_open: bool = False
    """An answer did not close."""


class _Walked(NamedTuple):
    end: StreamState
    answers: bool
    crosses: bool
    second_system: bool
    conversations: int
    """How many began."""


@lru_cache(maxsize=1 << 14)
def _walk(state: StreamState, letters: str) -> _Walked:
    """Read a part of a line from a state on."""
    begun, spans, span, over, has_user, left_open = state
    answers = crosses = second_system = False
    conversations = 0
    for letter in letters:
        if letter == "\n":
            over = bool(span)
            continue
        if letter == "X":
            begun, spans, span, over, has_user, left_open = StreamState()
            continue
        conversations += not begun
        begun = True
        if letter == "E":
            crosses |= over
            answers |= span == "A" and has_user and not left_open
            has_user |= span == "U"
            span, over = "", False
        elif letter in "SUA":
            second_system |= letter == "S" and spans
            left_open |= span == "A"
            has_user &= letter != "U"
            spans, span, over = True, letter, False
    end = StreamState(begun, spans, span, over, has_user, left_open)
    return _Walked(end, answers, crosses, second_system, conversations)


def _line_parts(chunks: Iterable[bytes]) -> Iterator[str]:
    """Lines as letters, with their ends; a line that goes over several chunks in several parts."""
    held = b""
    for chunk in chunks:
        data = held + chunk
        # A marker may straddle two chunks.
        cut = data.rfind(b"<", max(0, len(data) - _LONGEST + 1))
        cut = len(data) if cut < 0 else cut
        yield from _letters(data[:cut]).splitlines(keepends=True)
        held = data[cut:]
    yield from _letters(held).splitlines(keepends=True)


def _letters(data: bytes) -> str:
    return "".join(_MARKS.get(piece) or _text(piece) for piece in _PIECE.findall(data))


def _text(piece: bytes) -> str:
    piece = piece.lstrip()
    return "" if not piece else "j" if piece[:1] in (b'"', b"{") else "x"
