"""Render input units as tasks on a Ray cluster; Ray retries tasks whose worker is lost. If the dataset is written to a
URL, tasks also write its shards.

If input, tokenizer and target are URLs, nodes need no shared file system. Local files must have the same path on all
nodes.
"""

from __future__ import annotations

import json
import os
import socket
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from chatmill.errors import ChatmillError, DataError, UsageError, one_line
from chatmill.format import Renderer
from chatmill.prepare.job import Job
from chatmill.prepare.remote_shards import write_remote_shards
from chatmill.prepare.shard_plan import ShardPlan
from chatmill.prepare.unit import Done, Unit, finished, renderer_identity, run_unit, same_renderer
from chatmill.remote import objects
from chatmill.remote.threads import in_threads
from chatmill.remote.urls import Place, Url
from chatmill.store.metadata import ShardInfo
from chatmill.store.remote_publish import RemoteTarget

RETRIES = 8
"""Maximum number of retries of a task whose worker is lost. A task that raises an error is not retried."""
PATIENCE = 600
"""Seconds to wait for running tasks after an error, so that no task writes to the build afterwards."""
TASKS_PER_CPU = 4
"""Maximum number of submitted tasks per CPU. After an error, the build waits for the submitted tasks."""

REMOVED_TOGETHER = 500
"""Number of remote objects that one task removes."""
LOOK_SECONDS = 1.0
"""Seconds between checks that the cluster is reachable."""
MISSED = 4
"""Number of consecutive failed checks after which the cluster is considered lost."""


class LostClusterError(ChatmillError):
    """Raised if the head of the Ray cluster, or the raylet of this node, cannot be reached."""


class RayEngine:
    """Runs units on the Ray cluster at `address`, or on a temporary local cluster with `workers` CPUs."""

    def __init__(self, workers: int | None = None, address: str | None = None) -> None:
        self.workers = workers
        self.address = address
        self._started = False

    def run(
        self, units: Sequence[Unit], job: Job, renderer: Renderer, folder: Place, *, resume: bool = False
    ) -> Generator[Done, None, None]:
        """Run units as `Engine.run` does; with `resume`, skip units whose output already exists."""
        local = [*job.named_files(), *(unit.part.path for unit in units), folder]
        # Keep paths as the user gave them, because errors show the paths.
        here = Path.cwd() if any(isinstance(place, Path) for place in local) else None
        folder = folder.absolute() if isinstance(folder, Path) else folder
        yield from self._in_order(_run, units, (job, renderer_identity(renderer), folder, here, resume))

    def write_shards(
        self, plans: Iterable[ShardPlan], target: RemoteTarget, *, vocab_size: int, per_task: int = 1
    ) -> Generator[ShardInfo, None, None]:
        """Write the shards of a dataset at a URL, and yield the `ShardInfo` of each shard in order."""
        left = iter(plans)
        tasks = iter(lambda: list(islice(left, per_task)), [])
        for infos in self._in_order(_write, tasks, (target, vocab_size)):
            yield from infos

    def remove(self, urls: Sequence[Url]) -> None:
        """Remove objects from the object store in parallel tasks, because each removal is a separate request."""
        parts = [urls[at : at + REMOVED_TOGETHER] for at in range(0, len(urls), REMOVED_TOGETHER)]
        for _ in self._in_order(_remove, parts, None):
            pass

    def num_cpus(self) -> int:
        with self.connected() as ray:
            return int(ray.cluster_resources().get("CPU", 1))

    def _in_order(self, work: Callable[[Any, Any], Any], items: Iterable[Any], shared: Any) -> Generator[Any]:
        """Call `work` for all items in Ray tasks; yield the results, or raise the first error, in the order of the
        items.
        """
        with self.connected() as ray:
            # Request less than one CPU per task, to leave room on a small cluster for tasks that produce the input.
            remote = ray.remote(num_cpus=0.9, max_retries=RETRIES, retry_exceptions=False)(work)
            shared = ray.put(shared)
            places, waiting = _places(ray), iter(items)
            # Count the CPUs only once, because a call to the head while it is unreachable may kill this process.
            most = max(4, TASKS_PER_CPU * self.num_cpus())
            pending: deque[Any] = deque()
            try:
                while True:
                    for item in islice(waiting, most - len(pending)):
                        pending.append(remote.remote(item, shared))
                    if not pending:
                        break
                    yield _result(ray, pending[0], places)
                    pending.popleft()
            except LostClusterError:
                # Tasks of a lost cluster cannot be cancelled.
                pending.clear()
                raise
            finally:
                if pending and not self._started:
                    # Do not cancel the tasks: Ray may kill this process if a task completes while it is being
                    # cancelled.
                    ray.wait(list(pending), num_returns=len(pending), timeout=PATIENCE)

    @contextmanager
    def connected(self) -> Iterator[Any]:
        """Connect to Ray for the `with` block; a cluster that is started for the block is stopped at its end."""
        try:
            import ray
        except ImportError:
            raise UsageError("--engine ray needs ray; pip install 'chatmill[ray]'") from None
        starts = not ray.is_initialized()
        if starts:
            # Without "local", Ray would join any cluster that happens to run on this machine.
            own = {"address": "local", "num_cpus": self.workers, "include_dashboard": False}
            where = {"address": self.address} if self.address else own
            try:
                _check_reachable(self.address)
                ray.init(log_to_driver=False, configure_logging=False, **where)
            except (OSError, ValueError, RuntimeError) as error:
                what = f"no Ray cluster at {self.address}" if self.address else "Ray failed to start"
                raise UsageError(
                    f"{what} ({one_line(str(error), 200)}); start a cluster with `ray start --head`"
                ) from None
            self._started = True
        try:
            yield ray
        finally:
            if starts:
                self._started = False
                ray.shutdown()


