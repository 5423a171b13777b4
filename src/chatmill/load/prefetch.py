"""Reading ahead: one thread makes what comes next while the caller works on what came last."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")
PATIENCE = 0.1
"""Seconds after which a waiting thread looks whether it is still wanted."""


class Prefetcher(Generic[T]):
    """An iterator over another one that a thread runs ahead of, at most `depth` values.

    An error of the other iterator is raised where its value would have come. The thread ends with `close`, or when
    nobody holds the iterator any more.
    """

    def __init__(self, values: Iterator[T], depth: int) -> None:
        self._line = _BoundedQueue[T](depth)
        self._ended = False
        thread = threading.Thread(target=_fill, args=(self._line, values), name="chatmill-ahead", daemon=True)
        self.close = weakref.finalize(self, _end, self._line, thread)
        """End the thread; calling it again does nothing."""
        thread.start()

    def __iter__(self) -> Prefetcher[T]:
        return self

    def __next__(self) -> T:
        if self._ended:
            raise StopIteration
        kind, value = self._line.queue.get()
        if kind == "value":
            return value  # type: ignore[return-value]
        self._ended = True
        if isinstance(value, BaseException):
            raise value
        raise StopIteration


class _BoundedQueue(Generic[T]):
    def __init__(self, depth: int) -> None:
        self.queue: queue.Queue[tuple[str, T | BaseException | None]] = queue.Queue(depth)
        self.stop = threading.Event()

    def put(self, kind: str, value: T | BaseException | None) -> bool:
        """Wait for room; False if nobody wants it any more."""
        while not self.stop.is_set():
            try:
                self.queue.put((kind, value), timeout=PATIENCE)
            except queue.Full:
                continue
            return True
        return False


def _end(line: _BoundedQueue[T], thread: threading.Thread) -> None:
    """Wait until the thread is done: one that still runs in torch when the interpreter ends aborts the process."""
    line.stop.set()
    if thread is not threading.current_thread():
        thread.join()


def _fill(line: _BoundedQueue[T], values: Iterator[T]) -> None:
    try:
        for value in values:
            if not line.put("value", value):
                return
        line.put("end", None)
    except BaseException as error:
        line.put("end", error)
