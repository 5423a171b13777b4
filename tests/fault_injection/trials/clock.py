from __future__ import annotations

import datetime
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prepare_fixtures import build, conversations, digests, job_of, lines

from chatmill.store import files
from chatmill.store.verify import verify_dataset
from fault_injection.disks import KilledAt
from fault_injection.processes import Ended, apart, load_torch, outcome
from fault_injection.trial import Tally, Trial

YEAR = 365.25 * 86400
UNIT_BYTES = 5_000


def jump_by(offset: Callable[[], float]) -> None:
    real, real_ns = time.time, time.time_ns
    time.time = lambda: real() + offset()
    time.time_ns = lambda: real_ns() + int(offset() * 1e9)

    class Shifted(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Shifted:
            return cls.fromtimestamp(time.time(), tz)

    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "chatmill" and getattr(module, "datetime", None) is datetime.datetime:
            module.datetime = Shifted


def some_clock(rng: random.Random) -> Callable[[], float]:
    now, years = time.time(), rng.choice([-45, -1, 3, 200])
    jumping = random.Random(rng.random())
    return rng.choice([lambda: years * YEAR, lambda: -now + 86400, lambda: jumping.uniform(-40, 40) * YEAR])


def scatter_times(folder: Path, rng: random.Random) -> None:
    for path in folder.rglob("*"):
        os.utime(path, (at := rng.uniform(0, 200 * YEAR), at))


def at_another_time(work: Callable[[], Any], rng: random.Random) -> Ended:
    clock = some_clock(rng)

    def shifted() -> Any:
        jump_by(clock)
        return work()

    return apart(shifted)


def builds(size: int, seed: int, folder: Path, tally: Tally) -> None:
    rng, source = random.Random(seed), folder / "a.jsonl"
    source.write_bytes(lines(conversations(60, seed=seed)))
    job = job_of((str(source),), val_split=0.2, split="shuffle")
    build(job, folder / "whole")
    right = digests(folder / "whole")
    for number in range(size):
        target = folder / str(number) / "x"
        target.parent.mkdir()
        os.utime(source, (at := rng.uniform(0, 200 * YEAR), at))

        def go(target: Path = target, kill: int = 0, resume: bool = False) -> str:
            files.disk = KilledAt(kill)
            return build(job, target, unit_bytes=UNIT_BYTES, resume=resume).sha256

        if number % 2:
            point = rng.randrange(20, 60)
            assert at_another_time(lambda go=go, point=point: go(kill=point), rng).killed
            # With a wrong clock, files can have arbitrary modification times.
            scatter_times(target.parent / ".x.building.units", rng)
        ended = at_another_time(lambda go=go: go(resume=True), rng)
        if target.exists():
            scatter_times(target, rng)
        checked = at_another_time(lambda target=target: verify_dataset(target, full=True).faults, rng)
        if ended.value is None or checked.value != []:
            tally.loses(f"build {number}: {ended.refused or ended.broke or checked}")
        elif digests(target) != right:
            tally.is_wrong(f"build {number}: the dataset bytes depend on the clock")
        else:
            tally.survives()


def runs(size: int, seed: int, folder: Path, tally: Tally) -> None:
    from train_fixtures import prepare, trained

    from chatmill.audit import verify_log

    load_torch()
    rng, data = random.Random(seed), prepare(folder, "sums", "--val-split", "0.2", seed=seed)

    def run(name: str, kill: int = 0) -> str:
        files.disk = KilledAt(kill)
        steps: dict[str, Any] = {"max_iters": 6, "save_interval": 2, "audit_dir": str(folder / f"logs-{name}")}
        return str(trained(data, folder, name=name, resume="auto", **steps).checkpoint)

    def came_to(name: str) -> dict[str, str]:
        for log in (folder / f"logs-{name}").glob("*.log"):
            # A run that was killed before it saved a state may leave an empty or abandoned log.
            if log.stat().st_size and len(list((folder / f"logs-{name}").glob("*.log"))) == 1:
                checked = verify_log(log, data)
                assert checked.fault is None, checked.fault
        last = max((folder / name).glob("step_*"))
        return {path: hash for path, hash in digests(last).items() if "safetensors" in path}

    assert apart(lambda: run("undisturbed")).value
    right = came_to("undisturbed")
    for number in range(size):
        name, kill = f"run-{number}", rng.randrange(30, 90)
        first = at_another_time(lambda name=name, kill=kill: run(name, kill), rng)
        if (folder / name).exists():
            scatter_times(folder / name, rng)
        again = at_another_time(lambda name=name: run(name), rng)
        result = outcome(lambda name=name: came_to(name))
        if again.value is None or result.value is None:
            tally.loses(f"run {number}: {[each.refused or each.broke for each in (first, again, result)]}")
        elif result.value != right:
            tally.is_wrong(f"run {number}: the weights depend on the clock")
        else:
            tally.survives()


BUILDS = Trial(
    "clock jumps, prepare",
    "Builds, resumes and verifies datasets with a clock that is decades off or jumps at every read. The dataset "
    "bytes must stay the same",
    builds,
    full=150,
    short=6,
)
RUNS = Trial(
    "clock jumps, training",
    "Kills and resumes runs with a clock that is decades off or jumps at every read. Weights and optimizer state "
    "must be bitwise equal to those of an uninterrupted run, and `audit verify` must accept the log",
    runs,
    full=40,
    short=2,
)
