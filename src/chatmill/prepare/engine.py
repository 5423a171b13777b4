"""Engines run units and yield their results in the order of the units."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
import warnings
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from pathlib import Path
from typing import Protocol

from chatmill.errors import ChatmillError, name_file
from chatmill.format import Renderer
from chatmill.prepare.fresh_process import run_in_fresh_process
from chatmill.prepare.job import Job
from chatmill.prepare.unit import Done, Unit, run_unit


class Engine(Protocol):
    def run(self, units: Sequence[Unit], job: Job, renderer: Renderer, folder: Path) -> Generator[Done, None, None]:
        """Run all units and yield their results in order; the first fault in that order is raised.

        When the generator is closed, no worker writes to the folder any more.
        """


class LocalEngine:
    """Runs units in `workers` processes on this machine, forked so that the tokenizer is loaded once and shared.

    They end with this process, and when nothing can come any more from `parent`, the descriptor of a pipe.
    """

    def __init__(self, workers: int | None = None, *, parent: int | None = None) -> None:
        self.workers = workers or len(os.sched_getaffinity(0))
        self.parent = parent

    def run(self, units: Sequence[Unit], job: Job, renderer: Renderer, folder: Path) -> Generator[Done, None, None]:
        if self.workers == 1 or len(units) == 1:
            for unit in units:
                yield run_unit(unit, job, renderer, folder)
            return
        if threading.active_count() > 1 and self.parent is None:
            yield from run_in_fresh_process(units, job, renderer, folder, workers=self.workers)
            return
        # Objects made before the fork are never collected, so their pages stay shared.
        gc.collect()
        gc.freeze()
        ended, held = os.pipe()
        watched = [ended] if self.parent is None else [ended, self.parent]
        try:
            with ProcessPoolExecutor(
                min(self.workers, len(units)),
                multiprocessing.get_context("fork"),
                initializer=_start_worker,
                initargs=(job, renderer, folder, watched, held),
            ) as pool:
                try:
                    with warnings.catch_warnings():
                        # Python 3.12 warns of any thread; those of OpenBLAS, tokenizers and fastokens expect forks.
                        warnings.filterwarnings("ignore", r"This process .* is multi-threaded", DeprecationWarning)
                        pending = deque(pool.submit(_run, unit) for unit in units)
                    while pending:
                        yield _result(pending.popleft())
                finally:
                    # Workers still running are not waited for.
                    os.close(held)
        finally:
            os.close(ended)
            gc.unfreeze()


def _result(future: Future[Done]) -> Done:
    try:
        return future.result()
    except BrokenProcessPool:
        raise ChatmillError(
            "a worker process was killed, perhaps for lack of memory; continue with --resume, or with fewer --workers"
        ) from None


# In a worker process.

_work: tuple[Job, Renderer, Path] | None = None


def _start_worker(job: Job, renderer: Renderer, folder: Path, watched: list[int], held: int) -> None:
    """Set up a worker: it ignores Ctrl-C, and exits when the other end of a watched pipe is closed."""
    global _work
    _work = (job, renderer, folder)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.close(held)
    # Records and rows hold no reference cycles; collecting while they are made costs a tenth of the time.
    gc.disable()
    threading.Thread(target=_exit_with_parent, args=(watched,), daemon=True).start()


def _exit_with_parent(watched: list[int]) -> None:
    wait(watched)
    os._exit(1)


def _run(unit: Unit) -> Done:
    assert _work is not None
    try:
        return run_unit(unit, *_work)
    except OSError as error:
        # Its traceback, which may tell the file, stays in this process.
        raise name_file(error) from None
    finally:
        gc.collect()
