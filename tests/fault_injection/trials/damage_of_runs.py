from __future__ import annotations

import random
from pathlib import Path

from prepare_fixtures import build, conversations, digests, job_of, lines

from chatmill.store import files
from fault_injection.disks import KilledAt
from fault_injection.processes import apart, load_torch, outcome
from fault_injection.trial import Tally, Trial
from fault_injection.trials.damage import files_of, flip, judge


def checkpoints(size: int, seed: int, folder: Path, tally: Tally) -> None:
    import torch
    from train_fixtures import prepare, trained

    from chatmill.train.checkpoint import open_checkpoint
    from chatmill.train.distributed import World

    load_torch()
    rng, data = random.Random(seed), prepare(folder, "sums", seed=seed)
    last = trained(data, folder, max_iters=2).checkpoint
    assert last is not None
    paths = files_of(last)
    for number in range(size):
        path = paths[number % len(paths)]
        whole = path.read_bytes()
        path.write_bytes(flip(whole, rng))
        ended = outcome(lambda: open_checkpoint(last, World(0, 1, torch.device("cpu"))).step)
        line = ended.refused or (f"broke: {ended.broke}" if ended.broke else "")
        judge(tally, line, f"a bit flipped in {path.relative_to(last)}")
        path.write_bytes(whole)


def audit_logs(size: int, seed: int, folder: Path, tally: Tally) -> None:
    from audit_fixtures import make_dataset, run

    from chatmill.audit import verify_log

    rng, data = random.Random(seed), make_dataset(folder / "data", seed=seed)
    _, states = run(data, folder / "logs", 30, checkpoints=(30,))
    (log,) = (folder / "logs").glob("*.log")
    head = states[30]["audit"]["head"]
    whole = log.read_bytes()
    # The hash in a checkpoint protects only the log lines before the checkpoint.
    anchored = whole[: whole.rindex(b"action=checkpoint")]
    for number in range(size):
        lines_of_log, what = anchored.split(b"\n"), f"a bit flipped in the log, {number}"
        if number % 4 == 3:
            one, other = rng.sample(range(len(lines_of_log) - 1), 2)
            lines_of_log[one], lines_of_log[other] = lines_of_log[other], lines_of_log[one]
            changed, what = b"\n".join(lines_of_log), f"lines {one} and {other} of the log swapped"
        elif number % 8 == 6:
            gone = rng.randrange(len(lines_of_log) - 1)
            changed, what = (
                b"\n".join(lines_of_log[:gone] + lines_of_log[gone + 1 :]),
                f"line {gone} of the log removed",
            )
        else:
            changed = flip(anchored, rng)
        log.write_bytes(changed + whole[len(anchored) :])
        ended = outcome(lambda: verify_log(log, data, heads={"the checkpoint": head}).fault)
        line = ended.value or ended.refused or (f"broke: {ended.broke}" if ended.broke else "")
        judge(tally, line, what)
    log.write_bytes(whole)
    assert verify_log(log, data, heads={"the checkpoint": head}).fault is None


def caches(size: int, seed: int, folder: Path, tally: Tally) -> None:
    from train_fixtures import run_chatmill

    from chatmill.store.primer_cache import verify_cache

    primer = folder / "primer.jsonl"
    primer.write_bytes(lines([{"messages": record} for record in _primers(40, seed)]))
    run_chatmill("build-sft-primer", "--primer-jsonl", str(primer), "--out-dir", str(folder / "cache"))
    cache, rng = folder / "cache" / "primer", random.Random(seed)
    paths = files_of(cache)
    assert paths
    for number in range(size):
        path = paths[number % len(paths)]
        whole = path.read_bytes()
        path.write_bytes(flip(whole, rng))
        ended = outcome(lambda: verify_cache(cache, full=True).faults)
        line = f"broke: {ended.broke}" if ended.broke else next(iter(ended.value), "")
        judge(tally, line, f"a bit flipped in {path.relative_to(cache)}")
        path.write_bytes(whole)
    assert not verify_cache(cache, full=True).faults


def _primers(count: int, seed: int) -> list[list[dict[str, str]]]:
    rng = random.Random(seed)
    text = lambda: " ".join(rng.choices(("mill", "stone", "grain", "water"), k=6))  # noqa: E731
    return [[{"role": role, "content": text()} for role in ("system", "user", "assistant")] for _ in range(count)]


def staged_units(size: int, seed: int, folder: Path, tally: Tally) -> None:
    rng = random.Random(seed)
    (folder / "a.jsonl").write_bytes(lines(conversations(60, seed=seed)))
    job = job_of((str(folder / "a.jsonl"),))
    build(job, folder / "whole")
    right = digests(folder / "whole")
    for number in range(size):
        target = folder / str(number) / "x"
        target.parent.mkdir()

        def killed(target: Path = target) -> None:
            files.disk = KilledAt(30)
            build(job, target, unit_bytes=5_000)

        assert apart(killed).killed
        left = [path for path in files_of(target.parent / ".x.building.units") if path.stat().st_size]
        path = rng.choice(left)
        path.write_bytes(flip(path.read_bytes(), rng))
        ended = outcome(lambda target=target: build(job, target, unit_bytes=5_000, resume=True).sha256)
        if ended.value is None:
            judge(tally, ended.refused or f"broke: {ended.broke}", f"a bit flipped in {path.name}")
        elif digests(target) != right:
            tally.is_wrong(f"a bit flipped in {path.name}: the resumed build has wrong bytes")
        else:
            tally.survives()


CHECKPOINTS = Trial(
    "flipped bits, checkpoints",
    "Flips one bit in one file of a checkpoint. Opening the checkpoint must fail",
    checkpoints,
    full=200,
    short=20,
    in_memory=True,
)
AUDIT_LOGS = Trial(
    "changed audit logs",
    "Flips one bit of an audit log, swaps two lines, or removes a line. The hash chain, the hash in the checkpoint "
    "or the dataset must reveal the change",
    audit_logs,
    full=200,
    short=24,
    in_memory=True,
)
CACHES = Trial(
    "flipped bits, caches",
    "Flips one bit of an SFT cache. `verify --full` must find the flipped bit",
    caches,
    100,
    12,
    in_memory=True,
)
STAGED = Trial(
    "flipped bits, interrupted builds",
    "Flips one bit in the staged files of a killed build. The resumed build must process the damaged unit again or "
    "refuse to continue, and must never give wrong bytes",
    staged_units,
    full=100,
    short=6,
    in_memory=True,
)
