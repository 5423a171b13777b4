from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from prepare_fixtures import build, digests, job_of, left_beside, write_corpus

from chatmill.prepare import ray_engine
from chatmill.prepare.pipeline import prepare_dataset
from fault_injection.processes import Ended, outcome
from fault_injection.trial import Tally, Trial

T = TypeVar("T")
ORIGINAL = ray_engine._run


def wait_until(condition: Callable[[], T | None], what: str, seconds: float = 600) -> T:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.02)
    raise AssertionError(f"timed out while waiting until {what}")


class Log:
    """A folder with a file for each unit that a worker has started or finished."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def units_by_worker(self, what: str) -> dict[int, set[int]]:
        found: dict[int, set[int]] = {}
        for path in self.folder.glob(f"*.{what}"):
            unit, pid, _ = path.name.split(".")
            found.setdefault(int(pid), set()).add(int(unit))
        return found

    def two_that_hold(self) -> dict[int, set[int]] | None:
        """Return the units in progress on both workers, or None until each worker has finished a unit and started
        another.
        """
        finished = self.units_by_worker("finished")
        held = {pid: units - finished.get(pid, set()) for pid, units in self.units_by_worker("began").items()}
        held = {pid: units for pid, units in held.items() if units and finished.get(pid)}
        return held if len(held) == 2 else None


def logged_run(log: Path) -> Callable[..., Any]:
    """Return a function that runs a unit, and records when the unit starts and ends.

    The second unit of each worker waits until a worker has been killed.
    """

    def run(unit: Any, shared: Any) -> Any:
        (log / f"{unit.number}.{os.getpid()}.began").touch()
        while list(log.glob(f"*.{os.getpid()}.finished")) and not (log / "go on").exists():
            time.sleep(0.02)
        done = ORIGINAL(unit, shared)
        (log / f"{unit.number}.{os.getpid()}.finished").touch()
        return done

    return run


def held_run(log: Path) -> Callable[..., Any]:
    def run(unit: Any, shared: Any) -> Any:
        while unit.number:
            time.sleep(0.02)
        done = ORIGINAL(unit, shared)
        (log / "0.finished").touch()
        return done

    return run


def process_of_cluster(name: str) -> int:
    for thread in Path("/proc/self/task").iterdir():
        for pid in (thread / "children").read_text().split():
            if Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].endswith(f"/{name}".encode()):
                return int(pid)
    raise AssertionError(f"no process is named {name}")


def work(size: int, seed: int, folder: Path, tally: Tally) -> None:
    try:
        import ray
    except ImportError:
        tally.skipped = "ray is not installed: pip install 'chatmill[ray]'"
        return
    rng = random.Random(seed)
    job = job_of(write_corpus(folder, 300), val_split=0.2)
    build(job, folder / "one")
    right = digests(folder / "one")
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    # Ray prints many lines about a lost worker.
    heard, nothing = [os.dup(1), os.dup(2)], os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)

    def on_ray(target: Path, **options: Any) -> Ended:
        if not ray.is_initialized():
            ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
        engine = ray_engine.RayEngine()
        return outcome(lambda: prepare_dataset(job, target, engine=engine, unit_bytes=6_000, **options).sha256)

    def lose_worker(number: int) -> None:
        target, log, killed = folder / f"ray-{number}", Log(folder / f"log-{number}"), dict[int, set[int]]()

        def kill_one(progress: Any) -> None:
            if not killed:
                held = wait_until(log.two_that_hold, "each of two workers processes a unit")
                pid = rng.choice(sorted(held))
                killed[pid] = held[pid]
                os.kill(pid, signal.SIGKILL)
                (log.folder / "go on").touch()

        ray_engine._run = logged_run(log.folder)
        ended = on_ray(target, on_progress=kill_one)
        others = [units for pid, units in log.units_by_worker("finished").items() if pid not in killed]
        if ended.value is None:
            tally.loses(f"kill {number}: {ended.refused or ended.broke}")
        elif not killed or not set().union(*killed.values()) <= set().union(*others):
            tally.loses(f"kill {number}: no worker finished the killed worker's unit")
        elif digests(target) != right:
            tally.is_wrong(f"kill {number}: the bytes differ from those of one process")
        else:
            tally.judge(
                survived=left_beside(target) == [], lost=f"kill {number}: these files were left: {left_beside(target)}"
            )

    def lose_cluster(name: str) -> None:
        target, log = folder / name, Log(folder / f"log-{name}")
        ray_engine._run = held_run(log.folder)
        ended = on_ray(target, on_progress=lambda progress: os.kill(process_of_cluster(name), signal.SIGKILL))
        ray.shutdown()
        if "the Ray cluster is lost" not in ended.refused:
            tally.loses(f"{name} killed: {ended}")
            return
        again = outcome(lambda: build(job, target, unit_bytes=6_000, resume=True).sha256)
        if again.value is None:
            tally.loses(f"{name} killed: the build cannot be resumed: {again.refused or again.broke}")
        elif digests(target) != right:
            tally.is_wrong(f"{name} killed: the resumed build has different bytes")
        else:
            tally.judge(
                found=left_beside(target) == [], lost=f"{name} killed: these files were left: {left_beside(target)}"
            )

    try:
        for number in range(size):
            lose_worker(number)
        if tally.is_red:
            # After a failed build, Ray may exit this process when its cluster is lost, and the results would be lost.
            return
        for name in ("raylet", "gcs_server")[:size]:
            lose_cluster(name)
    finally:
        ray_engine._run = ORIGINAL
        ray.shutdown()
        os.dup2(heard[0], 1)
        os.dup2(heard[1], 2)


TRIAL = Trial(
    "killed Ray worker or cluster",
    "Kills a worker that is processing a unit. Another worker must process the unit, and the dataset must have the "
    "same bytes as a local build. If a node of the cluster is killed instead, the build must end with a one-line "
    "error, and the resumed build must give the same bytes",
    work,
    full=5,
    short=1,
)
