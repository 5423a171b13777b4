"""Ray: the units as tasks of a cluster, which runs them again where a worker is lost.

Input, tokenizer and target must be on a file system that all nodes see under the same paths.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

from chatmill.errors import ChatmillError, DataError, UsageError, one_line
from chatmill.prepare.job import Job
from chatmill.prepare.unit import Done, Tools, Unit, make_tools, run_unit

RETRIES = 8
"""How often a unit is run again after its worker was lost; its own faults are never retried."""
PATIENCE = 60
"""Seconds that tasks nobody waits for are given to end."""


class RayEngine:
    """A Ray cluster at `address`, or one of `workers` processes that is started here and stopped at the end."""

    def __init__(self, workers: int | None = None, address: str | None = None) -> None:
        self.workers = workers
        self.address = address

    def run(self, units: Sequence[Unit], job: Job, tools: Tools, folder: Path) -> Generator[Done, None, None]:
        ray = self._connect()
        try:
            # Less than a core each, or the tasks of a small cluster starve those that feed them.
            remote = ray.remote(num_cpus=0.9, max_retries=RETRIES, retry_exceptions=False)(_run)
            shared = ray.put((job, tools.tokenizer.sha256, folder.absolute(), Path.cwd()))
            pending = deque(remote.remote(unit, shared) for unit in units)
            try:
                while pending:
                    yield _result(ray, pending.popleft())
            finally:
                for task in pending:
                    ray.cancel(task, force=True)
                if pending:
                    ray.wait(list(pending), num_returns=len(pending), timeout=PATIENCE)
        finally:
            if self._started:
                ray.shutdown()

    def _connect(self) -> Any:
        try:
            import ray
        except ImportError:
            raise UsageError("--engine ray needs ray: pip install 'chatmill[ray]'") from None
        self._started = not ray.is_initialized()
        if self._started:
            # Not a cluster of somebody else that happens to run here, which Ray would join unasked.
            own = {"address": "local", "num_cpus": self.workers, "include_dashboard": False}
            where = {"address": self.address} if self.address else own
            try:
                _knock(self.address)
                ray.init(log_to_driver=False, configure_logging=False, **where)
            except (OSError, ValueError, RuntimeError) as error:
                what = f"no Ray cluster at {self.address}" if self.address else "Ray does not start"
                raise UsageError(f"{what} ({one_line(str(error), 200)}); start one with `ray start --head`") from None
        return ray


def _knock(address: str | None) -> None:
    """Raise `OSError` if nobody answers at HOST:PORT, for which Ray itself would wait many minutes."""
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=10).close()


def _result(ray: Any, task: Any) -> Done:
    try:
        done: Done = ray.get(task)
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        raise cause if isinstance(cause, ChatmillError | OSError) else error from None
    except ray.exceptions.RayError as error:
        raise ChatmillError(f"Ray lost a unit for good ({one_line(str(error), 200)}); go on with --resume") from None
    return done


# In a worker process.

_tools: dict[tuple[str, str], Tools] = {}
"""The tools of this worker process: a tokenizer takes a second to load and serves all of its units."""


def _run(unit: Unit, shared: tuple[Job, str, Path, Path]) -> Done:
    job, tokenizer, folder, here = shared
    # Names of files are as the user gave them, and so are the places in faults.
    os.chdir(here)
    key = (job.sha256(), tokenizer)
    if key not in _tools:
        tools = make_tools(job)
        if tools.tokenizer.sha256 != tokenizer:
            raise DataError(f"{job.tokenizer}: a Ray worker reads another tokenizer there; let all nodes see the same")
        _tools.clear()
        _tools[key] = tools
    return run_unit(unit, job, _tools[key], folder)
