"""Compare the loss masks of chatmill and another library for the same records, and explain the differences.

    chatmill   <|im_start|> assistant \\n [Hi <|im_end|>] \\n
    peer       <|im_start|> assistant \\n [Hi <|im_end|> \\n]        after the end of an answer

The reason for a difference is determined from the span of the token in chatmill's row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from chatmill.records import Message, Record
from chatmill.rows import NO_MESSAGE, Ids, Part, Role, Rows, Rule, Table, mask_runs
from chatmill.show.text import TokenText

Mask = NDArray[np.bool_]


class Why(StrEnum):
    """The reason why only one of the two libraries writes a token or includes it in the loss mask."""

    CUT = "cut off by max_length"
    DROPPED = "a record that TRL drops because max_length leaves no trained tokens"
    CONTROL_TEXT = "text that looks like a control token: a control token in TRL, text in chatmill"
    REASONING_KEPT = "reasoning that the model's template leaves out and TRL's training template writes"
    TRAINING_TEMPLATE = "text that TRL's training template writes differently from the model's template"
    OTHER_IDS = "different tokens for an unknown reason"
    END = "the end of an answer, which TRL does not train on: the model does not learn to stop"
    ANSWER = "text of an answer outside the generation tags"
    CHARACTER = "the last bytes of the last character inside generation tags, which transformers leaves out of the mask"
    REASONING = "reasoning of an answer outside the generation tags"
    TOOL_CALL = "a tool call outside the generation tags"
    HEADER = "the header of an answer, which is part of the prompt"
    ACROSS = "a token that begins in the header of an answer and ends in its text"
    BETWEEN = "a header between the parts of one answer, such as the reasoning and the text of gpt-oss"
    AFTER = "tokens after the end of an answer, which the model never generates"
    LAST = "text after the last message, such as EOS"
    FIRST = "text that the template adds before the first message, such as BOS"
    SYSTEM = "system text"
    USER = "user text"
    TOOL = "tool results"
    TURN = "headers and end markers of system, user and tool turns"
    WEIGHT = "a message with its own train or weight key, which TRL does not read"
    RANGES = "train_ranges of a message, which TRL does not read"
    UNFINISHED = "an answer that is incomplete, or has no complete user turn before it"
    OTHER = "another rule of chatmill"


@dataclass(frozen=True)
class PeerRow:
    """The row that another library makes from a record."""

    ids: Ids
    trained: Mask
    kept: int
    """Number of leading tokens kept by `max_length`; 0 if the row is dropped."""


@dataclass(frozen=True)
class Counts:
    """Numbers of tokens in both loss masks, in one of them, or in neither. A token in both rows is counted once."""

    both: int = 0
    only_chatmill: int = 0
    only_peer: int = 0
    neither: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.both + other.both,
            self.only_chatmill + other.only_chatmill,
            self.only_peer + other.only_peer,
            self.neither + other.neither,
        )

    @property
    def total(self) -> int:
        return self.both + self.only_chatmill + self.only_peer + self.neither


@dataclass(frozen=True)
class TokenDifference:
    """Tokens [start, stop) of chatmill's row and [peer_start, peer_stop) of the other row, and why they differ."""

    why: Why
    start: int
    stop: int
    peer_start: int
    peer_stop: int
    counts: Counts


class Outcome(StrEnum):
    """The result of comparing the rows of the two libraries for one record."""

    EQUAL = "equal"
    MASK = "trained differently"
    CUT = "cut off by max_length"
    IDS = "with different tokens"
    DROPPED = "dropped by TRL"


@dataclass(frozen=True)
class RowComparison:
    """The outcome of comparing one record, with token counts and differences."""

    outcome: Outcome
    counts: Counts
    differences: tuple[TokenDifference, ...]
    weighted: int
    """Number of tokens that are in both loss masks but have a weight other than 1 in chatmill."""


@dataclass(frozen=True)
class Clues:
    """Information about a record that helps to explain differences and is not in its spans."""

    record: Record
    text: TokenText
    control_ids: frozenset[int]
    """Ids of tokens that chatmill never produces from message text."""
    patched: bool = False
    """Whether the other library renders with its own training template."""
    straddles: bool = False
    """Whether a token of the row crosses the boundary of an answer."""


