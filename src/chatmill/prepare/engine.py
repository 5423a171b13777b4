"""Engines run units, and write shards, and yield the results in order."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Protocol, TypeVar

from chatmill.errors import ChatmillError, name_file
from chatmill.format import Renderer
from chatmill.prepare.assemble import write_shard
from chatmill.prepare.fresh_process import run_in_fresh_process
from chatmill.prepare.job import Job
from chatmill.prepare.shard_plan import ShardPlan
from chatmill.prepare.unit import Done, Unit, run_unit
from chatmill.store.metadata import ShardInfo

T = TypeVar("T")
R = TypeVar("R")


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

        def work(unit: Unit) -> Done:
            return run_unit(unit, job, renderer, folder)

        yield from self._in_order(work, units, processes=min(self.workers, len(units)))

    @property
    def writes_shards(self) -> bool:
        """Whether `write_shards` may be called: it forks, too."""
        return self.workers > 1 and threading.active_count() == 1

    def write_shards(
        self, plans: Iterable[ShardPlan], staging: Path, *, vocab_size: int
    ) -> Generator[ShardInfo, None, None]:
        """Write the shards of a dataset, several at a time, and yield what was written in their order."""

        def write(plan: ShardPlan) -> ShardInfo:
            return write_shard(plan, staging / plan.split, vocab_size=vocab_size)

        yield from self._in_order(write, plans, processes=self.workers, most=2 * self.workers)

    def _in_order(
        self, work: Callable[[T], R], items: Iterable[T], *, processes: int, most: int | None = None
    ) -> Generator[R, None, None]:
        """The results of `work` in the order of the items, of which `most` are taken ahead; all if it is None."""
        # Objects made before the fork are never collected, so their pages stay shared.
        gc.collect()
        gc.freeze()
        ended, held = os.pipe()
        watched = [ended] if self.parent is None else [ended, self.parent]
        left, pending = iter(items), deque[Future[R]]()
        try:
            with ProcessPoolExecutor(
                processes,
                multiprocessing.get_context("fork"),
                initializer=_start_worker,
                initargs=(work, watched, held),
            ) as pool:
                try:
                    while True:
                        with warnings.catch_warnings():
                            # Python 3.12 warns of any thread; those of OpenBLAS, tokenizers and fastokens expect forks.
                            warnings.filterwarnings("ignore", r"This process .* is multi-threaded", DeprecationWarning)
                            for item in islice(left, None if most is None else most - len(pending)):
                                pending.append(pool.submit(_run, item))
                        if not pending:
                            break
                        yield _result(pending.popleft())
                finally:
                    # Workers still running are not waited for.
                    os.close(held)
        finally:
            os.close(ended)
            gc.unfreeze()


def _result(future: Future[R]) -> R:
    try:
        return future.result()
    except BrokenProcessPool:
        raise ChatmillError(
            "a worker process was killed, perhaps for lack of memory; continue with --resume, or with fewer --workers"
        ) from None


# In a worker process.

_work: Callable[[Any], Any] | None = None


def _start_worker(work: Callable[[Any], Any], watched: list[int], held: int) -> None:
    """Set up a worker: it ignores Ctrl-C, and exits when the other end of a watched pipe is closed."""
    global _work
    _work = work
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.close(held)
    # Records and rows hold no reference cycles; collecting while they are made costs a tenth of the time.
    gc.disable()
    threading.Thread(target=_exit_with_parent, args=(watched,), daemon=True).start()


def _exit_with_parent(watched: list[int]) -> None:
    wait(watched)
    os._exit(1)


def _run(item: Any) -> Any:
    assert _work is not None
    try:
        return _work(item)
    except OSError as error:
        # Its traceback, which may tell the file, stays in this process.
        raise name_file(error) from None
    finally:
        gc.collect()
