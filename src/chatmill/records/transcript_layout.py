"""Detect whether a transcript file has one conversation per line or is one stream of conversations.

Each line is reduced to letters: S, U and A for the span markers, E for `<|END|>`, X for `<|EOS|>`, x for text outside
spans, and j for JSON outside spans. The text inside a span is dropped, except for line breaks.

    <|USER|> hi <|END|> <|ASSISTANT|> yo <|END|>   ->   UEAE

The sequence of letters is parsed in two ways: with a new record on each line, and with a new record only after
`<|EOS|>`. Many lines have the same sequence of letters, so the results are cached.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from enum import IntFlag
from functools import lru_cache
from typing import NamedTuple

_MARKS = {b"<|SYSTEM|>": "S", b"<|USER|>": "U", b"<|ASSISTANT|>": "A", b"<|END|>": "E", b"<|EOS|>": "X"}
_MARK = re.compile(rb"(<\|(?:SYSTEM|USER|ASSISTANT|END|EOS)\|>)")
_LONGEST = max(map(len, _MARKS))


class TranscriptLayout(IntFlag):
    """Flags that describe a transcript file; they determine whether the file is read line by line or as a stream."""

    MARKERS = 1
    TEXT = 2
    JSON = 4
    """Set if a line is JSON, which a stream cannot contain."""
    JOINS = 8
    """Set if a conversation extends over several lines, so that reading line by line gives different records."""
    CROSSES = 16
    """Set if a span extends over several lines, so reading line by line would split the span."""
    SECOND_SYSTEM = 32
    """Set if a conversation of the stream has a system span after other spans, which suggests a new record."""
    LINE_ANSWERS = 64
    """Set if a line has an answer after a user span, so that the loss mask of the line is not empty."""
    STREAM_ANSWERS = 128

    @property
    def shape(self) -> str | None:
        """The record shape of the file: `transcript-lines`, `transcript-stream`, or None if the layout is ambiguous."""
        has, kind = self.__contains__, TranscriptLayout
        if not has(kind.JOINS) and not has(kind.JSON):
            return "transcript-lines"
        trains = has(kind.LINE_ANSWERS) or has(kind.JSON) or not has(kind.STREAM_ANSWERS)
        as_lines = trains and not has(kind.CROSSES)
        as_stream = not has(kind.SECOND_SYSTEM) and not has(kind.JSON)
        if as_lines == as_stream:
            return None
        return "transcript-lines" if as_lines else "transcript-stream"


def transcript_layout(chunks: Iterable[bytes]) -> TranscriptLayout:
    """Return the layout flags of a transcript file, whose content is given in chunks."""
    layout, state = 0, _Readings()
    for letters in _line_parts(chunks):
        state, seen = _read(state, letters)
        layout |= seen
    return TranscriptLayout(layout)


class _Conversation(NamedTuple):
    """Parser state within a conversation."""

    begun: bool = False
    """Whether there was text since the last EOS."""
    spans: bool = False
    """Whether there was a span since the last EOS."""
    span: str = ""
    """Role letter of the open span (S, U or A), or an empty string."""
    over: bool = False
    """Whether the open span started on an earlier line."""
    has_user: bool = False
    """Whether the last user span is complete."""
    left_open: bool = False
    """Whether an earlier answer has no end marker."""


class _Readings(NamedTuple):
    """The states of the stream parser and the line parser."""

    stream: _Conversation = _Conversation()
    line: _Conversation = _Conversation()
    begins: bool = True
    """Whether the part of the line parsed so far is empty."""
    is_json: bool = False


@lru_cache(maxsize=1 << 14)
def _read(state: _Readings, letters: str) -> tuple[_Readings, int]:
    """Parse all or part of a line with both parsers; return the new states and `TranscriptLayout` flags."""
    stream, line, begins, is_json = state
    text, seen = letters.rstrip("\n"), 0
    if begins and text:
        begins, is_json = False, text[0] == "j" and not stream.span
        seen |= TranscriptLayout.TEXT
        seen |= TranscriptLayout.JSON if is_json else 0
        seen |= TranscriptLayout.JOINS if stream.begun and text[0] != "X" else 0
    if not is_json:
        line, of_line = _walk(line, letters)
        stream, of_stream = _walk(stream, letters)
        seen |= of_stream | (TranscriptLayout.LINE_ANSWERS if of_line & TranscriptLayout.STREAM_ANSWERS else 0)
    if letters.endswith("\n"):
        line, begins, is_json = _Conversation(), True, False
    return _Readings(stream, line, begins, is_json), int(seen)


def _walk(state: _Conversation, letters: str) -> tuple[_Conversation, int]:
    """Continue to parse letters from a parser state; return the new state and flags. The answer flag is set only for
    answers that would be trained on.
    """
    begun, spans, span, over, has_user, left_open = state
    seen = 0
    for letter in letters:
        if letter == "\n":
            over = bool(span)
            continue
        if letter not in "xj":
            seen |= TranscriptLayout.MARKERS
        if letter == "X":
            begun, spans, span, over, has_user, left_open = _Conversation()
            continue
        begun = True
        if letter == "E":
            if over:
                seen |= TranscriptLayout.CROSSES
            if span == "A" and has_user and not left_open:
                seen |= TranscriptLayout.STREAM_ANSWERS
            has_user |= span == "U"
            span, over = "", False
        elif letter in "SUA":
            if letter == "S" and spans:
                seen |= TranscriptLayout.SECOND_SYSTEM
            left_open |= span == "A"
            has_user &= letter != "U"
            spans, span, over = True, letter, False
    return _Conversation(begun, spans, span, over, has_user, left_open), seen


def _line_parts(chunks: Iterable[bytes]) -> Iterator[str]:
    """Yield the letters and the line end of each line; a line that spans several chunks is yielded in parts."""
    held, in_span = b"", False
    for chunk in chunks:
        data = held + chunk
        # A marker may span two chunks.
        cut = data.rfind(b"<", max(0, len(data) - _LONGEST + 1))
        cut = len(data) if cut < 0 else cut
        letters, in_span = _letters(data[:cut], in_span=in_span)
        yield from letters.splitlines(keepends=True)
        held = data[cut:]
    letters, _ = _letters(held, in_span=in_span)
    yield from letters.splitlines(keepends=True)


def _letters(data: bytes, *, in_span: bool) -> tuple[str, bool]:
    """Reduce transcript text to letters; also return whether the text ends inside a span."""
    first, *pieces = _MARK.split(data)
    letters = [_text(first, in_span=in_span)]
    for mark, text in zip(pieces[::2], pieces[1::2], strict=True):
        letter = _MARKS[mark]
        in_span = letter in "SUA"
        letters.append(letter)
        if text:
            letters.append(_text(text, in_span=in_span))
    return "".join(letters), in_span


def _text(text: bytes, *, in_span: bool) -> str:
    if in_span:
        return "\n" if b"\n" in text else ""
    lines = (line.strip() for line in text.split(b"\n"))
    return "\n".join("" if not line else "j" if line[:1] in (b'"', b"{") else "x" for line in lines)
