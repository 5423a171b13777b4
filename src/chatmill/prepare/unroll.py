"""Rows of `--unroll`: one for each answer, in which that answer alone is trained."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from chatmill.errors import RecordError
from chatmill.format import Renderer
from chatmill.format.renderer import OnReject
from chatmill.ledger import Ledger
from chatmill.records import Record, Unrolled, unroll_record
from chatmill.rows import NO_MESSAGE, Index, Part, Role, Rows, Rule, TrainOn

NOT_WRITTEN = "reasoning_left_out"
"""The renderer's note of a row that lacks reasoning, which here only matters for the answer that the row trains."""


def unrolled(
    records: Iterable[Record], renderer: Renderer, *, train_on: TrainOn, on_reject: OnReject, ledger: Ledger
) -> Iterator[Unrolled]:
    """The records with their rows, ready to be rendered. If one row of a record is refused, the record is."""
    for record in records:
        try:
            made = unroll_record(record, train_on)
            made = replace(made, rows=list(renderer.renderable(made.rows)))
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
    """Conversations in chunks of at least `size` rows, but the last; `limit` rows in all, then no more are read."""
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
    """All rows of these conversations, counted as rendered and repeated.

    What the row before holds too, counts as repeated; all else once, as rendered.
    """
    records = [row for each in batch for row in each.rows]
    notes = Ledger()
    rows = renderer.render(records, ledger=notes)
    answer = np.array([at for each in batch for at in each.answers], dtype=np.int64)
    first_new = np.array([at for each in batch for at in each.first_new], dtype=np.int64)
    since = np.repeat([each.since for each in batch], [len(each.rows) for each in batch])
    repeated = _train_answers(rows, answer, first_new, since)

    if notes.entries.pop(("noted", NOT_WRITTEN), None) and (lost := _without_reasoning(rows, records, answer)):
        notes.add("noted", NOT_WRITTEN, rows=lost)
    ledger.merge(notes)
    again = int(np.count_nonzero(first_new))
    trained = int(rows.spans["length"][rows.spans["weight"] > 0].sum())
    ledger.add("rendered", rows=len(rows) - again, tokens=len(rows.ids) - repeated, trained=trained)
    if again:
        ledger.add("repeated", "unroll", rows=again, tokens=repeated)
    return rows


def _train_answers(rows: Rows, answer: Index, first_new: Index, since: Index) -> int:
    """Set weights and rules so that each row trains what is new in it; how many of its tokens rows before hold too."""
    spans, spans_of_row = rows.spans, np.diff(rows.first_span)
    answer, first_new, since = (np.repeat(column, spans_of_row) for column in (answer, first_new, since))
    # The beginning of a conversation, and a system text that the format adds, stand before the first message.
    message = np.where(spans["message"] == NO_MESSAGE, -1, spans["message"].astype(np.int64))
    by_role, by_flag = spans["rule"] == Rule.ROLE, spans["rule"] == Rule.FLAG
    of_assistant = by_role & (spans["role"] == Role.ASSISTANT)
    repeated = (first_new > 0) & (message < first_new)
    elsewhere = repeated & ((of_assistant & (message >= since)) | (by_flag & (spans["weight"] > 0)))
    spans["weight"] = np.where(by_role, of_assistant & (message == answer), np.where(elsewhere, 0, spans["weight"]))
    spans["rule"][elsewhere] = Rule.EARLIER_ROW
    return int(spans["length"][repeated].sum())


def _without_reasoning(rows: Rows, records: Sequence[Record], answer: Index) -> int:
    """Rows whose answer has reasoning that is not written."""
    row = np.repeat(np.arange(len(rows)), np.diff(rows.first_span))
    written = (rows.spans["part"] == Part.REASONING) & (rows.spans["message"] == answer[row])
    has = np.bincount(row[written], minlength=len(rows)) > 0
    thinks = [at >= 0 and bool(one.messages[at].reasoning) for one, at in zip(records, answer.tolist(), strict=True)]
    return int(np.count_nonzero(np.array(thinks) & ~has))
