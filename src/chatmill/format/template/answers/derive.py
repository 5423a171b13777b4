"""Find the answers in a rendered conversation with two methods, and reject the conversation if the results differ.

The methods `by_origin` and `by_prefix` share no code. Where both methods find the start or the end of an answer, the
positions must be equal.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Collection, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, get_args

from chatmill.errors import RecordError
from chatmill.format.template.answers.by_origin import (
    AnswerSpan,
    answers_by_origin,
    disputed,
    shown,
    shown_end,
)
from chatmill.format.template.answers.by_prefix import PrefixAnswer, answers_by_prefix, token_pattern
from chatmill.format.template.answers.contexts import Context, ContextFinder
from chatmill.format.template.answers.derived import DerivedAnswers, Note
from chatmill.format.template.answers.guards import guard_prefixes
from chatmill.format.template.answers.renderings import KeptRenderings, Renderings
from chatmill.format.template.control_tokens import ControlTokens
from chatmill.format.template.template import ChatTemplate
from chatmill.format.template.template_input import TemplateInput
from chatmill.format.template.tracing.trace import (
    OUTSIDE,
    FieldPath,
    Rendering,
    Trace,
    TracedPiece,
    common_length,
)
from chatmill.format.template.tracing.traced_str import TracedStr
from chatmill.records.record import Message, Record

if TYPE_CHECKING:
    from chatmill.format.renderer import Mask


def derive(
    record: Record,
    template: ChatTemplate,
    tokens: ControlTokens,
    *,
    ends: Collection[str],
    mask: Mask,
    cacheable: bool,
    last_only: bool = False,
    text_tokens: Collection[str] = (),
    eos: str | None = None,
    kept: KeptRenderings | None = None,
) -> DerivedAnswers:
    """Find the answers in a rendered conversation. Raise a `RecordError` if the answers cannot be determined.

    `ends` contains the tokens at which an inference server stops generating. `text_tokens` contains the added tokens
    that are also recognized in message text. With `cacheable`, the trace records guards, so that it can be replayed for
    other conversations. With `last_only`, only the last assistant message is an answer, unless generation tags mark the
    answers. `kept` may contain the renderings of a longer conversation that begins with the messages of `record`.
    """
    _check_complete(record)
    renderings = Renderings(record, template, kept)
    trace, render_text, render_traced = renderings.trace, renderings.text, renderings.traced
    count = len(record.messages)
    text, full = render_text(count, False), render_traced(count, False)
    if full.text != text:
        at = common_length(full.text, text)
        raise disputed(
            f"cannot determine the origin of the rendered text starting at character {at}: {shown(text[at:])}"
        )

    def prompt_ends(messages: int, end: str) -> bool:
        try:
            return render_text(messages, True).endswith(end)
        except RecordError:
            return False

    assistants = [number for number, message in enumerate(record.messages) if message.role == "assistant"]
    # If the prompt for an answer lacks a header, the usual assistant header is taken from the first of `prompts` that
    # has one.
    prompts = (*assistants, count)
    if last_only and mask == "derived":
        assistants = assistants[-1:]
    prefixes: list[PrefixAnswer] = []
    pattern = token_pattern(tokens.ids)
    finder: ContextFinder | None = None
    if mask == "tags":
        answers = answers_by_tags(full, assistants)
    else:
        # Trace every prompt if guards are needed; otherwise, skip prompts that end like an earlier prompt.
        skip = None if cacheable else prompt_ends
        answers = answers_by_origin(full, assistants, prompts, render_traced, tokens, ends, eos, skip)
        headers = template.headers(pattern)
        finder = ContextFinder(full, render_text, headers, token=pattern, text_tokens=text_tokens)
        answers = [_ended_by(eos, full, answer) for answer in answers]
        full, answers = _enter_fields(trace, full, answers, finder, pattern, text_tokens)
        prefixes = answers_by_prefix(text, assistants, prompts, render_text, tokens.ids, ends, eos)
        for answer, prefix in zip(answers, prefixes, strict=True):
            # Skip the comparison if a message quotes a control token, which `by_prefix` would mistake for a token of
            # the template.
            quotes = tokens.any_in(_texts_of(record.messages[answer.message]))
            _check_agreement(text, answer, prefix._replace(start=None, stop=None) if quotes else prefix)
        _check_inside(full, answers)
    notes = _check_written(record, renderings.given, full, assistants, answers)
    contexts: list[Context] = []
    if finder is not None:
        answers = _split_turns(full, answers, finder, tokens)
        contexts, differences = _contexts(answers, finder)
        notes += differences
    if cacheable and mask == "derived":
        guard_prefixes(trace, full, render_traced, assistants, prompts, pattern)
    steps = tuple(trace.steps) if cacheable and trace.cacheable else None
    return DerivedAnswers(full, tuple(answers), tuple(prefixes), tuple(contexts), steps, notes)


def _ended_by(eos: str | None, full: Rendering, answer: AnswerSpan) -> AnswerSpan:
    """Extend an answer without an end token to include EOS if the template outputs EOS after the answer."""
    following = full.text[answer.stop :]
    if answer.closed or not eos or not following.lstrip().startswith(eos):
        return answer
    stop = answer.stop + following.index(eos) + len(eos)
    begins = accumulate((len(piece.text) for piece in full.pieces), initial=0)
    written = all(
        piece.source is None for piece, at in zip(full.pieces, begins, strict=False) if answer.stop <= at < stop
    )
    return answer._replace(stop=stop, closed=True) if written else answer


def _enter_fields(
    trace: Trace,
    full: Rendering,
    answers: Sequence[AnswerSpan],
    finder: ContextFinder,
    token: re.Pattern[str],
    text_tokens: Collection[str],
) -> tuple[Rendering, list[AnswerSpan]]:
    """If the text of an answer starts with characters that its prompt already ends with, move the start of the answer
    after these characters.

    For example, a prompt may end with `<think>\\n`, and the content of the answer may start with `<think>\\n`. If the
    new start is inside a message field, the field is split there. A control token of the prompt can match message text
    only if it is in `text_tokens`.
    """
    pieces, entered = list(full.pieces), list(answers)
    for number, answer in enumerate(answers):
        prompt_only = finder.unmatched(answer.message, answer.start)
        written = next(
            (match.start() for match in token.finditer(prompt_only) if match[0] not in text_tokens), len(prompt_only)
        )
        common = _common_with_text(trace, pieces, answer, prompt_only[:written])
        # If the common prefix ends inside a control token, exclude this token.
        common = next(
            (match.start() for match in token.finditer(prompt_only) if match.start() < common < match.end()), common
        )
        if not common:
            continue
        entered[number] = answer._replace(start=answer.start + common)
        places = [*accumulate((len(piece.text) for piece in pieces), initial=0)]
        at = bisect_right(places, answer.start + common) - 1
        inside = answer.start + common - places[at]
        if at < len(pieces) and inside and pieces[at].source is not None:
            piece = pieces[at]
            slot = None if piece.slot is None else trace.value("sliced", (piece.slot,), inside, None)
            pieces[at : at + 1] = [
                piece.sliced(0, inside)._replace(slot=None),
                piece.sliced(inside, len(piece.text))._replace(slot=slot),
            ]
    return Rendering(tuple(pieces)), entered


def _common_with_text(trace: Trace, pieces: Sequence[TracedPiece], answer: AnswerSpan, prompt_only: str) -> int:
    """Return the length of the common prefix of `prompt_only` and the answer text; add guards to the trace that make
    this length valid for other conversations.
    """
    place = common = 0
    for piece in pieces:
        begins, place = place, place + len(piece.text)
        if place <= answer.start:
            continue
        if begins < answer.start:
            # Do not move the start of an answer that starts inside a piece, because only whole pieces are compared.
            break
        own = piece.source is not None and piece.source.message == answer.message
        if begins != answer.start + common:
            break
        if common == len(prompt_only) or (not own and (piece.source is not None or not common)):
            break
        size = common_length(piece.text, prompt_only[common:])
        if piece.slot is not None and size == len(piece.text):
            trace.guard("eq", (piece.slot,), piece.text, expected=True)
        elif piece.slot is not None:
            trace.guard("startswith", (piece.slot,), prompt_only[common : common + size], expected=True)
            if common + size < len(prompt_only):
                trace.guard("startswith", (piece.slot,), prompt_only[common : common + size + 1], expected=False)
        common += size
        if size < len(piece.text):
            break
    return common


def _split_turns(
    full: Rendering, answers: Sequence[AnswerSpan], finder: ContextFinder, tokens: ControlTokens
) -> list[AnswerSpan]:
    """Split each answer that the template renders as several turns, so that the headers between these turns are not
    trained on.

    For example, gpt-oss renders the reasoning and the content of one message as two turns, each with a header.
    """
    split: list[AnswerSpan] = []
    for answer in answers:
        start = answer.start
        while (header := finder.repeated_header(start, answer.stop)) is not None:
            matches = tokens.find(full.text[start : header[0]].rstrip())
            if not matches or start + matches[-1].end() != start + len(full.text[start : header[0]].rstrip()):
                what = f"message {answer.message} contains a header, {shown(full.text[header[0] : header[1]])}, after"
                what += f" {shown_end(full.text[start : header[0]])}, which does not end a turn"
                raise RecordError(what, "remove the record", kind="foreign_text")
            split.append(AnswerSpan(answer.message, start, start + matches[-1].end(), True))
            start = header[1]
        split.append(answer._replace(start=start))
    return split


def _contexts(answers: Sequence[AnswerSpan], finder: ContextFinder) -> tuple[list[Context], tuple[Note, ...]]:
    """Return the text that must precede each answer, and notes for the ledger on differences between the row and the
    prompts.
    """
    contexts: list[Context] = []
    notes: set[str] = set()
    messages: set[int] = set()
    for answer in answers:
        if answer.message in messages:
            contexts.append(finder.continued(answer.message, answer.start))
            notes.add("several_turns")
        else:
            context, differences = finder.context(answer.message, answer.start)
            contexts.append(context)
            notes.update(differences)
        messages.add(answer.message)
    return contexts, tuple(note for note in get_args(Note) if note in notes)


def answers_by_tags(full: Rendering, assistants: Collection[int]) -> list[AnswerSpan]:
    """Return the text between each pair of generation tags as an answer of the message that contains it."""
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


def _texts_of(message: Message) -> tuple[str, ...]:
    return (message.content, message.reasoning, *(call.arguments for call in message.tool_calls))


def _check_complete(record: Record) -> None:
    if not record.messages:
        raise RecordError("the record has no messages", "expected at least one message", kind="empty")
    for number, message in enumerate(record.messages):
        if not message.complete:
            what = f"message {number} is incomplete, but a chat template can render only complete messages"
            raise RecordError(what, "use another format, or remove the message", kind="unfinished")


def _check_agreement(text: str, answer: AnswerSpan, prefix: PrefixAnswer) -> None:
    """Raise `RecordError` if the two methods find different start or end positions for an answer."""
    for name, one, other in (("begins", answer.start, prefix.start), ("ends", answer.stop, prefix.stop)):
        if other is not None and one != other:
            low, high = sorted((one, other))
            what = f"the answer of message {answer.message} {name} before or after {shown(text[low:high])}"
            sides = ("before", "after") if one < other else ("after", "before")
            by = f"the origins of the characters indicate {sides[0]}, but the rendered prefixes indicate {sides[1]}"
            raise disputed(f"cannot determine whether {what}: {by}")
    if answer.start >= answer.stop:
        raise disputed(f"no part of message {answer.message} would be trained on", "expected an answer with text")


def _check_inside(full: Rendering, answers: Sequence[AnswerSpan]) -> None:
    """Raise `RecordError` if a message's content, reasoning or tool calls are rendered only outside its answer, for
    example after the tool result.
    """
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
        # A field of the answer may also be rendered outside the answer, for example the name of a tool before the tool
        # result.
        if source not in inside and source.path[0] in ("content", "reasoning", "tool_calls"):
            what = f"{source.path[0]} of message {source.message} is rendered outside its turn: {shown(text)}"
            raise disputed(what)


def _check_written(
    record: Record,
    traced: TemplateInput,
    full: Rendering,
    assistants: Collection[int],
    answers: Sequence[AnswerSpan],
) -> tuple[Note, ...]:
    """Raise `RecordError` if the template omits the content or a tool call of a message.

    Return notes for the ledger if the template omits reasoning or tool definitions.
    """
    paths = {piece.source for piece in full.pieces if piece.source is not None}
    written = {(at, path[0]) for at, path in paths}
    trained = {answer.message for answer in answers}
    for number, (message, given) in enumerate(zip(record.messages, traced.messages, strict=True)):
        lost = []
        content = given["content"][0]["text"] if isinstance(given["content"], list) else given["content"]
        assert isinstance(content, TracedStr)
        # The template may drop blank content; `observe` adds a guard that the content is blank.
        if (number, "content") not in written and not content.observe("is_blank"):
            lost.append("content")
        calls = {path[1] for at, path in paths if at == number and path[0] == "tool_calls"}
        missing = [at for at in range(len(message.tool_calls)) if at not in calls]
        if missing:
            lost.append("tool_calls" if not calls else f"tool call {missing[0]}")
        if lost:
            what = f"the template drops the {' and '.join(lost)} of message {number} ({message.role})"
            raise RecordError(what, "use a template that renders every field, or remove the record", kind="not_written")
        if number in assistants and number not in trained:
            what = f"no part of message {number} (assistant) is trained on"
            raise RecordError(
                what,
                "put generation tags around every answer in the template, or use --mask derived",
                kind="not_trained",
            )
    notes: list[Note] = []
    if any(record.messages[at].reasoning and (at, "reasoning") not in written for at in assistants):
        notes.append("reasoning_left_out")
    if record.tools and (OUTSIDE, "tools") not in written:
        notes.append("tools_left_out")
    return tuple(notes)
