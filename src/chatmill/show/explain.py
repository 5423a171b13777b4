"""Explain in one sentence why a token is trained or is context, based on the rule of its span."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from chatmill.errors import UsageError, one_line
from chatmill.rows import Part, Role, Rule, TrainOn
from chatmill.show.dataset import DatasetView
from chatmill.show.row_view import SpanView, origin_of, part_name, span_views

ROLES = {
    Role.SYSTEM: "system messages",
    Role.USER: "user messages",
    Role.ASSISTANT: "assistant messages",
    Role.TOOL: "tool messages",
    Role.NONE: "text without a role",
}
PARTS = {
    Part.OPEN: "the header",
    Part.CONTENT: "the text",
    Part.REASONING: "the reasoning",
    Part.TOOL_CALL: "a tool call",
    Part.CLOSE: "the end-of-turn marker",
    Part.EOS: "the EOS token",
    Part.INJECTED: "an injected copy",
    Part.PAD: "padding",
    Part.PREFIX: "text that the model generated",
    Part.SLOT: "a coordinate that the model generated",
    Part.STRUCTURE: "the structure of an appended entry",
    Part.VALUE: "the text of an appended entry",
    Part.COORD: "a coordinate of an appended entry",
    Part.BRACE: "the brace that closes the answer",
}
REASONS = {
    Rule.HEADER: "the loss mask never includes {part} of a turn",
    Rule.GIVEN: "the dataset stores a loss mask without reasons",
    Rule.UNFINISHED: "the answer is incomplete in this row, or follows an unclosed answer",
    Rule.PAD: "the loss mask never includes padding",
    Rule.INCOMPLETE_USER: "no complete user turn precedes this answer in its row",
    Rule.INJECTED: "the token is a copy of a token in an earlier row, and only the original is trained",
    Rule.EARLIER_WINDOW: "the token is also in the previous row, and is trained there",
    Rule.PROMPT: "the token belongs to the prompt of a rollout",
    Rule.ROLLOUT: "text that the model generated is always context",
    Rule.MATCHED: "the token belongs to a matched object, and the true value is the target",
    Rule.MISSED: "the token was missing from the rollout and has been appended",
    Rule.VALUES_OFF: "texts of appended entries are excluded from training",
    Rule.SURPLUS: "all true objects have been found before this token, so the target closes the answer here",
    Rule.EARLIER_ROW: "the answer that contains this token has its own row, and is trained there",
    Rule.OUTSIDE: "the token is outside the turns of its transcript, and only answers are trained",
    Rule.WHITESPACE: "the token is whitespace between the turns of its transcript, and only answers are trained",
    Rule.NOT_ANSWER: "the message sets train or weight, but it is not an answer, and only answers are trained",
}


@dataclass(frozen=True)
class Explanation:
    """The properties of a token that `explain_token` reports. `text` and `target_text` are escaped; `file` and `source`
    are not.
    """

    split: str
    episode: int
    token: int
    id: int
    text: str
    target: int | None
    """The token id to predict, or None if the label is the token's own id."""
    target_text: str | None
    file: str | None
    line: int | None
    source: str | None
    segment: int
    position: int
    """The position of the token in its segment."""
    message: int | None
    role: str
    part: str
    name: str
    """The name of the part in the viewer."""
    weight: float
    rule: str
    reason: str
    sentence: str


def explain_token(view: DatasetView, split: str, episode: int, token: int) -> Explanation:
    """Explain one token of an episode: its part, its origin, and the reason for its loss weight."""
    row = view.row(split, episode)
    if not 0 <= token < len(row.ids):
        right = f"expected 0 to {len(row.ids) - 1:,}" if len(row.ids) else "the episode is empty"
        raise UsageError(f"{view.title}: no token {token} in episode {episode} of {split}; {right}")
    at = int(np.searchsorted(row.span_start, token, side="right")) - 1
    segment = int(np.searchsorted(row.first_span, at, side="right")) - 1
    (span,) = span_views(row, at, at + 1)
    origin = origin_of(row, segment)
    position = token - int(row.segment_start[segment])
    reason = reason_for(span, train_on=view.train_on(origin.file, origin.source))
    id, text = int(row.ids[token]), view.text.token(int(row.ids[token]))
    name = part_name(row, span, view.text)
    what = "part of the tool definitions" if name == "tool definitions" else PARTS[span.part]
    if span.rule in (Rule.OUTSIDE, Rule.WHITESPACE):
        what += " outside turns"
    elif span.message is not None:
        what += f" of {span.role.name.lower()} message {span.message}"
    where = "" if origin.file is None else f", from {one_line(origin.file, None)}:{origin.line}"
    trained = "is context"
    if span.weight > 0:
        trained = f"is trained with weight {span.weight:g}" if span.weight != 1 else "is trained"
        if span.target is not None:
            trained += f' as "{view.text.token(span.target)}" (id {span.target})'
    # The first token of a segment is never predicted, because the loss does not cross segment boundaries.
    never = "; however, no batch predicts the first token of a conversation"
    names = {name: value for name, value in span.to_json().items() if name not in ("start", "stop")}
    return Explanation(
        split=split,
        episode=episode,
        token=token,
        id=id,
        text=text,
        target_text=None if span.target is None else view.text.token(span.target),
        **origin._asdict(),
        segment=segment,
        position=position,
        **names,
        name=name,
        reason=reason,
        sentence=(
            f'Token {token} of {split} episode {episode}, "{text}" (id {id}), {what}{where}, {trained}: '
            f"{reason} (rule {names['rule']}){never if span.weight > 0 and not position else ''}."
        ),
    )


def reason_for(span: SpanView, *, train_on: TrainOn | None) -> str:
    """Return a clause that explains why a span has its weight."""
    if span.rule == Rule.FLAG:
        return f"the message has weight {span.weight:g}"
    if span.rule == Rule.RANGE:
        return f"the train_ranges of the message give these characters weight {span.weight:g}"
    if span.rule != Rule.ROLE:
        return REASONS[span.rule].format(part=PARTS[span.part])
    choice = "the train_on setting of the dataset" if train_on is None else f"train_on {train_on}"
    if train_on == "last" and span.role == Role.ASSISTANT:
        if span.weight > 0:
            return f"the token is in the last answer, which {choice} selects"
        return f"the token is not in the last answer, and {choice} selects only the last answer"
    if train_on == "last-exchange" and span.role == Role.ASSISTANT:
        if span.weight > 0:
            return f"no user message follows this answer, and {choice} selects answers after the last user message"
        return f"a user message follows this answer, and {choice} selects only answers after the last user message"
    return f"{choice} {'selects' if span.weight > 0 else 'does not select'} {ROLES[span.role]}"
