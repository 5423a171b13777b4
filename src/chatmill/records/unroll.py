"""Unroll a conversation into one row per trained answer; each row is the prefix that ends with its answer.

    user a1 user a2   ->   user a1
                           user a1 user a2        here a1 is context: the row before trains it

A chat template may render an answer differently when more messages follow it, for example without its reasoning. As the
last message of a row, each answer is rendered as the model has to generate it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from chatmill.errors import RecordError
from chatmill.records.record import Message, Record
from chatmill.rows import Rule, TrainOn

MAX_ROWS = 1024
"""Maximum rows per conversation. All rows are in memory at once, and the number of tokens grows quadratically with the
number of rows.
"""


@dataclass(frozen=True)
class Unrolled:
    """A conversation unrolled into rows. Each trained message is trained only in the first row that contains it."""

    record: Record
    rows: Sequence[Record]
    """For each row, the messages up to and including its answer; shared with the record, not copied."""
    answers: Sequence[int]
    """For each row, the index of the answer that it trains and ends with, or -1 if it trains no whole answer."""
    first_new: Sequence[int]
    """For each row, the first message that is not in an earlier row."""
    context_rules: Sequence[Rule]
    """For each message, why it is context in rows that do not train it."""
    flagged_answers: int
    """Number of answers without a row, because their own weight is 0 or they are incomplete."""
    trailing: int
    """Number of messages after the end of the last row."""

    def first(self, count: int) -> Unrolled:
        """Return only the first `count` rows."""
        return replace(self, rows=self.rows[:count], answers=self.answers[:count], first_new=self.first_new[:count])


def unroll_record(record: Record, train_on: TrainOn) -> Unrolled:
    """Return the rows of a conversation, one per answer selected by `train_on` or by its own weight.

    A conversation without selected answers remains one row.
    """
    messages = record.messages
    since = _first_selected(messages, train_on)
    numbered = list(enumerate(messages))
    answers = [at for at, message in numbered if message.role == "assistant"]
    with_row = [at for at in answers if _is_trained(messages[at], by_role=at >= since)]
    stops = [at + 1 for at in with_row]
    # If only ranges of an answer are trained, its row gets -1, because it does not train the whole answer.
    trained = [at if at >= since or messages[at].weight is not None else -1 for at in with_row]
    # Keep a trailing message trained by its own weight, such as a user message, in a row without an answer.
    if not stops or any(_is_trained(message, by_role=False) for message in messages[stops[-1] :]):
        stops.append(len(messages))
        trained.append(-1)
    if len(stops) > MAX_ROWS:
        what = f"the record has {len(stops):,} answers, and the row of each would repeat all messages before it"
        right = f"at most {MAX_ROWS:,} can be unrolled; split the conversation, or leave out --unroll"
        raise RecordError(what, right, kind="too_many_answers").at(record.file, record.line, record.id)
    return Unrolled(
        record,
        [_prefix(record, stop) for stop in stops],
        trained,
        [0, *stops[:-1]],
        [_context_rule(message, by_role=message.role == "assistant" and at >= since) for at, message in numbered],
        sum((messages[at].weight == 0 and at not in with_row) or not messages[at].complete for at in answers),
        len(messages) - stops[-1],
    )


def _first_selected(messages: Sequence[Message], train_on: TrainOn) -> int:
    """Return an index such that `train_on` selects exactly the answers at or after it."""
    if train_on == "assistant":
        return 0
    last = "assistant" if train_on == "last" else "user"
    return max((at for at, message in enumerate(messages) if message.role == last), default=0)


def _is_trained(message: Message, *, by_role: bool) -> bool:
    by_itself = by_role if message.weight is None else message.weight > 0
    return message.complete and (by_itself or any(weight > 0 for _, _, weight in message.train_ranges))


def _context_rule(message: Message, *, by_role: bool) -> Rule:
    if _is_trained(message, by_role=by_role):
        return Rule.EARLIER_ROW
    return Rule.ROLE if message.weight is None else Rule.FLAG


def _prefix(record: Record, stop: int) -> Record:
    if stop == len(record.messages):
        return record
    return msgspec.structs.replace(record, messages=record.messages[:stop])
