from __future__ import annotations

import os
import random
from pathlib import Path

from prepare_fixtures import build, conversations, digests, job_of, left_beside, lines

from chatmill.prepare import build_dir as workplace
from chatmill.store import files
from fault_injection.disks import HeldAt, KilledAt, in_place
from fault_injection.processes import begin
from fault_injection.trial import Tally, Trial

UNIT_BYTES = 5_000


def work(size: int, seed: int, folder: Path, tally: Tally) -> None:
    rng = random.Random(seed)
    jobs = []
    for name in "ab":
        (folder / f"{name}.jsonl").write_bytes(lines(conversations(60, seed=seed + ord(name))))
        jobs.append(job_of((str(folder / f"{name}.jsonl"),), shard_tokens=4_000))
    counter = KilledAt()
    with in_place(counter):
        build(jobs[0], folder / "whole-a", unit_bytes=UNIT_BYTES)
    build(jobs[1], folder / "whole-b")
    right = [digests(folder / f"whole-{name}") for name in "ab"]
    # Wait only briefly for the lock of another build, to make the trial faster.
    workplace.PATIENCE = 0.1
    for number in range(size):
        target = folder / str(number) / "x"
        target.parent.mkdir()
        over, held = number % 2 == 1, number % 3 != 2
        if over:
            build(jobs[1], target)
        reached, send_reached = os.pipe()
        wait, go = os.pipe()

        disk = HeldAt(rng.randrange(10, counter.count) if held else 0, send_reached, wait)

        def first(target: Path = target, over: bool = over, disk: HeldAt = disk) -> str:
            files.disk = disk
            return build(jobs[0], target, unit_bytes=UNIT_BYTES, overwrite=over).sha256

        one = begin(first)
        if held:
            os.read(reached, 1)
        two = begin(lambda target=target, over=over: build(jobs[1], target, overwrite=over).sha256)
        second = two.end() if held else None
        os.write(go, b".")
        ended = [one.end(), second or two.end()]
        for fd in (reached, send_reached, wait, go):
            os.close(fd)
        where = f"round {number}, {'the first paused' if held else 'a race'}{', over an old dataset' if over else ''}"
        broke = [each.broke for each in ended if each.broke]
        done = [each.value is not None for each in ended]
        stored = digests(target) if target.exists() else None
        if broke:
            tally.loses(f"{where}: {broke[0]}")
        elif held and done != [True, False]:
            tally.is_wrong(f"{where}: the second build was not refused: {ended}")
        elif not any(done) or (all(done) and not over):
            tally.loses(f"{where}: {[each.refused or 'done' for each in ended]}")
        elif stored not in [digest for digest, was in zip(right, done, strict=True) if was]:
            tally.is_wrong(f"{where}: the target is not the dataset of a build that succeeded")
        elif left_beside(target):
            tally.loses(f"{where}: these files were left: {left_beside(target)}")
        else:
            tally.judge(survived=all(done), found=True)


TRIAL = Trial(
    "two concurrent builds of one target",
    "Runs two builds of one target at once. The second build must wait or be refused with a one-line error, and the "
    "target must be complete",
    work,
    full=100,
    short=4,
)
