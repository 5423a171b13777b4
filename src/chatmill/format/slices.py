"""Render a long list of records in slices, on several threads.

The compiled tokenizer and most of numpy release the GIL, so the slices run at the same time. The number of threads does
not change the slices, so it does not affect rows, counts or errors.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from chatmill.ledger import Ledger
from chatmill.records import ChatColumns, Record
from chatmill.rows import Rows, concat

SLICE = 1024
"""Number of records per slice."""
R = TypeVar("R", bound=Record)
Render = Callable[[Sequence[R], Ledger | None], Rows]


def render_slices(render: Render[R], records: Sequence[R], *, ledger: Ledger | None, threads: int | None) -> Rows:
    """Render records in order; `threads` is the number of threads, or None for one per usable core.

    If rendering fails, raise the error of the first slice that failed.
    """
    if len(records) <= SLICE or isinstance(records, ChatColumns):
        return render(records, ledger)

    def one(start: int) -> tuple[Rows, Ledger | None]:
        counts = None if ledger is None else Ledger()
        return render(records[start : start + SLICE], counts), counts

    starts = range(0, len(records), SLICE)
    threads = min(threads or len(os.sched_getaffinity(0)), len(starts))
    if threads == 1:
        done = list(map(one, starts))
    else:
        with ThreadPoolExecutor(threads, "chatmill-render") as pool:
            try:
                done = list(pool.map(one, starts))
            except BaseException:
                # After an error or Ctrl-C, do not start the remaining slices.
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    for _, counts in done:
        if ledger is not None and counts is not None:
            ledger.merge(counts)
    return concat([rows for rows, _ in done])
