"""Reusable threads for requests: storage libraries create a client for each new thread, which is slow.

A forked child process starts its own request threads.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

THREADS = 8
"""Maximum number of concurrent requests per process."""

S = TypeVar("S")
T = TypeVar("T")
_tasks: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
_started = _waiting = 0
"""The number of started threads, and the number of unfinished tasks."""
_counting = threading.Lock()
_NAME = "chatmill-requests"


def submit(task: Callable[[], T]) -> Future[T]:
    """Run a task in a request thread.

    A task that a request thread submits runs immediately in that thread. If nested tasks were queued, all request
    threads could wait for queued tasks that no thread is free to run.
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
            # Use daemon threads, so that a hanging request does not keep the process from exiting.
            threading.Thread(target=_work, args=(_tasks,), name=_NAME, daemon=True).start()
    _tasks.put((task, future))
    return future


def in_threads(call: Callable[[S], T], values: Sequence[S], *, here: bool = False) -> list[T]:
    """Return `call(value)` for each value, in order. Calls run concurrently or, with `here`, in the current thread."""
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
    """Reset the state in a forked process, in which the threads do not exist and the lock may stay locked."""
    global _tasks, _started, _waiting, _counting
    _tasks, _started, _waiting, _counting = queue.SimpleQueue(), 0, 0, threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
