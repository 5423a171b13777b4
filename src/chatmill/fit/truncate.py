"""Truncation: rows that are too long are cut by a rule that is chosen by name.

    turns   whole exchanges go, oldest first; the system turn and the last answer stay

A rule is a plan over spans. It never looks at a token.
"""

from __future__ import annotations

import numpy as np

from chatmill.fit.plan import Plan
from chatmill.rows import Index, Part, Role, Rows


def turns(rows: Rows, capacity: int) -> Plan:
    """Cut every row to at most `capacity` tokens, by exchanges first.

        system | user asst | user asst | user asst | user        too long by a little
        system             | user asst | user asst | user        the oldest exchange goes
        system                         | user asst               then what follows the last answer
                                          er asst                then tokens from the very left

    An exchange is a user turn and all that follows it up to the next one. The one that holds the last
    assistant turn is never dropped, so the end of that turn is always there to be learned.
    """
    # One entry a turn: spans of one message that stand together.
    new_turn = np.ones(len(rows.spans), dtype=bool)
    new_turn[1:] = rows.spans["message"][1:] != rows.spans["message"][:-1]
    new_turn[rows.first_span[:-1][np.diff(rows.first_span) > 0]] = True
    first_span = np.flatnonzero(new_turn)
    start = rows.span_start[first_span]
    stop = np.append(start[1:], len(rows.ids))
    role = rows.spans["role"][first_span]
    row_of = np.searchsorted(rows.row_start, start, side="right") - 1
    row_start, row_stop = rows.row_start[:-1], rows.row_start[1:]

    # The head: what begins the conversation, and a system turn that comes first, with whatever stands before it.
    turn = np.arange(len(start))
    leading = _first(np.where(role == Role.NONE, len(start), turn), row_of, len(rows), len(start))
    is_system = np.append(role, Role.NONE)[leading] == Role.SYSTEM
    begin = (role == Role.NONE) & (rows.spans["part"][first_span] == Part.OPEN) & (start == row_start[row_of])
    begin_stop = np.maximum(_last(np.where(begin, stop, -1), row_of, len(rows)), row_start)
    head_stop = np.where(is_system, np.append(stop, 0)[leading], begin_stop)
    # The anchor: the last assistant turn, or the last turn of all where none is there.
    anchor = _last(np.where(role == Role.ASSISTANT, turn, -1), row_of, len(rows))
    anchor = np.where(anchor >= 0, anchor, _last(turn, row_of, len(rows)))
    anchor_start, anchor_stop = np.append(start, 0)[anchor], np.append(stop, 0)[anchor]

    # Oldest exchanges: the tail begins at the first exchange from which on all fits, at the latest the anchor's.
    exchange = (role == Role.USER) | (start == head_stop[row_of])
    exchange &= (start >= head_stop[row_of]) & (start <= anchor_start[row_of])
    need = row_stop - row_start - capacity
    fits = exchange & (start - head_stop[row_of] >= need[row_of])
    latest = _last(np.where(exchange, start, -1), row_of, len(rows))
    none = np.iinfo(np.int64).max
    earliest = _first(np.where(fits, start, none), row_of, len(rows), none)
    tail_start = np.where(latest < 0, head_stop, np.minimum(earliest, latest))
    # Turns after the anchor, the last one first.
    head = head_stop - row_start
    ends = (stop >= anchor_stop[row_of]) & (head[row_of] + stop - tail_start[row_of] <= capacity)
    tail_stop = np.maximum(_last(np.where(ends, stop, -1), row_of, len(rows)), anchor_stop)
    tail_stop = np.where(row_stop > row_start, tail_stop, row_stop)
    # Tokens from the very left.
    excess = np.maximum(head + tail_stop - tail_start - capacity, 0)
    head_start = row_start + np.minimum(excess, head)
    tail_start = tail_start + np.maximum(excess - head, 0)

    return _two_piece_plan(rows, head_start, head_stop, tail_start, tail_stop)


def _two_piece_plan(rows: Rows, head_start: Index, head_stop: Index, tail_start: Index, tail_stop: Index) -> Plan:
    """Each row, which must be one conversation, becomes [head_start, head_stop) + [tail_start, tail_stop)."""
    return Plan(
        np.column_stack([head_start, tail_start]).ravel(),
        np.column_stack([head_stop, tail_stop]).ravel(),
        np.arange(0, 2 * len(rows) + 1, 2, dtype=np.int64),
        rows.first_segment[:-1],
        np.arange(len(rows) + 1, dtype=np.int64),
    )


def _first(values: Index, row_of: Index, rows: int, default: int) -> Index:
    out = np.full(rows, default, dtype=np.int64)
    np.minimum.at(out, row_of, values)
    return out


def _last(values: Index, row_of: Index, rows: int) -> Index:
    out = np.full(rows, -1, dtype=np.int64)
    np.maximum.at(out, row_of, values)
    return out
