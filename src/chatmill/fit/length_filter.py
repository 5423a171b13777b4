"""The length filter: keep of a conversation the exchanges that a model's context can hold, from the first on."""

from __future__ import annotations

import numpy as np

from chatmill.errors import DataError
from chatmill.fit.turns import first_of, turns_of
from chatmill.rows import Index, Part, Role, Rows


def turns_that_fit(rows: Rows, context_length: int) -> tuple[Index, Index]:
    """How many turns of each row may stay, the system turn included, and their tokens; 0 where no answer could.

        system user asst | user asst | user asst      each part must fit; the first that does not ends it

    The first exchange must fit together with the system turn, each later one by itself. What ends a
    conversation (EOS) takes no room.
    """
    if context_length < 1:
        raise DataError(f"a context of {context_length} tokens holds nothing; give at least 1")
    turn, count = turns_of(rows), len(rows)
    if not len(turn.start):
        return np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    of_turn = np.searchsorted(rows.span_start, turn.start)
    room = np.add.reduceat(np.where(rows.spans["part"] == Part.EOS, 0, rows.spans["length"]).astype(np.int64), of_turn)

    first_turn = np.searchsorted(turn.start, rows.row_start)
    begins = turn.begins_exchange & (turn.start > turn.head_stop[turn.row])
    begins[first_turn[:-1][np.diff(first_turn) > 0]] = True
    part = np.flatnonzero(begins)
    end = len(turn.start)
    over = np.where(np.add.reduceat(room, part) > context_length, part, end)
    stop = np.minimum(first_of(over, turn.row[part], count, end), first_turn[1:])
    answer = first_of(np.where(turn.role == Role.ASSISTANT, np.arange(end), end), turn.row, count, end)
    kept = answer < stop
    tokens = np.append(turn.start, len(rows.ids))[stop] - rows.row_start[:-1]
    return np.where(kept, stop - first_turn[:-1], 0), np.where(kept, tokens, 0)
