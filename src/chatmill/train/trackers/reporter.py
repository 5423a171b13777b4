"""Report a run to its trackers in the background. Errors of a tracker that has started do not end the run.

    run ── log, log_samples, … ──▶ queue ──▶ thread of a tracker ──▶ its client ──▶ files or a server

Each tracker runs in its own thread. Failed tracker calls are counted, and the first error is shown in one line. The run
waits for trackers only when they start and at the end, up to a time limit. A run does not start if the client or
the credentials of a tracker are missing, or if a setting is wrong.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Lock, Thread
from time import monotonic
from typing import Any

from chatmill.errors import ChatmillError, UsageError, one_line
from chatmill.store import files
from chatmill.train.trackers.interface import SampleAnswer, Status, TrackedRun, Tracker, numbers
from chatmill.train.trackers.mlflow_tracker import MlflowTracker
from chatmill.train.trackers.tensorboard_tracker import TensorBoardTracker
from chatmill.train.trackers.wandb_tracker import WandbTracker

TRACKERS: Mapping[str, Callable[[], Tracker]] = {
    # Trackers start in the order of this table. TensorBoard starts last, so that it writes no files if another tracker
    # raises an error.
    "mlflow": MlflowTracker,
    "wandb": WandbTracker,
    "tensorboard": TensorBoardTracker,
}
IDS = "trackers.json"
"""File in the run folder that stores the id of the run in each tracker."""
START_SECONDS = 30.0
"""Maximum time that a run waits for a tracker to start."""
FINISH_SECONDS: Mapping[Status, float] = {"finished": 60.0, "stopped": 10.0, "failed": 10.0}
"""Maximum time that a run waits for its trackers at the end. Stopped and failed runs may be killed soon, so they wait
for a shorter time.
"""
WAITING = 10_000
"""Maximum number of queued calls for a slow tracker; further calls are dropped and counted."""


def named_trackers(report_to: Sequence[str] | str) -> list[Tracker]:
    """Return the trackers in `report_to`; raise `UsageError` if the package of a tracker is not installed."""
    names = [report_to] if isinstance(report_to, str) else report_to
    for name in names:
        spec = find_spec(name)
        # A namespace package without an origin may be a folder in the working directory, such as the folder that
        # wandb writes.
        if spec is None or spec.origin is None:
            raise UsageError(f"report_to contains {name}, which is not installed; pip install 'chatmill[{name}]'")
    return [make() for name, make in TRACKERS.items() if name in names]


class Reporter:
    def __init__(self, trackers: Sequence[Tracker], run: TrackedRun) -> None:
        """Start all trackers; if one of them raises `UsageError`, end the trackers that have already started."""
        self._path = run.folder / IDS
        self._ids = read_ids(self._path)
        self._lock = Lock()
        self._keeps_ids = False
        self._workers: list[_Worker] = []
        names = [tracker.name for tracker in trackers]
        if twice := [name for name in names if names.count(name) > 1]:
            raise UsageError(f"two trackers are named {one_line(twice[0])}; expected different names")
        for tracker in trackers:
            worker = _Worker(tracker, replace(run, id=self._ids.get(tracker.name)), self._keep_id)
            self._workers.append(worker)
            if (refusal := worker.wait_for_start(START_SECONDS)) is not None:
                self.finish("failed")
                raise refusal

    def keep_ids(self) -> None:
        """Write the run id of each tracker to the run folder, which must exist; later trackers add their ids."""
        with self._lock:
            self._keeps_ids = True
            self._write_ids()

    def log(self, line: Mapping[str, Any]) -> None:
        if metrics := numbers(line):
            self._each(lambda tracker: tracker.log_metrics(line["step"], metrics))

    def log_samples(self, step: int, samples: Sequence[SampleAnswer]) -> None:
        self._each(lambda tracker: tracker.log_samples(step, samples))

    def log_artifact(self, path: Path) -> None:
        self._each(lambda tracker: tracker.log_artifact(path))

    def finish(self, status: Status) -> None:
        """End the tracker runs, and wait for the last reports up to a time limit."""
        for worker in self._workers:
            worker.finish(status)
        now = monotonic()
        for worker in self._workers:
            # Wait for a shorter time if a tracker has not started yet, because it may never start.
            seconds = FINISH_SECONDS[status if worker.has_started else "failed"]
            worker.join(now + seconds - monotonic())

    def take_notes(self) -> list[str]:
        """Return all messages since the previous call, for the main thread to print."""
        return [note for worker in self._workers for note in worker.take_notes()]

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for worker in self._workers:
            worker.call(call)

    def _keep_id(self, name: str, id: str) -> None:
        with self._lock:
            self._ids[name] = id
            if self._keeps_ids:
                self._write_ids()

    def _write_ids(self) -> None:
        if self._ids:
            files.write_file(self._path, (json.dumps(self._ids, indent=1) + "\n").encode(), overwrite=True)


def read_ids(path: Path) -> dict[str, str]:
    try:
        ids = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError):
        ids = None
    if not isinstance(ids, dict) or not all(isinstance(id, str) for id in ids.values()):
        raise UsageError(f"{path}: does not contain an id for each tracker; remove the file to start new tracker runs")
    return ids


class _Worker:
    """A tracker, and the thread that calls it."""

    def __init__(self, tracker: Tracker, run: TrackedRun, keep_id: Callable[[str, str], None]) -> None:
        self._tracker, self._run, self._keep_id = tracker, run, keep_id
        self._calls: SimpleQueue[Callable[[Tracker], None] | None] = SimpleQueue()
        self._ready = Event()
        self._refusal: ChatmillError | None = None
        self._notes: SimpleQueue[str] = SimpleQueue()
        self._made = self._failed = 0
        # Use a daemon thread, because a tracker that hangs must not keep the process from exiting.
        self._thread = Thread(target=self._work, name=f"chatmill-{tracker.name}", daemon=True)
        self._thread.start()

    def wait_for_start(self, seconds: float) -> ChatmillError | None:
        """Wait until the tracker has started; return the error that stops the run, if any, otherwise None."""
        if not self._ready.wait(seconds):
            self._note(f"has not started after {seconds:g} seconds; the run continues")
        return self._refusal

    @property
    def has_started(self) -> bool:
        return self._ready.is_set()

    def call(self, call: Callable[[Tracker], None]) -> None:
        self._made += 1
        if self._calls.qsize() < WAITING:
            self._calls.put(call)
        else:
            self._fail(f"is slower than the run: {WAITING:,} reports are queued, and further reports are dropped")

    def finish(self, status: Status) -> None:
        self._made += 1
        self._calls.put(lambda tracker: tracker.finish(status))
        self._calls.put(None)

    def join(self, seconds: float) -> None:
        self._thread.join(max(seconds, 0.0))
        if self._thread.is_alive():
            # Count the failed calls, the queued calls and the current call. The last entry in the queue only ends the
            # thread.
            lost = min(self._made, self._failed + self._calls.qsize() - (not self.has_started))
            self._note(f"has not finished in time; up to {lost:,} of {self._made:,} reports are lost")
        elif self._failed > 1:
            self._note(f"{self._failed:,} of {self._made:,} reports failed")

    def take_notes(self) -> list[str]:
        return [self._notes.get() for _ in range(self._notes.qsize())]

    def _work(self) -> None:
        started = False
        try:
            id = self._tracker.start(self._run)
            started = True
            if id is not None:
                self._keep_id(self._tracker.name, id)
        except ChatmillError as error:
            self._refusal = error
        except Exception as error:
            self._note(f"{_reason(error)}; the run continues" + ("" if started else " without it"))
        finally:
            self._ready.set()
        while (call := self._calls.get()) is not None:
            try:
                if started:
                    call(self._tracker)
                else:
                    self._failed += 1
            except Exception as error:
                self._fail(f"{_reason(error)}; the run continues")

    def _fail(self, what: str) -> None:
        self._failed += 1
        if self._failed == 1:
            self._note(what)

    def _note(self, what: str) -> None:
        self._notes.put(f"{self._tracker.name}: {what}")


def _reason(error: Exception) -> str:
    """Format an error as one line, without passwords in URLs."""
    text = re.sub(r"://[^/@\s]+@", "://…@", str(error)) or type(error).__name__
    return one_line(" ".join(text.split()), 300)
