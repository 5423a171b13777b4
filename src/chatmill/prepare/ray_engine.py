"""Run units as tasks of a Ray cluster, which retries those whose worker was lost.

Input, tokenizer and target must be on a file system that all nodes see under the same paths.
"""

from __future__ import annotations

import json
import os
import socket
from collections import deque
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

from chatmill.errors import ChatmillError, UsageError, one_line
from chatmill.format import Renderer
from chatmill.prepare.job import Job
from chatmill.prepare.unit import Done, Unit, renderer_identity, run_unit, same_renderer

RETRIES = 8
"""How often a unit is run again after its worker was lost; errors of the unit itself are never retried."""
PATIENCE = 600
"""Seconds that running tasks are given to end after a fault, so that nothing writes to the build any more."""
TASKS_PER_CPU = 4
"""Tasks that are submitted at a time; after a fault only these are waited for."""

LOOK_SECONDS = 1.0
"""How often it is checked that the cluster is there while its units are waited for."""
MISSED = 4
"""So many checks in a row must fail before the cluster is given up."""


class LostClusterError(ChatmillError):
    """The head of the cluster, or the raylet of this node, is gone."""


class RayEngine:
    """Runs units on the Ray cluster at `address`, or on a local one with `workers` CPUs, stopped at the end."""

    def __init__(self, workers: int | None = None, address: str | None = None) -> None:
        self.workers = workers
        self.address = address

    def run(self, units: Sequence[Unit], job: Job, renderer: Renderer, folder: Path) -> Generator[Done, None, None]:
        ray = self._connect()
        try:
            # Less than one CPU each, or the tasks of a small cluster starve the ones that feed them.
            remote = ray.remote(num_cpus=0.9, max_retries=RETRIES, retry_exceptions=False)(_run)
            shared = ray.put((job, renderer_identity(renderer), folder.absolute(), Path.cwd()))
            places, waiting = _places(ray), deque(units)
            # Once: a call of the head while it is lost may end this process.
            most = max(4, TASKS_PER_CPU * int(ray.cluster_resources().get("CPU", 1)))
            pending: deque[Any] = deque()
            try:
                while pending or waiting:
                    while waiting and len(pending) < most:
                        pending.append(remote.remote(waiting.popleft(), shared))
                    yield _result(ray, pending[0], places)
                    pending.popleft()
            except LostClusterError:
                # Nobody is there to end its tasks.
                pending.clear()
                raise
            finally:
                if pending and not self._started:
                    # Not cancelled: Ray may end this process if a task completes while it is being cancelled.
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
            # "local": Ray would otherwise join any cluster that happens to run on this machine.
            own = {"address": "local", "num_cpus": self.workers, "include_dashboard": False}
            where = {"address": self.address} if self.address else own
            try:
                _check_reachable(self.address)
                ray.init(log_to_driver=False, configure_logging=False, **where)
            except (OSError, ValueError, RuntimeError) as error:
                what = f"no Ray cluster at {self.address}" if self.address else "Ray does not start"
                raise UsageError(f"{what} ({one_line(str(error), 200)}); start one with `ray start --head`") from None
        return ray


def _check_reachable(address: str | None) -> None:
    """Raise `OSError` if nothing listens at HOST:PORT, for which Ray itself would wait many minutes."""
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=5).close()


def _places(ray: Any) -> list[str]:
    """HOST:PORT of the head of the cluster and of this node's raylet: without them Ray ends this process, or hangs."""
    if ray.util.client.ray.is_connected():
        # Connected through a server of the cluster, whose loss Ray reports by itself.
        return []
    context = ray.get_runtime_context()
    here = [node for node in ray.nodes() if node["NodeID"] == context.get_node_id()]
    return [context.gcs_address, *(f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}" for node in here)]


def _wait(ray: Any, task: Any, places: Sequence[str]) -> None:
    """Wait for a task; `LostClusterError` if a place cannot be reached several times in a row."""
    missed = 0
    while not ray.wait([task], timeout=LOOK_SECONDS)[0]:
        try:
            for place in places:
                _check_reachable(place)
            missed = 0
        except OSError as error:
            missed += 1
            if missed == MISSED:
                raise LostClusterError(
                    f"the Ray cluster is lost: {place} cannot be reached ({error.strerror or error}); "
                    "start it again and go on with --resume"
                ) from None


def _result(ray: Any, task: Any, places: Sequence[str]) -> Done:
    try:
        _wait(ray, task, places)
        done: Done = ray.get(task)
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        raise cause if isinstance(cause, ChatmillError | OSError) else error from None
    except ray.exceptions.RayError as error:
        raise ChatmillError(f"Ray lost a unit for good ({one_line(str(error), 200)}); go on with --resume") from None
    return done


# In a worker process.

_renderers: dict[str, Renderer] = {}
"""The renderer of this worker process: a tokenizer takes a second to load and serves all of its units."""


def _run(unit: Unit, shared: tuple[Job, dict[str, Any], Path, Path]) -> Done:
    job, identity, folder, here = shared
    # Paths are kept as the user gave them, because they appear in errors.
    os.chdir(here)
    key = json.dumps([job.to_json(), identity], sort_keys=True)
    if key not in _renderers:
        renderer = same_renderer(job, identity)
        _renderers.clear()
        _renderers[key] = renderer
    return run_unit(unit, job, _renderers[key], folder)
