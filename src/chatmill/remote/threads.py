"""Threads for requests, kept: a library of fsspec makes a client for each thread, which is slow.

A forked process starts its own.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

THREADS = 8
"""Requests of this process that are under way at most."""

S = TypeVar("S")
T = TypeVar("T")
_tasks: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
_started = _waiting = 0
"""Threads, and tasks that are not done."""
_counting = threading.Lock()
_NAME = "chatmill-requests"


def submit(task: Callable[[], T]) -> Future[T]:
    """Run a task in one of the threads, which are started when they are first needed.

    A task that one of them submits is run at once: all of them could be waiting for such tasks.
    """
    global _started, _waiting
    future: Future[T] = Future()
    if threading.current_thread().name == _NAME:
        _run(task, future)
        return future
    with _counting:
        _waiting += 1
        if _started < min(THREADS, _waiting):
            _started += 1
            # Daemons: a request that hangs must not keep the process from ending.
            threading.Thread(target=_work, args=(_tasks,), name=_NAME, daemon=True).start()
    _tasks.put((task, future))
    return future


def in_threads(call: Callable[[S], T], values: Sequence[S], *, here: bool = False) -> list[T]:
    """The result of a call for each value, in order; several calls at a time, unless `here`, in this thread."""
    if here or len(values) < 2:
        return [call(value) for value in values]
    futures = [submit(lambda value=value: call(value)) for value in values]  # type: ignore[misc]
    try:
        return [future.result() for future in futures]
    finally:
        for future in futures:
            future.cancel()


def _work(tasks: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]]) -> None:
    global _waiting
    while True:
        _run(*tasks.get())
        with _counting:
            _waiting -= 1


def _run(task: Callable[[], Any], future: Future[Any]) -> None:
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(task())
        except BaseException as error:
            future.set_exception(error)


def _after_fork() -> None:
    """Threads do not survive a fork, and a lock may be held by one of them."""
    global _tasks, _started, _waiting, _counting
    _tasks, _started, _waiting, _counting = queue.SimpleQueue(), 0, 0, threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
