"""The answers of one conversation: derived twice, and refused with the disputed text where the results differ.

One derivation uses the origin of the characters, the other the prefixes that a server would send. They share no code.
Where both tell something they must agree.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

from chatmill.errors import RecordError
from chatmill.format.renderer import Mask
from chatmill.format.template.answers.answer_spans import AnswerSpan, disputed, shown
from chatmill.format.template.answers.by_origin import answers_by_origin
from chatmill.format.template.answers.by_prefix import PrefixAnswer, answers_by_prefix, token_pattern
from chatmill.format.template.answers.guards import guard_prefixes
from chatmill.format.template.control_tokens import ControlTokens
from chatmill.format.template.template import ChatTemplate, TemplateInput, plain_input, traced_input
from chatmill.format.template.tracing.provenance import OUTSIDE, FieldPath
from chatmill.format.template.tracing.trace import Trace
from chatmill.format.template.tracing.traced_str import TracedStr
from chatmill.format.template.tracing.traced_template import Rendering
from chatmill.records import Record

T = TypeVar("T")


@dataclass(frozen=True)
class DerivedAnswers:
    """A traced rendering with its answers."""

    rendering: Rendering
    answers: tuple[AnswerSpan, ...]
    prefixes: tuple[PrefixAnswer, ...]
    """What prefixes tell about the answers; empty for generation tags."""
    trace: Trace
    notes: tuple[str, ...]
    """What the template leaves out though it may: reasoning, tools."""


def derive(
    record: Record,
    template: ChatTemplate,
    tokens: ControlTokens,
    *,
    texts: Sequence[str],
    ends: Collection[str],
    mask: Mask = "derived",
    cacheable: bool = False,
) -> DerivedAnswers:
    """The answers of a conversation; a `RecordError` says why they cannot be determined.

    `cacheable`: the trace is to be replayed on other conversations, so it gets guards for everything observed.
    """
    _check_complete(record)
    plain = plain_input(record, template.style)
    trace = Trace(texts)
    traced = traced_input(record, template.style, trace)
    render_text = _memoized(lambda messages, prompt: template.render(plain, messages, prompt=prompt))
    render_traced = _memoized(
        lambda messages, prompt: _without_empty(template.trace(traced, messages, prompt=prompt), trace)
    )
    count = len(record.messages)
    text, full = render_text(count, False), render_traced(count, False)
    if full.text != text:
        at = next((n for n, (a, b) in enumerate(zip(full.text, text, strict=False)) if a != b), 0)
        raise disputed(f"its text cannot be followed at character {at}, {shown(text[at:])}")

    def prompt_ends(messages: int, end: str) -> bool:
        try:
            return render_text(messages, True).endswith(end)
        except RecordError:
            return False

    assistants = [number for number, message in enumerate(record.messages) if message.role == "assistant"]
    prefixes: list[PrefixAnswer] = []
    if mask == "tags":
        answers = answers_by_tags(full, assistants)
    else:
        # The guards need the trace of every prompt; otherwise a prompt that is like another one is not traced.
        answers = answers_by_origin(full, assistants, render_traced, tokens, ends, None if cacheable else prompt_ends)
        prefixes = answers_by_prefix(text, assistants, render_text, tokens.ids, ends)
        for answer, prefix in zip(answers, prefixes, strict=True):
            _check_agreement(text, answer, prefix)
        _check_inside(full, answers)
    notes = _check_written(record, traced, full, answers)
    if cacheable and mask == "derived":
        guard_prefixes(trace, full, render_traced, assistants, token_pattern(tokens.ids))
    return DerivedAnswers(full, tuple(answers), tuple(prefixes), trace, notes)


def answers_by_tags(full: Rendering, assistants: Collection[int]) -> list[AnswerSpan]:
    """The stretches between generation tags, each as an answer of the message that it was written for."""
    answers: list[AnswerSpan] = []
    place = 0
    start: int | None = None
    message = OUTSIDE
    for piece in full.pieces:
        of = piece.source.message if piece.source is not None and piece.source.message in assistants else piece.owner
        changes = piece.owner != OUTSIDE and message not in (OUTSIDE, piece.owner)
        if start is not None and (not piece.tagged or changes):
            answers.append(AnswerSpan(message, start, place, False))
            start, message = None, OUTSIDE
        if piece.tagged:
            start = place if start is None else start
            message = of if message == OUTSIDE else message
        place += len(piece.text)
    if start is not None:
        answers.append(AnswerSpan(message, start, place, False))
    last = max(assistants, default=OUTSIDE)
    return [answer if answer.message in assistants else answer._replace(message=last) for answer in answers]


def _memoized(render: Callable[[int, bool], T]) -> Callable[[int, bool], T]:
    """`render`, with its results and errors kept."""
    known: dict[tuple[int, bool], T | RecordError] = {}

    def call(messages: int, prompt: bool) -> T:
        if (messages, prompt) not in known:
            try:
                known[messages, prompt] = render(messages, prompt)
            except RecordError as error:
                known[messages, prompt] = error
        result = known[messages, prompt]
        if isinstance(result, RecordError):
            raise result
        return result

    return call


def _without_empty(rendering: Rendering, trace: Trace) -> Rendering:
    """The rendering without empty pieces; a guard notes which slots are empty."""
    for piece in rendering.pieces:
        if piece.slot is not None:
            trace.guard(bool, (piece.slot,), expected=bool(piece.text))
    return Rendering(tuple(piece for piece in rendering.pieces if piece.text))


def _check_complete(record: Record) -> None:
    if not record.messages:
        raise RecordError("the record has no messages", "give at least one", kind="empty")
    for number, message in enumerate(record.messages):
        if not message.complete:
            what = f"message {number} never closes, which a template cannot write"
            raise RecordError(what, "use another format, or leave it out", kind="unfinished")


def _check_agreement(text: str, answer: AnswerSpan, prefix: PrefixAnswer) -> None:
    """Raise unless both derivations tell the same about one answer."""
    for name, one, other in (("begins", answer.start, prefix.start), ("ends", answer.stop, prefix.stop)):
        if other is not None and one != other:
            low, high = sorted((one, other))
            what = f"whether the answer of message {answer.message} {name} before or after {shown(text[low:high])} is"
            by = f"by origin {'before' if one < other else 'after'}, by prefix {'before' if other < one else 'after'}"
            raise disputed(f"{what} disputed: {by}")
    if answer.start >= answer.stop:
        raise disputed(f"nothing of message {answer.message} would be trained", "give the answer a text")


def _check_inside(full: Rendering, answers: Sequence[AnswerSpan]) -> None:
    """Raise if a template writes a part of an answer outside of it, as after the result of its tool call."""
    answer_of = {answer.message: answer for answer in answers}
    inside: set[FieldPath] = set()
    outside: dict[FieldPath, str] = {}
    place = 0
    for piece in full.pieces:
        answer = answer_of.get(piece.source.message) if piece.source is not None else None
        if piece.source is not None and answer is not None:
            if answer.start <= place < answer.stop:
                inside.add(piece.source)
            else:
                outside[piece.source] = piece.text
        place += len(piece.text)
    for source, text in outside.items():
        # A field that is repeated outside, like the name of a tool before its result, is not lost.
        if source not in inside and source.path[0] in ("content", "reasoning", "tool_calls"):
            what = f"{source.path[0]} of message {source.message} is written outside of its turn: {shown(text)}"
            raise disputed(what)


def _check_written(
    record: Record, traced: TemplateInput, full: Rendering, answers: Sequence[AnswerSpan]
) -> tuple[str, ...]:
    """Raise if a template leaves out a field of a message; reasoning and tools may be left out, which is noted."""
    written = {(piece.source.message, piece.source.path[0]) for piece in full.pieces if piece.source is not None}
    trained = {answer.message for answer in answers}
    for number, (message, given) in enumerate(zip(record.messages, traced.messages, strict=True)):
        lost = []
        content = given["content"][0]["text"] if isinstance(given["content"], list) else given["content"]
        assert isinstance(content, TracedStr)
        # A blank content may be left out; that it is blank is guarded.
        if (number, "content") not in written and not content.observe(is_blank):
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
    if record.tools and (OUTSIDE, "tools") not in written:
        notes.append("tools_left_out")
    return tuple(notes)


def is_blank(text: str) -> bool:
    return not text.strip()
