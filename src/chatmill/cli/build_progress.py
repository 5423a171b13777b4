"""Show build progress on standard error: bars in a terminal, plain lines in a log file."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Self

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from chatmill.cli.options import counted, progress_on_stderr
from chatmill.errors import one_line
from chatmill.prepare.progress import BuildProgress

LOG_SECONDS = 10.0
"""Minimum number of seconds between log lines; the last line of a source may follow sooner."""


@dataclass
class _Line:
    step: str
    name: str
    began: float
    task: TaskID | None = None
    written: float | None = None


class BuildProgressDisplay:
    """Shows the progress of a build: one line per source, with its rate and the time left.

    In a terminal, each line is a progress bar. In a log file, a plain line is written every ten seconds and at the end
    of each source. A build of a single source that takes less than ten seconds writes no lines.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._bar = _bar()
        self._clock = clock
        self._began = clock()
        self._current: _Line | None = None

    @property
    def is_empty(self) -> bool:
        return self._current is None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def show(self, now: BuildProgress) -> None:
        name, clock = now.source or now.step, self._clock()
        if self.is_empty:
            # Start the display only now: it runs a thread, and workers must be forked before any thread starts.
            self._bar.start()
        if self._current is None or (self._current.step, self._current.name) != (now.step, name):
            # Units are reported in order, so a source starts when the previous one ends.
            self._current = _Line(now.step, name, self._began)
        line, elapsed = self._current, clock - self._current.began
        if now.done >= now.total:
            self._began = clock
        if self._bar.disable:
            is_due = clock - (line.began if line.written is None else line.written) >= LOG_SECONDS
            is_end = now.done >= now.total and (bool(now.source) or line.written is not None)
            if is_due or is_end:
                line.written = clock
                sys.stderr.write(f"{one_line(name)}: {log_line(now, elapsed)}\n")
                sys.stderr.flush()
            return
        if line.task is None:
            line.task = self._bar.add_task(one_line(name), counts="", left="")
        left = seconds_left(now, elapsed)
        self._bar.update(
            line.task,
            completed=now.done,
            total=now.total,
            counts=counts(now, elapsed),
            left="" if left is None else f"{duration(left)} left",
        )


def log_line(now: BuildProgress, elapsed: float) -> str:
    if now.done >= now.total:
        return f"done, {counts(now, elapsed)} in {duration(elapsed)}"
    left = seconds_left(now, elapsed)
    return f"{100 * now.done // now.total}%, {counts(now, elapsed)}" + (
        "" if left is None else f", {duration(left)} left"
    )


def counts(now: BuildProgress, elapsed: float) -> str:
    """Format rows, tokens and tokens per second; the rate excludes resumed work.

    No rate is shown in the first second of a source: it would be too high, because workers start a source before the
    previous source is done.
    """
    rows = f"{counted(now.rows, 'row')}, {now.tokens:,} tokens"
    own = now.tokens * (now.done - now.resumed) / now.done if now.done else 0.0
    return rows if elapsed < 1 else f"{rows}, {own / elapsed / 1e6:.1f} Mtok/s"


def seconds_left(now: BuildProgress, elapsed: float) -> float | None:
    """Estimate the remaining seconds from the speed of this run; return None if this run has made no progress yet."""
    own = now.done - now.resumed
    return elapsed * (now.total - now.done) / own if own > 0 else None


def duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def _bar() -> Progress:
    return progress_on_stderr(
        TextColumn("{task.description:<7}", markup=False),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TextColumn("{task.fields[counts]}"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
    )
