"""Render rows for `--unroll`: one row per answer; the loss mask of a row includes only its answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from chatmill.errors import RecordError
from chatmill.format import Renderer
from chatmill.format.renderer import OnReject
from chatmill.ledger import Ledger
from chatmill.records import Record, Unrolled, unroll_record
from chatmill.rows import NO_MESSAGE, Index, Part, Role, Rows, Rule, TrainOn, offsets

NOT_WRITTEN = "reasoning_left_out"
"""Name of the ledger entry for reasoning that the template omits."""


def unrolled(
    records: Iterable[Record], renderer: Renderer, *, train_on: TrainOn, on_reject: OnReject, ledger: Ledger
) -> Iterator[Unrolled]:
    """Yield each record unrolled into one row per answer. A record is rejected if any of its rows is rejected."""
    for record in records:
        try:
            made = unroll_record(record, train_on)
            rows = [*renderer.renderable(made.rows[:-1], last_only=True)]
            # Only the last row may have no trained answer.
            rows += renderer.renderable(made.rows[-1:], last_only=made.answers[-1] >= 0)
            made = replace(made, rows=rows)
        except RecordError as fault:
            on_reject(fault)
            continue
        if made.flagged_answers:
            ledger.add("noted", "answer_without_row", rows=made.flagged_answers)
        if made.trailing:
            ledger.add("noted", "messages_after_last_answer", rows=1)
        yield made


def row_chunks(
    conversations: Iterable[Unrolled], size: int, *, limit: int | None = None
) -> Iterator[Sequence[Unrolled]]:
    """Yield conversations in chunks of at least `size` rows, except for the last chunk; stop after `limit` rows in
    total.
    """
    chunk: list[Unrolled] = []
    count, left = 0, limit
    for each in conversations:
        if left is not None and len(each.rows) >= left:
            chunk.append(each.first(left))
            break
        chunk.append(each)
        count += len(each.rows)
        left = None if left is None else left - len(each.rows)
        if count >= size:
            yield chunk
            chunk, count = [], 0
    if chunk:
        yield chunk


def render_unrolled(renderer: Renderer, batch: Sequence[Unrolled], ledger: Ledger) -> Rows:
    """Render all rows of the conversations, and add their rows and tokens to the ledger.

    The ledger counts tokens that are also in an earlier row as repeated, and all other tokens as rendered.
    """
    records = [row for each in batch for row in each.rows]
    notes = Ledger()
    rows = renderer.render(records, train_on="last", ledger=notes)
    answer = np.array([at for each in batch for at in each.answers], dtype=np.int64)
    first_new = np.array([at for each in batch for at in each.first_new], dtype=np.int64)
    repeated = _train_answers(rows, batch, answer, first_new)

    if notes.entries.pop(("noted", NOT_WRITTEN), None) and (lost := _without_reasoning(rows, records, answer)):
        notes.add("noted", NOT_WRITTEN, rows=lost)
    ledger.merge(notes)
    again = int(np.count_nonzero(first_new))
    trained = int(rows.spans["length"][rows.spans["weight"] > 0].sum())
    ledger.add("rendered", rows=len(rows) - again, tokens=len(rows.ids) - repeated, trained=trained)
    if again:
        ledger.add("repeated", "unroll", rows=again, tokens=repeated)
    return rows


def _train_answers(rows: Rows, batch: Sequence[Unrolled], answer: Index, first_new: Index) -> int:
    """Set weights and rules so that the loss mask of each row excludes messages of earlier rows; return the number of
    tokens that repeat earlier rows.
    """
    context_rules = np.array([rule for each in batch for rule in each.context_rules], dtype=np.uint8)
    first_message = offsets(np.array([len(each.context_rules) for each in batch]))[:-1]
    first_message = np.repeat(first_message, [len(each.rows) for each in batch])
    spans, spans_of_row = rows.spans, np.diff(rows.first_span)
    answer, first_new, first_message = (
        np.repeat(column, spans_of_row) for column in (answer, first_new, first_message)
    )
    # Tokens that belong to no message, such as BOS, precede the first message, so they get the message index -1.
    message = np.where(spans["message"] == NO_MESSAGE, -1, spans["message"].astype(np.int64))
    by_role = spans["rule"] == Rule.ROLE
    trained = (spans["role"] == Role.ASSISTANT) & (message == answer)
    weight = np.array([row.weight for each in batch for row in each.rows], dtype=np.float32)
    spans["weight"] = np.where(by_role, trained * np.repeat(weight, spans_of_row), spans["weight"])
    repeated = (first_new > 0) & (message < first_new)
    by_message = by_role | (spans["rule"] == Rule.FLAG) | (spans["rule"] == Rule.RANGE)
    # A template renderer does not record why an earlier answer is context, so use the rule stored with the
    # conversation.
    context = np.flatnonzero((message >= 0) & ((repeated & by_message) | (spans["rule"] == Rule.EARLIER_ROW)))
    spans["weight"][context] = 0
    spans["rule"][context] = context_rules[first_message[context] + message[context]]
    return int(spans["length"][repeated].sum())


def _without_reasoning(rows: Rows, records: Sequence[Record], answer: Index) -> int:
    """Return the number of rows whose answer has reasoning that the template omits."""
    row = np.repeat(np.arange(len(rows)), np.diff(rows.first_span))
    written = (rows.spans["part"] == Part.REASONING) & (rows.spans["message"] == answer[row])
    has = np.bincount(row[written], minlength=len(rows)) > 0
    thinks = [at >= 0 and bool(one.messages[at].reasoning) for one, at in zip(records, answer.tolist(), strict=True)]
    return int(np.count_nonzero(np.array(thinks) & ~has))
