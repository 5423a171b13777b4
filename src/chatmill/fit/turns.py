"""The turns and exchanges of rows, from the span table, for all rows at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from chatmill.rows import Index, Part, Role, Rows


@dataclass(frozen=True)
class TurnTable:
    """One entry for each turn (the consecutive spans of one message), and for each row what truncation always keeps.

    system | user asst | user asst asst | user
    head     exchange    exchange         exchange
                              anchor
    """

    start: Index
    stop: Index
    row: Index
    role: NDArray[np.uint8]
    begins_exchange: NDArray[np.bool_]
    """A user turn, or the first turn after the head, whatever its role."""
    head_stop: Index
    """By row, the end of BOS and of a leading system turn."""
    anchor: Index
    """By row, the last assistant turn, or the last turn if there is none; -1 for an empty row."""


def turns_of(rows: Rows) -> TurnTable:
    """The turns of every row."""
    new_turn = begins_segment(rows)
    new_turn[1:] |= rows.spans["message"][1:] != rows.spans["message"][:-1]
    first_span = np.flatnonzero(new_turn)
    start = rows.span_start[first_span]
    stop = np.append(start[1:], len(rows.ids))
    role = rows.spans["role"][first_span]
    row = np.searchsorted(rows.row_start, start, side="right") - 1
    row_start, count = rows.row_start[:-1], len(rows)

    number = np.arange(len(start))
    first_turn = first_of(np.where(role == Role.NONE, len(start), number), row, count, len(start))
    is_system = np.append(role, Role.NONE)[first_turn] == Role.SYSTEM
    begins = (role == Role.NONE) & (rows.spans["part"][first_span] == Part.OPEN) & (start == row_start[row])
    begin_stop = np.maximum(last_of(np.where(begins, stop, -1), row, count), row_start)
    head_stop = np.where(is_system, np.append(stop, 0)[first_turn], begin_stop)

    anchor = last_of(np.where(role == Role.ASSISTANT, number, -1), row, count)
    anchor = np.where(anchor >= 0, anchor, last_of(number, row, count))
    exchange = (role == Role.USER) | (start == head_stop[row])
    exchange &= start >= head_stop[row]
    return TurnTable(start, stop, row, role, exchange, head_stop, anchor)


def begins_segment(rows: Rows) -> NDArray[np.bool_]:
    """Whether each span is the first of its segment."""
    begins = np.zeros(len(rows.spans), dtype=bool)
    begins[rows.first_span[:-1][np.diff(rows.first_span) > 0]] = True
    return begins


def first_of(values: Index, row: Index, rows: int, default: int) -> Index:
    """The smallest value of each row."""
    out = np.full(rows, default, dtype=np.int64)
    np.minimum.at(out, row, values)
    return out


def last_of(values: Index, row: Index, rows: int) -> Index:
    """The largest value of each row, or -1."""
    out = np.full(rows, -1, dtype=np.int64)
    np.maximum.at(out, row, values)
    return out
