"""Count how many turns at the start of a conversation fit in a model's context."""

from __future__ import annotations

import numpy as np

from chatmill.errors import DataError
from chatmill.fit.turns import by_row, turns_of
from chatmill.rows import Index, Part, Role, Rows


def turns_that_fit(rows: Rows, context_length: int) -> tuple[Index, Index]:
    """For each row, return how many turns and tokens at its start fit in the context, or 0 and 0 if no answer fits. The
    system turn is included in the number of turns.

        system user asst | user asst | user asst      each part must fit; the row ends before the first that does not

    The limit of `context_length` tokens applies to the system turn and the first exchange together, and to each later
    exchange separately. EOS at the end of a conversation is not counted.
    """
    if context_length < 1:
        raise DataError(f"context_length is {context_length}; expected at least 1")
    turn, count = turns_of(rows), len(rows)
    if not len(turn.start):
        return np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    of_turn = np.searchsorted(rows.span_start, turn.start)
    turn_tokens = np.add.reduceat(
        np.where(rows.spans["part"] == Part.EOS, 0, rows.spans["length"]).astype(np.int64), of_turn
    )

    first_turn = np.searchsorted(turn.start, rows.row_start)
    begins = turn.begins_exchange & (turn.start > turn.head_stop[turn.row])
    begins[first_turn[:-1][np.diff(first_turn) > 0]] = True
    part = np.flatnonzero(begins)
    end = len(turn.start)
    over = np.where(np.add.reduceat(turn_tokens, part) > context_length, part, end)
    stop = np.minimum(by_row(np.minimum, over, turn.row[part], count, end), first_turn[1:])
    answer = by_row(np.minimum, np.where(turn.role == Role.ASSISTANT, np.arange(end), end), turn.row, count, end)
    kept = answer < stop
    tokens = np.append(turn.start, len(rows.ids))[stop] - rows.row_start[:-1]
    return np.where(kept, stop - first_turn[:-1], 0), np.where(kept, tokens, 0)
