"""Select the answers to train on: complete answers that follow a complete user turn in the same row.

    U u E A a E U v E A b E      both answers
      u E A a E U v E A b E      only the second: the first user turn is incomplete
    U u E A a   U v E A b E      none: the first answer is not closed, which also excludes the answers after it

If the format sets `requires_user`, `TurnRenderer` masks answers that are incomplete or do not follow a complete user
turn. The commands `prepare` and `render` select the answers again after truncation, and `cut_blocks` selects the
answers in each block.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.ledger import Ledger
from chatmill.rows import Index, Part, Role, Rows, Rule, Table, joined

Flags = NDArray[np.bool_]
ALLOWED = 255
"""Value for a turn that no rule excludes from training."""
NOTED = {
    Rule.UNFINISHED: "answer_unfinished",
    Rule.INCOMPLETE_USER: "answer_incomplete_user",
    Rule.NOT_ANSWER: "not_an_answer",
    Rule.OUTSIDE: "text_outside_turns",
    Rule.WHITESPACE: "whitespace_between_turns",
}
"""Maps each rule to the name of the ledger entry that counts the tokens it excludes from training."""


class TurnStates(NamedTuple):
    """The turns in a set of rows, as arrays with one entry per turn. Consecutive tokens outside turns are treated as a
    turn without a role.
    """

    first: Index
    """Index of the first span of the turn."""
    start: Index
    stop: Index
    role: NDArray[np.uint8]
    """Role of the turn. A tool result is treated as a user turn; a turn without a marker has no role."""
    closed: Flags
    conversation: Index
    """Index of the first turn in the same conversation."""
    of_span: Index
    """Index of the turn that each span belongs to."""

    def latest(self, which: Flags) -> Index:
        """For each turn, return the index of the last turn that `which` selects, from the start of the conversation up
        to this turn, or -1 if there is none.
        """
        last = np.maximum.accumulate(np.where(which, np.arange(len(which)), -1))
        return np.where(last >= self.conversation, last, -1)


def turn_states(rows: Rows) -> TurnStates:
    spans, part = rows.spans, rows.spans["part"]
    begins = np.zeros(len(spans), dtype=bool)
    begins[rows.first_span[:-1][np.diff(rows.first_span) > 0]] = True
    new = begins | (part == Part.OPEN)
    new[1:] |= (spans["message"][1:] != spans["message"][:-1]) | (spans["role"][1:] != spans["role"][:-1])
    first = np.flatnonzero(new)
    last = np.append(first[1:], len(spans)) - 1
    role = np.where(part[first] == Part.OPEN, spans["role"][first], np.uint8(Role.NONE))
    role[role == Role.TOOL] = Role.USER
    conversation = np.maximum.accumulate(np.where(begins[first], np.arange(len(first)), 0))
    start, stop = rows.span_start[first], rows.span_start[last + 1]
    return TurnStates(first, start, stop, role, part[last] == Part.CLOSE, conversation, np.cumsum(new) - 1)


def answer_rules(rows: Rows, turns: TurnStates, start: Index, stop: Index) -> NDArray[np.uint8]:
    """For each turn, return the rule that excludes it from training, or ALLOWED for a complete answer after a complete
    user turn.

    `start` and `stop` are the token bounds of the row or block that contains each turn.
    """
    answer = turns.role == Role.ASSISTANT
    user, left_open = turns.latest(turns.role == Role.USER), turns.latest(answer & ~turns.closed)
    whole = answer & turns.closed & (turns.start >= start) & (turns.stop <= stop) & ~_is_split(rows, turns)
    after_open = (left_open >= 0) & (turns.start[left_open] >= start)
    # A block that starts inside a user turn repeats the user marker, so only the end of the turn must be in the block.
    has_user = (user >= 0) & turns.closed[user] & (turns.stop[user] > start)
    rule = np.where(has_user, np.uint8(ALLOWED), np.uint8(Rule.INCOMPLETE_USER))
    rule[~whole | after_open] = Rule.UNFINISHED
    return rule


def _is_split(rows: Rows, turns: TurnStates) -> Flags:
    """For each turn, return whether only part of the turn was already in an earlier window of the conversation."""
    earlier = rows.spans["rule"] == Rule.EARLIER_WINDOW
    if not earlier.any():
        return np.zeros(len(turns.first), dtype=bool)
    split: Flags = np.logical_or.reduceat(earlier, turns.first) & ~np.logical_and.reduceat(earlier, turns.first)
    return split


def masked_spans(rows: Rows, turns: TurnStates, rule: NDArray[np.uint8]) -> Table:
    """Return a copy of the spans in which excluded answers have weight 0.

    User and system turns keep their weight only if `train_on` selects their role.
    """
    spans = joined([rows.spans])
    of_span, answer = rule[turns.of_span], spans["role"] == Role.ASSISTANT
    masked = answer & (of_span != ALLOWED)
    spans["rule"][masked] = of_span[masked]
    other = ~answer & (spans["weight"] > 0) & (spans["rule"] != Rule.ROLE)
    spans["rule"][other] = Rule.NOT_ANSWER
    spans["weight"][masked | other] = 0
    return spans


def mask_answers(rows: Rows) -> Rows:
    """Set the loss weight to 0 for answers that are incomplete or do not follow a complete user turn.

    >>> from chatmill import Message, Record, load_format, open_renderer
    >>> record = Record([Message("assistant", "a"), Message("user", "b"), Message("assistant", "c")])
    >>> rows = open_renderer("post-training", "bytes").render([record])
    >>> rows.mask().astype(int).tolist()
    [0, 0, 0, 0, 0, 0, 1, 1, 1, 0]
    """
    if not len(rows.spans):
        return rows
    turns = turn_states(rows)
    row = np.searchsorted(rows.row_start, turns.start, side="right") - 1
    rule = answer_rules(rows, turns, rows.row_start[row], rows.row_start[row + 1])
    return replace(rows, spans=masked_spans(rows, turns, rule))


def note_untrained(rows: Rows, ledger: Ledger) -> None:
    """Record in the ledger how many tokens each rule in `NOTED` excludes from training."""
    rule, length = rows.spans["rule"], rows.spans["length"]
    # Count the rules first, because comparing all spans with every rule would be slower.
    present = np.bincount(rule, minlength=256)
    for code, reason in NOTED.items():
        if not present[code]:
            continue
        chosen = rule == code
        if code in (Rule.UNFINISHED, Rule.INCOMPLETE_USER):
            chosen &= rows.spans["role"] == Role.ASSISTANT
        if np.any(chosen):
            ledger.add("noted", reason, tokens=int(length[chosen].sum()))
