"""Windows: a long conversation becomes several rows, and each of its tokens is trained in exactly one of them."""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise

import numpy as np

from chatmill.fit.turns import turns_of
from chatmill.rows import Index, Rows


def windows(rows: Rows, capacity: int) -> tuple[Index, Index, Index]:
    """Source row, and starts and stops of head, context and trained range, for every row that is made.

        system | user asst | user asst | user asst
        system | user asst                            trained: the first exchange
        system |      asst | user asst                trained: the second, with what fits of the first before it
        system                  r asst | user asst    trained: the third

    Whole exchanges go into a window as long as they fit. One that is longer than a window is cut: the first
    part fills its window, and every further one leaves half of it to the tokens before. A system turn that would
    take more than half of every window is not repeated.
    """
    turn = turns_of(rows)
    borders = [0, *turn.start[turn.begins_exchange].tolist()]
    source: list[int] = []
    ranges: list[tuple[int, int, int, int, int, int]] = []
    for row, ((start, stop), head) in enumerate(
        zip(pairwise(rows.row_start.tolist()), turn.head_stop.tolist(), strict=True)
    ):
        if stop - start <= capacity:
            source.append(row)
            ranges.append((start, start, start, start, start, stop))
            continue
        first_exchange = head
        if 2 * (head - start) > capacity:
            head = start
        room = capacity - (head - start)
        at = head
        for until in _cuts(head, stop, borders, room, first_exchange):
            source.append(row)
            ranges.append((start, head, max(head, until - room), at, at, until))
            at = until
    table = np.array(ranges, dtype=np.int64).reshape(-1, 3, 2)
    return np.array(source, dtype=np.int64), table[:, :, 0], table[:, :, 1]


def _cuts(at: int, stop: int, borders: list[int], room: int, first_exchange: int) -> list[int]:
    """Where each window's trained range ends, from `at` on, given where exchanges begin."""
    cuts = []
    whole = True
    while at < stop:
        reach = at + (room if whole else max(1, room // 2))
        border = stop if reach >= stop else borders[bisect_right(borders, reach) - 1]
        # A window that would end where the first exchange begins would hold no exchange at all.
        whole = border > max(at, first_exchange)
        at = border if whole else min(reach, stop)
        cuts.append(at)
    return cuts
