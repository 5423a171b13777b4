"""Why a token is trained, or is not: the rule that its span was given, in one sentence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from chatmill.errors import UsageError
from chatmill.rows import NO_FILE, NO_MESSAGE, OWN_ID, Part, Role, Rows, Rule, TrainOn
from chatmill.show.dataset import DatasetView
from chatmill.show.text import visible

SPEAKERS = {
    Role.SYSTEM: "the system message",
    Role.USER: "the user",
    Role.ASSISTANT: "the assistant",
    Role.TOOL: "a tool",
    Role.NONE: "nobody",
}
PARTS = {
    Part.OPEN: "the opener",
    Part.CONTENT: "the text",
    Part.REASONING: "the reasoning",
    Part.TOOL_CALL: "a tool call",
    Part.CLOSE: "the close",
    Part.EOS: "the end",
    Part.INJECTED: "an injected copy",
    Part.PAD: "padding",
    Part.PREFIX: "what the model wrote",
    Part.SLOT: "a coordinate that the model wrote",
    Part.STRUCTURE: "the structure of an appended entry",
    Part.VALUE: "the text of an appended entry",
    Part.COORD: "a coordinate of an appended entry",
    Part.BRACE: "the brace that closes the answer",
}
REASONS = {
    Rule.HEADER: "the format never trains {part} of a turn",
    Rule.GIVEN: "the mask came with the dataset and gives no reason",
    Rule.UNFINISHED: "the turn, or in a block an answer before it, does not close, and half an answer is not learned",
    Rule.PAD: "padding is never trained",
    Rule.INCOMPLETE_USER: "no complete user turn stands before this answer in its block",
    Rule.INJECTED: "it is a copy that begins a cut turn anew, and only the original is trained",
    Rule.EARLIER_WINDOW: "the row before holds it too, and what it teaches is taught there",
    Rule.PROMPT: "it is the prompt that a rollout answers",
    Rule.ROLLOUT: "what the model wrote itself is context, never a text to learn",
    Rule.MATCHED: "it belongs to an object that was matched, and the true value is the target",
    Rule.MISSED: "the rollout missed it, or should have ended so",
    Rule.VALUES_OFF: "texts of appended entries were not to be trained",
}


class TokenPlace(NamedTuple):
    """The segment, the span and the origin of one token of a row."""

    segment: int
    span: int
    file: str | None
    line: int | None
    source: str | None


@dataclass(frozen=True)
class Explanation:
    """All that is known of a token. `text` and `target_text` hold nothing that could act on a screen."""

    split: str
    episode: int
    token: int
    id: int
    text: str
    target: int | None
    """The id that it is trained as, if that is not its own."""
    target_text: str | None
    file: str | None
    line: int | None
    source: str | None
    segment: int
    position: int
    """Its place in the segment."""
    message: int | None
    role: str
    part: str
    weight: float
    rule: str
    reason: str
    sentence: str


def explain(shown: DatasetView, split: str, episode: int, token: int) -> Explanation:
    """Say of one token what it is and why it is trained, or is not."""
    row = shown.row(split, episode)
    if not 0 <= token < len(row.ids):
        right = f"it has 0 to {len(row.ids) - 1:,}" if len(row.ids) else "it has none"
        raise UsageError(f"{shown.path}: no token {token} in episode {episode} of {split}; {right}")
    place = place_of(row, token)
    span = row.spans[place.span]
    role, part, rule = Role(span["role"]), Part(span["part"]), Rule(span["rule"])
    weight, id = float(span["weight"]), int(row.ids[token])
    target = None if span["target"] == OWN_ID else int(span["target"])
    position = token - int(row.segment_start[place.segment])
    reason = reason_for(rule, weight=weight, role=role, part=part, train_on=shown.train_on(place.file))
    message = None if span["message"] == NO_MESSAGE else int(span["message"])
    said = f"{PARTS[part]} of {role.name.lower()} message {message}" if message is not None else PARTS[part]
    where = f", from {visible(place.file)}:{place.line}" if place.file is not None else ""
    if weight == 0:
        what = "is context"
    else:
        what = f"is trained with weight {weight:g}" if weight != 1 else "is trained"
    if weight > 0 and target is not None:
        what += f' as "{shown.text.token(target)}" (id {target})'
    # In a batch no loss crosses a border: the first token of a conversation is the target of nothing.
    never = "; yet no batch predicts it, as the first token of its conversation" if weight > 0 and not position else ""
    text = shown.text.token(id)
    return Explanation(
        split=split,
        episode=episode,
        token=token,
        id=id,
        text=text,
        target=target,
        target_text=None if target is None else shown.text.token(target),
        file=place.file,
        line=place.line,
        source=place.source,
        segment=place.segment,
        position=position,
        message=message,
        role=role.name.lower(),
        part=part.name.lower(),
        weight=weight,
        rule=rule.name.lower(),
        reason=reason,
        sentence=(
            f'Token {token} of {split} episode {episode}, "{text}" (id {id}), {said}{where}, {what}: '
            f"{reason} (rule {rule.name.lower()}){never}."
        ),
    )


def place_of(row: Rows, token: int) -> TokenPlace:
    """Where a token of a row stands."""
    span = int(np.searchsorted(row.span_start, token, side="right")) - 1
    segment = int(np.searchsorted(row.first_span, span, side="right")) - 1
    return TokenPlace(segment, span, *origin_of(row, segment))


def origin_of(row: Rows, segment: int) -> tuple[str | None, int | None, str | None]:
    """The file, line and source of a segment; None where nothing is known."""
    origin = row.origins[segment]
    if origin["file"] == NO_FILE or int(origin["file"]) >= len(row.files):
        return None, None, None
    file = row.files[origin["file"]]
    return file.path, int(origin["line"]), file.source


def reason_for(rule: Rule, *, weight: float, role: Role, part: Part, train_on: TrainOn | None) -> str:
    """Why a span has its weight, as a clause."""
    if rule == Rule.FLAG:
        return f"its message says so itself, with weight {weight:g}"
    if rule != Rule.ROLE:
        return REASONS[rule].format(part=PARTS[part])
    choice = "the dataset's choice of speakers" if train_on is None else f"train_on {train_on}"
    if weight > 0 and train_on == "last" and role == Role.ASSISTANT:
        return f"it is of the last answer, which {choice} trains"
    verb = "trains" if weight > 0 else "does not train"
    if train_on == "last" and role == Role.ASSISTANT:
        return f"a later answer is the last, and {choice} trains that one alone"
    return f"{SPEAKERS[role]} says it, and {choice} {verb} that"
