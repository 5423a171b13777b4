"""Ray: the units as tasks of a cluster, which runs them again where a worker is lost.

The staging folder must be on a file system that all nodes see under the same path.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from chatmill.errors import ChatmillError, UsageError
from chatmill.prepare.job import Job
from chatmill.prepare.unit import Done, Tools, Unit, make_tools, run_unit

RETRIES = 8
"""How often a unit is run again after its worker was lost; its own faults are never retried."""


class Ray:
    """A Ray cluster at `address`, or one of `workers` processes that is started here and stopped at the end."""

    def __init__(self, workers: int | None = None, address: str | None = None) -> None:
        self.workers = workers
        self.address = address

    def run(self, units: Sequence[Unit], job: Job, tools: Tools, folder: Path) -> Iterator[Done]:
        try:
            import ray
        except ImportError:
            raise UsageError("--engine ray needs ray: pip install 'chatmill[ray]'") from None
        started = not ray.is_initialized()
        if started:
            where: dict[str, Any] = {"address": self.address} if self.address else {"num_cpus": self.workers}
            ray.init(log_to_driver=False, include_dashboard=False, configure_logging=False, **where)
        try:
            # Less than a core each, or the tasks of a small cluster starve those that feed them.
            remote = ray.remote(num_cpus=0.9, max_retries=RETRIES, retry_exceptions=False)(_run)
            shared = ray.put((job, folder.absolute()))
            pending = [remote.remote(unit, shared) for unit in units]
            for task in pending:
                try:
                    yield ray.get(task)
                except ray.exceptions.RayTaskError as error:
                    raise error.cause if isinstance(error.cause, ChatmillError) else error from None
                except ray.exceptions.RayError as error:
                    raise ChatmillError(f"Ray lost a unit for good: {error}; go on with --resume") from None
        finally:
            if started:
                ray.shutdown()


_tools: dict[str, Tools] = {}
"""The tools of this worker process: a tokenizer takes a second to load and serves all of its units."""


def _run(unit: Unit, shared: tuple[Job, Path]) -> Done:
    job, folder = shared
    key = job.sha256()
    if key not in _tools:
        _tools.clear()
        _tools[key] = make_tools(job)
    return run_unit(unit, job, _tools[key], folder)
