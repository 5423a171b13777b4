"""Derivation: from one conversation to the mask of its rendering, proven, or refused with the text in dispute.

The answers are found twice, by the origin of the characters and by the prefixes a server would send. The two share
no code. Where both say something they must say the same.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from chatmill.errors import RecordError
from chatmill.format.renderer import Mask
from chatmill.format.template.answers.answer_spans import AnswerSpan, disputed, shown
from chatmill.format.template.answers.by_origin import answers_by_origin
from chatmill.format.template.answers.by_prefix import PrefixAnswer, answers_by_prefix, one_of
from chatmill.format.template.answers.tags import answers_by_tags
from chatmill.format.template.control_tokens import ControlTokens
from chatmill.format.template.messages import TemplateInput, plain_conversation, traced_conversation
from chatmill.format.template.template import ChatTemplate
from chatmill.format.template.tracing.guards import settle
from chatmill.format.template.tracing.provenance import FieldPath
from chatmill.format.template.tracing.trace import Trace
from chatmill.format.template.tracing.traced_str import TracedStr
from chatmill.format.template.tracing.traced_template import Rendering
from chatmill.records import Record


@dataclass(frozen=True)
class Derived:
    """A rendering with its answers, and what prefixes said of them."""

    rendering: Rendering
    turns: tuple[AnswerSpan, ...]
    prefixes: tuple[PrefixAnswer, ...]
    trace: Trace
    notes: tuple[str, ...]
    """What the template leaves out though it may: reasoning, tools."""


def derive(
    record: Record,
    writer: ChatTemplate,
    markers: ControlTokens,
    *,
    texts: Sequence[str],
    ends: Collection[str],
    mask: Mask = "derived",
    lasting: bool = False,
) -> Derived:
    """The answers of a conversation; a `RecordError` says why they cannot be known.

    `lasting`: the trace is to be good for other conversations, so everything that was asked is noted in it.
    """
    _check(record)
    plain = plain_conversation(record, writer.style)
    text = writer.write(plain)
    trace = Trace(texts)
    traced = traced_conversation(record, writer.style, trace)
    full = _visible(writer.trace(traced), trace)
    if full.text != text:
        at = next((n for n, (a, b) in enumerate(zip(full.text, text, strict=False)) if a != b), 0)
        raise disputed(f"its text cannot be followed at character {at}, {shown(text[at:])}")
    assistants = [number for number, message in enumerate(record.messages) if message.role == "assistant"]
    known: dict[tuple[int, bool], Rendering | RecordError] = {(len(record.messages), False): full}

    def tracing(messages: int, prompt: bool) -> Rendering:
        if (messages, prompt) not in known:
            try:
                known[messages, prompt] = _visible(writer.trace(traced, messages, prompt=prompt), trace)
            except RecordError as error:
                known[messages, prompt] = error
        found = known[messages, prompt]
        if isinstance(found, RecordError):
            raise found
        return found

    written: dict[tuple[int, bool], str] = {(len(record.messages), False): text}

    def writing(messages: int, prompt: bool) -> str:
        if (messages, prompt) not in written:
            written[messages, prompt] = writer.write(plain, messages, prompt=prompt)
        return written[messages, prompt]

    def prompt_ends(messages: int, end: str) -> bool:
        try:
            return writing(messages, True).endswith(end)
        except RecordError:
            return False

    prefixes: list[PrefixAnswer] = []
    if mask == "tags":
        turns = answers_by_tags(full, assistants)
    else:
        # To last, a trace must know of every prompt; otherwise one that is like another need not be traced.
        alike = None if lasting else prompt_ends
        turns = answers_by_origin(full, assistants, tracing, markers, ends, alike)
        prefixes = answers_by_prefix(text, assistants, writing, markers.ids, ends)
        for turn, prefix in zip(turns, prefixes, strict=True):
            _agree(text, turn, prefix)
        _check_whole(full, turns)
    notes = _check_written(record, traced, full, turns)
    if lasting and mask == "derived":
        settle(trace, full, tracing, assistants, one_of(markers.ids))
    return Derived(full, tuple(turns), tuple(prefixes), trace, notes)


def _visible(rendering: Rendering, trace: Trace) -> Rendering:
    """The rendering without its empty texts, which are nothing; that they are empty is asked."""
    kept = []
    for at, piece in enumerate(rendering.pieces):
        if piece.slot is not None:
            trace.asked(bool, (piece.slot,), answer=bool(piece.text))
        if piece.text:
            kept.append(at)
    pieces = tuple(rendering.pieces[at] for at in kept)
    return Rendering(pieces, tuple(rendering.owners[at] for at in kept), tuple(rendering.lines[at] for at in kept))


def _agree(text: str, turn: AnswerSpan, prefix: PrefixAnswer) -> None:
    """Raise unless both ways say the same of one answer."""
    for name, one, other in (("begins", turn.start, prefix.start), ("ends", turn.stop, prefix.stop)):
        if other is not None and one != other:
            low, high = sorted((one, other))
            what = f"whether the answer of message {turn.message} {name} before or after {shown(text[low:high])} is"
            by = f"by origin {'before' if one < other else 'after'}, by prefix {'before' if other < one else 'after'}"
            raise disputed(f"{what} disputed: {by}")
    if turn.start >= turn.stop:
        raise disputed(f"nothing of message {turn.message} would be trained", "give the answer a text")


def _check(record: Record) -> None:
    if not record.messages:
        raise RecordError("the record has no messages", "give at least one", kind="empty")
    for number, message in enumerate(record.messages):
        if not message.complete:
            what = f"message {number} never closes, which a template cannot write"
            raise RecordError(what, "use another format, or leave it out", kind="unfinished")


def _check_written(
    record: Record, traced: TemplateInput, full: Rendering, turns: Sequence[AnswerSpan]
) -> tuple[str, ...]:
    """Raise if a template leaves out what a message says; reasoning and tools may be left out, which is noted."""
    written = {(piece.source.message, piece.source.path[0]) for piece in full.pieces if piece.source is not None}
    trained = {turn.message for turn in turns}
    for number, (message, given) in enumerate(zip(record.messages, traced.messages, strict=True)):
        lost = []
        # A blank one may be left out; another conversation of this shape may say something there, so it is asked.
        if (number, "content") not in written and not _content(given).ask(is_blank):
            lost.append("content")
        if message.tool_calls and (number, "tool_calls") not in written:
            lost.append("tool_calls")
        if lost:
            what = f"the template leaves out the {' and '.join(lost)} of message {number} ({message.role})"
            raise RecordError(what, "use a template that writes it, or leave the record out", kind="not_written")
        if message.role == "assistant" and number not in trained:
            what = f"nothing of message {number} (assistant) is trained"
            raise RecordError(what, "put it between generation tags, or use --mask derived", kind="not_trained")
    notes = []
    if any(message.reasoning and (at, "reasoning") not in written for at, message in enumerate(record.messages)):
        notes.append("reasoning_left_out")
    if record.tools and (-1, "tools") not in written:
        notes.append("tools_left_out")
    return tuple(notes)


def _check_whole(full: Rendering, turns: Sequence[AnswerSpan]) -> None:
    """Raise if a template writes a part of an answer outside of it, as after the result of its tool call."""
    of = {turn.message: turn for turn in turns}
    inside: set[FieldPath] = set()
    outside: dict[FieldPath, str] = {}
    place = 0
    for piece in full.pieces:
        turn = of.get(piece.source.message) if piece.source is not None else None
        if piece.source is not None and turn is not None:
            if turn.start <= place < turn.stop:
                inside.add(piece.source)
            else:
                outside[piece.source] = piece.text
        place += len(piece.text)
    for source, text in outside.items():
        # What is told again, like the name of a tool before its result, is not lost.
        if source not in inside and source.path[0] in ("content", "reasoning", "tool_calls"):
            raise disputed(
                f"{source.path[0]} of message {source.message} is written outside of its turn: {shown(text)}"
            )


def _content(message: dict[str, Any]) -> TracedStr:
    content = message["content"][0]["text"] if isinstance(message["content"], list) else message["content"]
    assert isinstance(content, TracedStr)
    return content


def is_blank(text: str) -> bool:
    return not text.strip()
