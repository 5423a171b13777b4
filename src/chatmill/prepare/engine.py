"""Engines: who runs the units. Each gives what the units leave, in the order of the units."""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Protocol

from chatmill.errors import ChatmillError
from chatmill.prepare.job import Job
from chatmill.prepare.unit import Done, Tools, Unit, run_unit


class Engine(Protocol):
    def run(self, units: Sequence[Unit], job: Job, tools: Tools, folder: Path) -> Iterator[Done]:
        """Run all units and give what each leaves, in their order; the first fault in that order is raised."""


class Local:
    """Processes on this machine. They are forked, so that the tokenizer is loaded once and shared."""

    def __init__(self, workers: int | None = None) -> None:
        self.workers = workers or len(os.sched_getaffinity(0))

    def run(self, units: Sequence[Unit], job: Job, tools: Tools, folder: Path) -> Iterator[Done]:
        if self.workers == 1 or len(units) == 1:
            for unit in units:
                yield run_unit(unit, job, tools, folder)
            return
        global _work
        _work = (job, tools, folder)
        # What is there before the fork is never collected, so its pages stay shared.
        gc.collect()
        gc.freeze()
        try:
            pool = ProcessPoolExecutor(min(self.workers, len(units)), multiprocessing.get_context("fork"))
            with pool:
                pending = [pool.submit(_run, unit) for unit in units]
                try:
                    yield from _in_order(pending)
                finally:
                    for future in pending:
                        future.cancel()
        finally:
            gc.unfreeze()
            _work = None


_work: tuple[Job, Tools, Path] | None = None
"""What a forked process works on."""


def _run(unit: Unit) -> Done:
    assert _work is not None
    return run_unit(unit, *_work)


def _in_order(pending: Sequence[Future[Done]]) -> Iterator[Done]:
    for future in pending:
        try:
            yield future.result()
        except BrokenProcessPool:
            raise ChatmillError(
                "a worker process was killed, perhaps for lack of memory; go on with --resume, or with fewer --workers"
            ) from None
