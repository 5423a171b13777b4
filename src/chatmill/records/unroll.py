"""Unroll a conversation into one row per answer; each row ends with its answer.

    user a1 user a2   ->   user a1
                           user a1 user a2        here a1 is only context

Some chat templates render earlier answers differently from the last one, for example without reasoning. Each answer is
the last message of its row, so it is rendered exactly as the model must generate it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from chatmill.errors import RecordError
from chatmill.records.record import Message, Record
from chatmill.rows import Rule, TrainOn

MAX_ROWS = 1024
"""Maximum rows per conversation; the number of tokens grows quadratically with the number of rows."""


@dataclass(frozen=True)
class Unrolled:
    """A conversation unrolled into rows. A message is trained on only in the first row that contains it."""

    record: Record
    rows: Sequence[Record]
    """For each row, the messages up to and including its answer."""
    answers: Sequence[int]
    """For each row, the index of its answer, or -1 if the loss does not include a whole answer."""
    first_new: Sequence[int]
    """For each row, the first message that is not in an earlier row."""
    context_rules: Sequence[Rule]
    """For each message, the rule for its spans in rows where the message is context."""
    flagged_answers: int
    """Number of answers without a row, because they have weight 0 or are incomplete."""
    trailing: int
    """Number of messages after the end of the last row."""

    def first(self, count: int) -> Unrolled:
        """Return a copy that has only the first `count` rows."""
        return replace(self, rows=self.rows[:count], answers=self.answers[:count], first_new=self.first_new[:count])


def unroll_record(record: Record, train_on: TrainOn) -> Unrolled:
    """Return one row for each answer that `train_on` or the weight of the answer selects for training.

    If no answer is selected, the conversation remains one row.
    """
    messages = record.messages
    since = _first_selected(messages, train_on)
    numbered = list(enumerate(messages))
    answers = [at for at, message in numbered if message.role == "assistant"]
    with_row = [at for at in answers if _is_trained(messages[at], by_role=at >= since)]
    stops = [at + 1 for at in with_row]
    # -1 means that the loss includes only the `train_ranges` of the answer.
    trained = [at if at >= since or messages[at].weight is not None else -1 for at in with_row]
    # Add a row without an answer if no answer has a row, or if a message after the last row has a positive weight.
    if not stops or any(_is_trained(message, by_role=False) for message in messages[stops[-1] :]):
        stops.append(len(messages))
        trained.append(-1)
    if len(stops) > MAX_ROWS:
        what = f"the record has {len(stops):,} answers, too many to unroll"
        right = f"expected at most {MAX_ROWS:,}; split the conversation, or omit --unroll"
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
    """Return the message index i such that `train_on` selects exactly the answers at or after i."""
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