def compare_row(row: Rows, peer: PeerRow, clues: Clues) -> RowComparison:
    """Compare one row with another library's row. The first token of a row counts as not trained, because it is never
    predicted.
    """
    ours, theirs = _never_first(row.mask()), _never_first(peer.trained)
    theirs[peer.kept :] = False
    counts, differences, weighted = Counts(), [], 0
    weights, same_ids = row.weights(), True
    for start, stop, peer_start, peer_stop, equal in aligned(row.ids, peer.ids):
        if equal:
            mine, its = ours[start:stop], theirs[peer_start:peer_stop]
            counts += Counts(*(int(chosen.sum()) for chosen in (mine & its, mine & ~its, its & ~mine, ~mine & ~its)))
            weighted += int((mine & its & (weights[start:stop] != 1)).sum())
            differences += list(_mask_differences(row, peer, start, peer_start, mine, its, clues))
            continue
        same_ids = False
        peer_stop = max(peer_start, min(peer_stop, peer.kept))
        mine, its = ours[start:stop], theirs[peer_start:peer_stop]
        other = Counts(0, int(mine.sum()), int(its.sum()), int((~mine).sum() + (~its).sum()))
        counts += other
        if other.total:
            why = _why_ids(row, peer, (start, stop), (peer_start, peer_stop), clues)
            differences.append(TokenDifference(why, start, stop, peer_start, peer_stop, other))
    if not peer.kept and len(peer.ids):
        outcome = Outcome.DROPPED
    elif not same_ids:
        outcome = Outcome.IDS
    elif peer.kept < len(peer.ids):
        outcome = Outcome.CUT
    else:
        outcome = Outcome.MASK if differences else Outcome.EQUAL
    return RowComparison(outcome, counts, tuple(differences), weighted)


def aligned(ours: Ids, theirs: Ids) -> Iterator[tuple[int, int, int, int, bool]]:
    """Align two rows, and yield blocks (start, stop, peer_start, peer_stop, whether the ids are equal)."""
    size = min(len(ours), len(theirs))
    head = _equal_length(ours[:size], theirs[:size])
    tail = _equal_length(ours[head:][::-1][: size - head], theirs[head:][::-1][: size - head])
    if head:
        yield 0, head, 0, head, True
    middle = ours[head : len(ours) - tail].tolist(), theirs[head : len(theirs) - tail].tolist()
    # By default, SequenceMatcher ignores ids that are frequent in a long row, which keeps its running time linear.
    for kind, start, stop, peer_start, peer_stop in SequenceMatcher(None, *middle).get_opcodes():
        yield start + head, stop + head, peer_start + head, peer_stop + head, kind == "equal"
    if tail:
        yield len(ours) - tail, len(ours), len(theirs) - tail, len(theirs), True


def _equal_length(ours: Ids, theirs: Ids) -> int:
    differs = ours != theirs
    return int(differs.argmax()) if differs.any() else len(ours)


def _never_first(trained: Mask) -> Mask:
    out = trained.copy()
    out[:1] = False
    return out


def _mask_differences(
    row: Rows, peer: PeerRow, start: int, peer_start: int, ours: Mask, theirs: Mask, clues: Clues
) -> Iterator[TokenDifference]:
    """Yield the differences between the loss masks of a block in which both rows have equal ids.

    A difference is a run of tokens within one span that only one mask includes, or all tokens that the other
    library truncates.
    """
    gone = np.arange(peer_start, peer_start + len(ours)) >= peer.kept
    differs = (ours != theirs) | gone
    if not differs.any():
        return
    edges = row.span_start[(row.span_start > start) & (row.span_start < start + len(ours))] - start
    if gone.any():
        # Do not split truncated tokens by span, because they all have the same reason.
        at = int(gone.argmax())
        edges = np.append(edges[edges < at], at)
    runs = mask_runs(differs, np.concatenate(([0], edges, [len(ours)])).astype(np.int64))
    for begin, end in zip(runs[:-1].tolist(), runs[1:].tolist(), strict=True):
        if not differs[begin]:
            continue
        mine, its = int(ours[begin:end].sum()), int(theirs[begin:end].sum())
        counts = Counts(0, mine, its, end - begin - mine - its)
        if gone[begin]:
            why = Why.CUT if peer.kept else Why.DROPPED
        else:
            first = int(np.searchsorted(row.span_start, start + begin, side="right")) - 1
            at_border = clues.straddles and end - begin == 1 and start + end == row.span_start[first + 1]
            why = why_mask(row.spans[first], across=at_border)
            if why in (Why.ANSWER, Why.REASONING, Why.TOOL_CALL):
                why = Why.CHARACTER if _continues(row.ids[start + begin : start + end], clues.text) else why
            elif why in (Why.HEADER, Why.AFTER) and _is_between(row.spans, first):
                why = Why.BETWEEN
        yield TokenDifference(why, start + begin, start + end, peer_start + begin, peer_start + end, counts)


