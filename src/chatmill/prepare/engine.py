"""Engines run units and write shards in parallel, and yield the results in order."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
import warnings
from array import array
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from itertools import islice
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Protocol, TypeVar

from chatmill.errors import ChatmillError, name_file
from chatmill.format import Renderer
from chatmill.prepare.assemble import write_shard
from chatmill.prepare.fresh_process import run_in_fresh_process
from chatmill.prepare.job import Job
from chatmill.prepare.select import StagedFile
from chatmill.prepare.shard_plan import ShardPlan
from chatmill.prepare.unit import Done, Unit, first_blocks, run_unit
from chatmill.store.metadata import ShardInfo

T = TypeVar("T")
R = TypeVar("R")


class Engine(Protocol):
    def run(self, units: Sequence[Unit], job: Job, renderer: Renderer, folder: Path) -> Generator[Done, None, None]:
        """Run all units and yield their results in order; if units fail, raise the error of the first failed unit.

        Once the generator is closed, no worker writes to the folder.
        """


class LocalEngine:
    """Runs units on this machine, in `workers` forked processes that share one loaded tokenizer.

    Workers exit with this process, or when the other end of the pipe `parent` (a file descriptor) is closed. If a
    worker is killed, the error message ends with `if_killed`.
    """

    def __init__(
        self,
        workers: int | None = None,
        *,
        parent: int | None = None,
        if_killed: str = "continue with --resume and fewer --workers",
    ) -> None:
        self.workers = workers or len(os.sched_getaffinity(0))
        self.parent, self.if_killed = parent, if_killed

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

        processes = min(self.workers, len(units))
        renderer.warm_up(first_blocks(units), processes=processes)
        yield from self.in_order(work, units, processes=processes)

    @property
    def writes_shards(self) -> bool:
        """Whether to use `write_shards`, which forks and is safe only if no other thread is running."""
        return self.workers > 1 and threading.active_count() == 1

    def write_shards(
        self, plans: Iterable[ShardPlan], staging: Path, *, staged: Sequence[StagedFile], vocab_size: int
    ) -> Generator[ShardInfo, None, None]:
        """Write the shards of a dataset in parallel, and yield their counts and hashes in order. All plans refer to
        files in `staged`.
        """
        # Send indices instead of staged files, because pickling hundreds of files for each shard would take longer than
        # pickling the rest of the plan.
        number_of = {file: number for number, file in enumerate(staged)}

        def write(sent: tuple[ShardPlan, array[int]]) -> ShardInfo:
            plan = replace(sent[0], staged=tuple(staged[number] for number in sent[1]))
            return write_shard(plan, staging / plan.split, vocab_size=vocab_size)

        items = ((replace(plan, staged=()), array("L", map(number_of.__getitem__, plan.staged))) for plan in plans)
        yield from self.in_order(write, items, processes=self.workers, most=2 * self.workers)

    def in_order(
        self, work: Callable[[T], R], items: Iterable[T], *, processes: int, most: int | None = None
    ) -> Generator[R, None, None]:
        """Yield the results of `work` in the order of the items, with at most `most` items submitted at a time."""
        # Freeze objects created before the fork, so that garbage collection does not touch their shared pages.
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
                            # Python 3.12 warns if a process with threads forks, but the threads of OpenBLAS, tokenizers
                            # and fastokens are fork-safe.
                            warnings.filterwarnings("ignore", r"This process .* is multi-threaded", DeprecationWarning)
                            for item in islice(left, None if most is None else most - len(pending)):
                                pending.append(pool.submit(_run, item))
                        if not pending:
                            break
                        yield pending.popleft().result()
                except BrokenProcessPool:
                    what = "a worker process was killed, perhaps because memory ran out"
                    raise ChatmillError(f"{what}; {self.if_killed}") from None
                finally:
                    # Workers that are still running exit when this pipe is closed.
                    os.close(held)
        finally:
            os.close(ended)
            gc.unfreeze()


# Code that runs in worker processes.

_work: Callable[[Any], Any] | None = None


def _start_worker(work: Callable[[Any], Any], watched: list[int], held: int) -> None:
    """Initialize a worker process: ignore SIGINT, and exit when the other end of a watched pipe is closed."""
    global _work
    _work = work
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.close(held)
    # Disable garbage collection: it would take a tenth of the run time, and records and rows have no reference cycles.
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
        # Add the file name here, because it may occur only in the traceback, which is not sent to the main process.
        raise name_file(error) from None
    finally:
        gc.collect()
