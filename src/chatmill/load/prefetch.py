"""Prefetch batches with a thread that runs an iterator ahead of its consumer."""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections.abc import Iterator
from itertools import chain
from time import perf_counter
from typing import Generic, TypeVar

from chatmill.load.batch_builder import BatchBuilder, ReadyBatch
from chatmill.load.plan import PlannedStep

T = TypeVar("T")
POLL_SECONDS = 0.1
"""Interval, in seconds, at which a waiting thread checks whether its queue was closed."""


class Prefetcher(Generic[T]):
    """Iterates over `values`, with a thread that reads at most `depth` values ahead.

    An exception raised by `values` is raised instead of the next value. The thread ends on `close`, or when the
    prefetcher is garbage-collected.
    """

    def __init__(self, values: Iterator[T], depth: int) -> None:
        self._queue: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(depth)
        self._ended = False
        closed = threading.Event()
        # The thread must not reference this object, or the object would never be garbage-collected.
        thread = threading.Thread(
            target=_fill, args=(self._queue, closed, values), name="chatmill-prefetch", daemon=True
        )
        self.close = weakref.finalize(self, _close, closed, thread)
        """Function that stops the thread; further calls have no effect."""
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
    """Stop the thread and wait for it, because a thread inside torch at interpreter exit would abort the process."""
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


class BatchStream:
    """Iterates over the batches of a plan; if the caller consumes batches more slowly than they are built, a thread
    prefetches them.
    """

    def __init__(self, builder: BatchBuilder, steps: Iterator[PlannedStep], ahead: int) -> None:
        self.plan = builder.plan
        # Remember the process, because threads do not survive a fork.
        self.process = os.getpid()
        self._threads: list[Prefetcher[list[ReadyBatch]]] = []
        self.batches = _prefetched(builder.chunks(steps), ahead, self._threads)

    def close(self) -> None:
        for thread in self._threads:
            thread.close()


def _prefetched(
    chunks: Iterator[list[ReadyBatch]], ahead: int, threads: list[Prefetcher[list[ReadyBatch]]]
) -> Iterator[ReadyBatch]:
    """Yield the batches of all chunks; if a prefetching thread is started, append it to `threads`."""
    build_time = consume_time = 0.0
    # A thread would only slow down a caller that consumes batches as fast as they are built.
    while not ahead or consume_time <= build_time:
        started = perf_counter()
        chunk = next(chunks, None)
        if chunk is None:
            return
        built = perf_counter()
        yield from chunk
        build_time, consume_time = built - started, perf_counter() - built
    threads.append(Prefetcher(chunks, ahead))
    yield from chain.from_iterable(threads[-1])