def _continues(ids: Ids, text: TokenText) -> bool:
    """Return whether these tokens consist only of UTF-8 continuation bytes."""
    return all(0x80 <= byte < 0xC0 for id in ids.tolist() for byte in text.piece(id))


def _is_between(spans: Table, at: int) -> bool:
    """Return whether a span is between two parts of the same answer."""
    if not 0 < at < len(spans) - 1:
        return False
    sides = spans[[at - 1, at + 1]]
    return bool(np.all((sides["message"] == spans[at]["message"]) & (sides["rule"] == Rule.ROLE)))


def why_mask(span: np.void, *, across: bool = False) -> Why:
    """Return the reason why only one loss mask includes the tokens of this span."""
    role, part, rule = Role(span["role"]), Part(span["part"]), Rule(span["rule"])
    if rule in (Rule.FLAG, Rule.NOT_ANSWER):
        return Why.WEIGHT
    if rule == Rule.RANGE:
        return Why.RANGES
    if rule in (Rule.UNFINISHED, Rule.INCOMPLETE_USER):
        return Why.UNFINISHED
    if span["weight"] > 0:
        return {Part.CLOSE: Why.END, Part.REASONING: Why.REASONING, Part.TOOL_CALL: Why.TOOL_CALL}.get(part, Why.ANSWER)
    if rule == Rule.HEADER and role == Role.ASSISTANT:
        return Why.AFTER if part == Part.CLOSE else Why.ACROSS if across else Why.HEADER
    if rule == Rule.HEADER and role == Role.NONE:
        return Why.LAST if part == Part.EOS else Why.FIRST
    if rule == Rule.HEADER:
        return Why.TURN
    return {Role.SYSTEM: Why.SYSTEM, Role.USER: Why.USER, Role.TOOL: Why.TOOL}.get(role, Why.OTHER)


def _why_ids(row: Rows, peer: PeerRow, ours: tuple[int, int], theirs: tuple[int, int], clues: Clues) -> Why:
    """Return the reason why the token ids of the two rows differ in a range."""
    if theirs[0] >= peer.kept:
        return Why.CUT if peer.kept else Why.DROPPED
    first = max(0, int(np.searchsorted(row.span_start, ours[0], side="right")) - 1)
    spans = row.spans[first : int(np.searchsorted(row.span_start, max(ours[1], ours[0] + 1)))]
    its_ids = peer.ids[theirs[0] : theirs[1]].tolist()
    numbers = {int(number) for number in spans["message"] if number != NO_MESSAGE}
    messages = [clues.record.messages[number] for number in numbers if number < len(clues.record.messages)]
    is_text = ours[0] < ours[1] and bool(np.all(np.isin(spans["rule"], (Rule.ROLE, Rule.FLAG, Rule.RANGE))))
    if is_text:
        # Search the whole row, because the alignment may place the control token outside the differing range.
        control, texts = clues.control_ids.intersection(peer.ids.tolist()), [*map(_texts, messages)]
    else:
        control, texts = clues.control_ids.intersection(its_ids), [*clues.record.tools]
    tokens = [clues.text.text([id]) for id in control]
    if any(token in text for token in tokens for text in texts):
        return Why.CONTROL_TEXT
    if clues.patched:
        written = clues.text.text(its_ids, keep="\n\t").strip()
        if any(message.reasoning and message.reasoning.strip() in written for message in messages):
            return Why.REASONING_KEPT
        return Why.TRAINING_TEMPLATE
    return Why.OTHER_IDS


def _texts(message: Message) -> str:
    calls = [text for call in message.tool_calls for text in (call.name, call.arguments)]
    return "\n".join((message.content, message.reasoning, *calls))
