"""Engines: who runs the units. Each gives what the units leave, in the order of the units."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Protocol

from chatmill.errors import ChatmillError
from chatmill.prepare.job import Job
from chatmill.prepare.unit import Done, Tools, Unit, run_unit


class Engine(Protocol):
    def run(self, units: Sequence[Unit], job: Job, tools: Tools, folder: Path) -> Generator[Done, None, None]:
        """Run all units and give what each leaves, in their order; the first fault in that order is raised.

        When the generator is closed, nobody writes to the folder any more.
        """


class LocalEngine:
    """Processes on this machine. They are forked, so that the tokenizer is loaded once and shared."""

    def __init__(self, workers: int | None = None) -> None:
        self.workers = workers or len(os.sched_getaffinity(0))

    def run(self, units: Sequence[Unit], job: Job, tools: Tools, folder: Path) -> Generator[Done, None, None]:
        if self.workers == 1 or len(units) == 1:
            for unit in units:
                yield run_unit(unit, job, tools, folder)
            return
        # What is there before the fork is never collected, so its pages stay shared.
        gc.collect()
        gc.freeze()
        watched, held = os.pipe()
        try:
            with ProcessPoolExecutor(
                min(self.workers, len(units)),
                multiprocessing.get_context("fork"),
                initializer=_begin,
                initargs=(job, tools, folder, watched, held),
            ) as pool:
                try:
                    pending = deque(pool.submit(_run, unit) for unit in units)
                    while pending:
                        yield _result(pending.popleft())
                finally:
                    # Nobody waits for what is still being made.
                    os.close(held)
        finally:
            os.close(watched)
            gc.unfreeze()


def _result(future: Future[Done]) -> Done:
    try:
        return future.result()
    except BrokenProcessPool:
        raise ChatmillError(
            "a worker process was killed, perhaps for lack of memory; go on with --resume, or with fewer --workers"
        ) from None


# In a worker process.

_work: tuple[Job, Tools, Path] | None = None


def _begin(job: Job, tools: Tools, folder: Path, watched: int, held: int) -> None:
    """Come to life: the parent alone answers Ctrl-C, and when it lets go of its end of the pipe, or dies, we end."""
    global _work
    _work = (job, tools, folder)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.close(held)
    # Records and rows hold no cycles; looking for some while they are made costs a tenth of the time.
    gc.disable()
    threading.Thread(target=_end_with, args=(watched,), daemon=True).start()


def _end_with(watched: int) -> None:
    os.read(watched, 1)
    os._exit(1)


def _run(unit: Unit) -> Done:
    assert _work is not None
    try:
        return run_unit(unit, *_work)
    finally:
        gc.collect()
