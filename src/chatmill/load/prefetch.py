"""Prefetching: a thread runs an iterator ahead of its consumer."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")
POLL_SECONDS = 0.1
"""How often a thread that waits for room checks whether it was closed."""


class Prefetcher(Generic[T]):
    """An iterator over `values` that a thread runs ahead of, by at most `depth` values.

    An exception of the other iterator is raised where its value would have come. The thread ends with `close`, or when
    the prefetcher is garbage-collected.
    """

    def __init__(self, values: Iterator[T], depth: int) -> None:
        self._queue: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(depth)
        self._ended = False
        closed = threading.Event()
        # The thread must not refer to this object, or it would never be collected.
        thread = threading.Thread(
            target=_fill, args=(self._queue, closed, values), name="chatmill-prefetch", daemon=True
        )
        self.close = weakref.finalize(self, _close, closed, thread)
        """End the thread; calling it again does nothing."""
        thread.start()

    def __iter__(self) -> Prefetcher[T]:
        return self

    def __next__(self) -> T:
        if self._ended:
            raise StopIteration
        value, error = self._queue.get()
        if error is not None:
            self._ended = True
            raise error
        return value  # type: ignore[return-value]


def _close(closed: threading.Event, thread: threading.Thread) -> None:
    """Wait until the thread is done: one that still runs in torch when the interpreter exits aborts the process."""
    closed.set()
    if thread is not threading.current_thread():
        thread.join()


def _fill(
    values_queue: queue.Queue[tuple[T | None, BaseException | None]], closed: threading.Event, values: Iterator[T]
) -> None:
    end: BaseException | None = None
    while not closed.is_set() and end is None:
        value = None
        try:
            value = next(values)
        except BaseException as error:
            end = error
        while not closed.is_set():
            try:
                values_queue.put((value, end), timeout=POLL_SECONDS)
                break
            except queue.Full:
                continue