def _check_reachable(address: str | None) -> None:
    """Raise `OSError` if HOST:PORT does not accept connections; Ray itself would wait many minutes."""
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=5).close()


def _places(ray: Any) -> list[str]:
    """Return HOST:PORT of the cluster head and of this node's raylet. If the head or the raylet is lost, Ray kills this
    process or hangs.
    """
    if ray.util.client.ray.is_connected():
        # This process is connected through a Ray client server, and Ray itself reports when that server is lost.
        return []
    context = ray.get_runtime_context()
    here = [node for node in ray.nodes() if node["NodeID"] == context.get_node_id()]
    return [context.gcs_address, *(f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}" for node in here)]


def _wait(ray: Any, task: Any, places: Sequence[str]) -> None:
    """Wait for a task; raise `LostClusterError` if an address is unreachable in `MISSED` consecutive checks."""
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
                    "start it again and continue with --resume"
                ) from None


def _result(ray: Any, task: Any, places: Sequence[str]) -> Any:
    try:
        _wait(ray, task, places)
        return ray.get(task)
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        raise cause if isinstance(cause, ChatmillError | OSError) else error from None
    except ray.exceptions.RayError as error:
        raise ChatmillError(
            f"Ray lost a task repeatedly ({one_line(str(error), 200)}); continue with --resume"
        ) from None


# Code that runs in worker processes.

_renderers: dict[str, Renderer] = {}
"""Renderer of this worker process, kept for all units because a tokenizer takes a second to load."""


def _run(unit: Unit, shared: tuple[Job, dict[str, Any], Place, Path | None, bool]) -> Done:
    job, identity, folder, here, resume = shared
    if here is not None:
        _enter(here)
    if resume and (done := finished(unit, folder)) is not None:
        return done
    key = json.dumps([job.to_json(), identity], sort_keys=True)
    if key not in _renderers:
        renderer = same_renderer(job, identity)
        _renderers.clear()
        _renderers[key] = renderer
    return run_unit(unit, job, _renderers[key], folder)


def _enter(folder: Path) -> None:
    try:
        os.chdir(folder)
    except OSError as error:
        raise DataError(
            f"{folder}: not accessible on the node {socket.gethostname()} ({error.strerror}); use URLs, or paths "
            "that exist on all nodes"
        ) from None


def _remove(urls: Sequence[Url], _: None) -> None:
    in_threads(lambda url: objects.remove([url]), urls)


def _write(plans: Sequence[ShardPlan], shared: tuple[RemoteTarget, int]) -> list[ShardInfo]:
    target, vocab_size = shared
    return write_remote_shards(plans, target, vocab_size=vocab_size)
