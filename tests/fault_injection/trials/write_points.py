from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from prepare_fixtures import build, conversations, digests, job_of, left_beside, lines

from chatmill.store import files
from fault_injection.disks import KilledAt, in_place
from fault_injection.processes import apart, load_torch, outcome
from fault_injection.trial import Tally, Trial

UNIT_BYTES = 9_000


def points(total: int, most: int) -> list[int]:
    """Return at most `most` operation numbers from 1 to `total`, evenly spaced and including the last."""
    if most >= total:
        return list(range(1, total + 1))
    return sorted(total - number * total // most for number in range(most))


def builds(size: int, seed: int, folder: Path, tally: Tally) -> None:
    (folder / "a.jsonl").write_bytes(lines(conversations(40, seed=seed)))
    (folder / "b.jsonl").write_bytes(lines(conversations(5, seed=seed + 1)))
    job = job_of((str(folder / "a.jsonl"),), shard_tokens=4_000)
    old_job = job_of((str(folder / "b.jsonl"),))
    for over in (False, True):
        counter = KilledAt()
        whole = folder / f"whole-{over}"
        if over:
            build(old_job, whole)
            old = digests(whole)
        with in_place(counter):
            build(job, whole, unit_bytes=UNIT_BYTES, overwrite=over)
        new = digests(whole)
        for at in points(counter.count, size):
            target = folder / f"{over}-{at}" / "x"
            target.parent.mkdir()
            if over:
                build(old_job, target)

            def killed(at: int = at, target: Path = target, over: bool = over) -> None:
                files.disk = KilledAt(at)
                build(job, target, unit_bytes=UNIT_BYTES, overwrite=over)

            ended = apart(killed)
            where = f"{'over an old dataset' if over else 'a new dataset'}, killed at operation {at} of {counter.count}"
            if not ended.killed:
                tally.loses(f"{where}: the build was not killed; {ended}")
                continue
            found = digests(target) if target.exists() else None
            if found != new and found != (old if over else None):
                tally.loses(f"{where}: the target is neither the old nor the new dataset")
                continue
            again = target.exists()
            done = outcome(
                lambda target=target, again=again: (
                    build(job, target, unit_bytes=UNIT_BYTES, overwrite=again, resume=True).sha256
                )
            )
            if done.value is None:
                tally.loses(f"{where}: cannot be resumed: {done.refused or done.broke}")
            elif digests(target) != new:
                tally.is_wrong(f"{where}: the resumed build has different bytes")
            else:
                tally.judge(
                    survived=left_beside(target) == [], lost=f"{where}: these files were left: {left_beside(target)}"
                )


def runs(size: int, seed: int, folder: Path, tally: Tally) -> None:
    import torch
    from train_fixtures import prepare, trained

    from chatmill.audit import verify_log
    from chatmill.train.checkpoint import list_checkpoints, open_checkpoint
    from chatmill.train.distributed import World

    load_torch()
    data = prepare(folder, "sums", "--val-split", "0.2", seed=seed)
    steps: dict[str, Any] = {"max_iters": 6, "save_interval": 2, "keep_checkpoints": 2}
    steps |= {"eval_interval": 1, "eval_samples": 0, "keep_best": True}

    def run(name: str) -> None:
        trained(data, folder, name=name, resume="auto", audit_dir=str(folder / f"logs-{name}"), **steps)

    def came_to(name: str) -> dict[str, str]:
        """Return hashes of the last checkpoint's weights and optimizer state. Raise `AssertionError` if the audit log
        does not match the dataset or the checkpoint.
        """
        last = list_checkpoints(folder / name)[-1]
        audit = open_checkpoint(last, World(0, 1, torch.device("cpu"))).state["audit"]
        checked = verify_log(folder / f"logs-{name}" / audit["log"], data, heads={"the checkpoint": audit["head"]})
        assert checked.fault is None, checked.fault
        return {name: hash for name, hash in digests(last).items() if "safetensors" in name}

    def counted() -> int:
        files.disk = counter = KilledAt()
        run("undisturbed")
        return counter.count

    operations = apart(counted).value
    right = came_to("undisturbed")
    for at in points(operations, size):
        name = f"run-{at}"

        def killed(at: int = at, name: str = name) -> None:
            files.disk = KilledAt(at)
            run(name)

        where = f"a run killed at operation {at} of {operations}"
        if not (ended := apart(killed)).killed:
            tally.loses(f"{where}: the run was not killed; {ended}")
            continue
        if os.path.lexists(best := folder / name / "best") and not (best / "checkpoint.json").is_file():
            tally.is_wrong(f"{where}: best does not point to a checkpoint")
            continue
        if (again := apart(lambda name=name: run(name))) and (again.refused or again.broke):
            tally.loses(f"{where}: cannot be resumed: {again.refused or again.broke}")
            continue
        result = outcome(lambda name=name: came_to(name))
        if result.value is None:
            tally.loses(f"{where}: {result.refused or result.broke}")
        elif result.value != right:
            tally.is_wrong(f"{where}: the weights differ from the uninterrupted run")
        else:
            tally.survives()


BUILDS = Trial(
    "kill at every write, prepare",
    "Kills a build at each write, sync and rename. The target must be absent, or the complete old or new dataset. "
    "The resumed build must give the same bytes as an uninterrupted build",
    builds,
    full=10_000,
    short=12,
)
RUNS = Trial(
    "kill at every write, training",
    "Kills a run at each operation that writes a checkpoint or the audit log. The resumed run must be bitwise equal "
    "to an uninterrupted run, and `audit verify` must accept the log",
    runs,
    full=10_000,
    short=6,
)
