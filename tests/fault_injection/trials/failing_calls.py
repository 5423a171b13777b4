"""Run commands while one C library call fails. The command must write the right bytes, or print a one-line error and
exit with code 1. Existing data must stay intact, and the next command must write the same bytes as an uninterrupted
run.
"""

from __future__ import annotations

import gc
import io
import json
import os
import random
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

from prepare_fixtures import conversations, digests, left_beside, lines

from chatmill.cli.main import main
from chatmill.store import files
from chatmill.store.layout import METADATA
from chatmill.store.read import open_dataset
from chatmill.store.verify import verify_dataset
from fault_injection.disks import KilledAt
from fault_injection.failing_calls import KINDS, Failure, armed, counted, failed, ways, why_not
from fault_injection.processes import Ended, apart, begin, load_torch, outcome
from fault_injection.trial import Tally, Trial

CPU_SECONDS = 60.0
FEW = 20
"""Up to this size, only some of the cases are tried."""
ALL = 1_000_000
"""From this size, every call fails in each of its possible ways instead of only in one."""


def exit_code(*args: str) -> Any:
    argv, sys.argv = sys.argv, ["chatmill", *args]
    try:
        main()
    except SystemExit as end:
        return end.code or 0
    finally:
        sys.argv = argv
    return 0


def command(place: Path, *args: str) -> Callable[[], Any]:
    def run() -> Any:
        os.chdir(place)
        stderr = place.parent / "stderr"
        file = os.open(stderr, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        os.dup2(file, 2)
        code = exit_code(*args)
        gc.collect()
        sys.stderr.flush()
        return {"code": code, "stderr": stderr.read_text(errors="replace")}

    return run


def ending(ended: Ended) -> str:
    return ended.broke or ended.refused or ("killed" if ended.killed else json.dumps(ended.value))


def one_line(ended: Ended) -> bool:
    if ended.value is None or ended.value["code"] != 1:
        return False
    lines = [line for line in ended.value["stderr"].splitlines() if not line.startswith("chatmill: warning: ")]
    errors = [line.startswith("chatmill: ") for line in lines]
    return (
        errors.count(True) == 1
        and errors[-1]
        and not any(word in ended.value["stderr"] for word in ("Traceback", "Exception", "input or output"))
    )


@dataclass(frozen=True)
class Case:
    name: str
    place: Path
    """Folder in which the command runs; it is copied from `before` for each attempt."""
    before: Path
    args: Sequence[str]
    again: Sequence[str]
    """Arguments of the next command after a failure."""
    result: Callable[[Path], Any]
    """Function that returns the command's result."""
    fault: Callable[[Path], str]
    """Function that returns what is wrong with the folder after a failed command, or an empty string."""

    def begin(self) -> None:
        shutil.rmtree(self.place, ignore_errors=True)
        shutil.copytree(self.before, self.place, symlinks=True)

    def run(self, args: Sequence[str], failure: Failure | None = None) -> Ended:
        with armed(self.place, failure):
            return begin(command(self.place, *args)).end(CPU_SECONDS)

    def undisturbed(self) -> tuple[dict[str, int], Any]:
        self.begin()
        ended = self.run(self.args)
        assert ended.value is not None and ended.value["code"] == 0, ending(ended)
        return counted(), self.result(self.place)

    def attempt(self, failure: Failure, right: Any, tally: Tally) -> None:
        self.begin()
        ended = self.run(self.args, failure)
        times, path = failed()
        where = f"{self.name}, {failure} ({path.removeprefix(str(self.place) + '/')})"
        worked = ended.value is not None and ended.value["code"] == 0
        if not times and worked:
            # Two workers share the work differently each time, so the call that should fail may not occur.
            tally.notes["calls that were not reached"] += 1
            return
        if not worked and not one_line(ended):
            tally.loses(f"{where}: {ending(ended)}")
            return
        if worked and self.result(self.place) != right:
            tally.is_wrong(f"{where}: exit code 0, but the bytes differ from those of an uninterrupted command")
            return
        if fault := self.fault(self.place):
            tally.loses(f"{where}: {fault}")
            return
        if not worked or self.left():
            last = self.run(self.again)
            if last.value is None or last.value["code"]:
                tally.loses(f"{where}: {ending(ended)}; the next command fails: {ending(last)}")
                return
            if self.result(self.place) != right:
                tally.is_wrong(f"{where}: the next command gives different bytes")
                return
            if left := self.left():
                tally.loses(f"{where}: the next command leaves these files: {left}")
                return
        tally.judge(survived=worked, found=True)

    def left(self) -> list[str]:
        return left_beside(self.place / "x")


def sweep(cases: Sequence[Case], size: int, seed: int, tally: Tally, kinds: Sequence[str] = KINDS) -> None:
    """Run the cases in random order, each time with one failing call and at most `size` times in total. The failing
    calls alternate between `kinds`.
    """
    failures: dict[str, list[tuple[Case, Failure, Any]]] = {kind: [] for kind in kinds}
    for case in cases:
        counts, right = case.undisturbed()
        tally.notes[f"calls in {case.name}"] = sum(counts.values())
        for failure in ways(counts, each=size >= ALL):
            if failure.kind in failures:
                failures[failure.kind].append((case, failure, right))
    for several in failures.values():
        random.Random(seed).shuffle(several)
    turns = [each for turn in zip_longest(*failures.values()) for each in turn if each is not None]
    tally.expected = min(size, len(turns))
    for case, failure, right in turns[:size]:
        case.attempt(failure, right, tally)


# Builds.


def builds(size: int, seed: int, folder: Path, tally: Tally, *, kinds: Sequence[str] = KINDS) -> None:
    if skipped := why_not():
        tally.skipped = skipped
        return
    place, plain = folder / "place", folder / "plain"
    (plain / "in").mkdir(parents=True)
    for number in range(3):
        data = lines(conversations(6, seed=seed + number))
        (plain / "in" / f"{number}.jsonl").write_bytes(data + (b'{"messages": 1}\n' if number == 1 else b""))
    old_args = ("prepare", "in/0.jsonl", "-o", "x", "--workers", "1")
    args = ("prepare", "in/*.jsonl", "-o", "x", "--shard-tokens", "1500", "--val-split", "0.3", "--on-error", "skip")
    args += ("--rejects", "rejects.jsonl", "--workers")

    def started_with(name: str, make: Callable[[], Any], *, killed: bool = False) -> Path:
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(plain, place)
        ended = apart(make)
        assert killed == ended.killed and (killed or ended.value["code"] == 0), ending(ended)
        shutil.copytree(place, folder / name, symlinks=True)
        return folder / name

    def killed_build() -> Any:
        files.disk = KilledAt(24)
        return command(place, *args, "1")()

    # Modules that are imported before forking need not be imported in each child.
    with redirect_stdout(io.StringIO()):
        assert exit_code("prepare", str(plain / "in/0.jsonl"), "-o", str(folder / "first"), "--workers", "1") == 0
    with_old = started_with("old", command(place, *old_args))
    old = digests(with_old / "x")
    with_units = started_with("units", killed_build, killed=True)
    assert any(with_units.glob(".x.building.units/*.rows"))

    def result(place: Path) -> Any:
        return [digests(place / "x"), (place / "rejects.jsonl").read_text()]

    shutil.copytree(plain, place, dirs_exist_ok=True)

    def case(name: str, before: Path, *flags: str, old: dict[str, str] | None = None) -> Case:
        def fault(place: Path) -> str:
            return fault_of_builds(place, old, new[0])

        return Case(name, place, before, (*args, *flags), (*args, "2", "--resume", "--overwrite"), result, fault)

    new = case("a new dataset", plain, "1").undisturbed()[1]
    cases = (
        case("a new dataset", plain, "1"),
        case("over an old dataset", with_old, "1", "--overwrite", old=old),
        case("two workers", plain, "2"),
        case("a resumed build", with_units, "1", "--resume"),
    )
    sweep(cases if size > FEW else cases[1:3], size, seed, tally, kinds)


def fault_of_builds(place: Path, old: dict[str, str] | None, new: dict[str, str]) -> str:
    target = place / "x"
    if (digests(target) if target.exists() else None) not in (old, new):
        return "the target is neither the old nor the new dataset"
    for folder in {marker.parent for marker in place.rglob(METADATA)} - {target}:
        if outcome(lambda folder=folder: str(open_dataset(folder))).refused:
            continue
        if verify_dataset(folder, full=True).faults:
            return f"{folder.name} opens, but is incomplete"
    return ""


# Training runs.

SIZES = {"n_layer": 1, "n_embd": 16, "n_head": 2, "n_ffn": 32, "max_positions": 64, "batch_size": 4, "block_size": 48}
STEPS = {
    "max_iters": 4,
    "save_interval": 2,
    "eval_interval": 2,
    "eval_iters": 1,
    "keep_checkpoints": 2,
    "eval_samples": 0,
}


def runs(size: int, seed: int, folder: Path, tally: Tally, *, kinds: Sequence[str] = KINDS) -> None:
    if skipped := why_not():
        tally.skipped = skipped
        return
    load_torch()
    place, plain = folder / "place", folder / "plain"
    plain.mkdir()
    (folder / "in.jsonl").write_bytes(lines(conversations(12, seed=seed)))
    with redirect_stdout(io.StringIO()):
        assert exit_code("prepare", str(folder / "in.jsonl"), "-o", str(plain / "data"), "--val-split", "0.3") == 0
        assert exit_code("train", "--help") == 0
    args = ["train", "--model_name", "x", "--dataset_dir", "data", "--out_dir", ".", "--audit_dir", "logs"]
    for name, value in {**SIZES, **STEPS, "use_loss_mask": "true", "log_rows": "true", "device": "cpu"}.items():
        args += [f"--{name}", str(value)]
    args += ["--resume", "auto"]
    shutil.copytree(plain, place)
    ended = apart(command(place, *args, "--max_iters", "2"))
    assert ended.value is not None and ended.value["code"] == 0, ending(ended)
    half = folder / "half"
    shutil.copytree(place, half)

    def fault(place: Path) -> str:
        ended = apart(lambda: fault_of_runs(place))
        return ended.value if ended.value is not None else ending(ended)

    def result(place: Path) -> Any:
        ended = apart(lambda: came_to(place))
        return ended.value if ended.value is not None else ending(ended)

    cases = (
        Case("a new run", place, plain, args, args, result, fault),
        Case("a resumed run", place, half, args, args, result, fault),
    )
    sweep(cases if size > FEW else cases[1:], size, seed, tally, kinds)


def came_to(place: Path) -> Any:
    """Return the hashes of the last checkpoint's tensor files, and all losses. Raise if the audit log fails
    verification.
    """
    from chatmill.audit import verify_log
    from chatmill.train.checkpoint import list_checkpoints
    from chatmill.train.run_dir import read_metrics, read_rows

    last = list_checkpoints(place / "x")[-1]
    audit = json.loads((last / "checkpoint.json").read_text())["audit"]
    checked = verify_log(place / "logs" / audit["log"], place / "data", heads={"the checkpoint": audit["head"]})
    assert checked.fault is None, checked.fault
    tensors = {name: hash for name, hash in digests(last).items() if "safetensors" in name}
    curve = [[line["step"], line.get("loss"), line.get("val_loss")] for line in read_metrics(place / "x")]
    return [tensors, curve, [read_rows(place / "x", step) for step in range(1, STEPS["max_iters"] + 1)]]


def fault_of_runs(place: Path) -> str:
    import torch

    from chatmill.train.checkpoint import list_checkpoints, open_checkpoint
    from chatmill.train.distributed import World

    for path in list_checkpoints(place / "x"):
        open_checkpoint(path, World(0, 1, torch.device("cpu")))
    return ""


BUILDS = Trial(
    "failing calls, prepare",
    "Makes each call to open, read, write, fsync, rename, mmap and others in `chatmill prepare` fail or transfer "
    "only half of the bytes. The command must print a one-line error or give the right bytes. The old dataset must "
    "be intact, and the next build must give the right bytes",
    builds,
    full=100_000,
    short=5,
    in_memory=True,
)
RUNS = Trial(
    "failing calls, training",
    "Makes each system call of `chatmill train` fail. The run must print a one-line error or end with the right "
    "result. Every checkpoint must open, and the next command must reach the weights, optimizer state and losses of "
    "an uninterrupted run",
    runs,
    full=100_000,
    short=4,
    in_memory=True,
)

WRITES_OF_BUILDS = replace(BUILDS, work=partial(builds, kinds=("write",)))
WRITES_OF_RUNS = replace(RUNS, work=partial(runs, kinds=("write",)))
READS_OF_BUILDS = replace(BUILDS, work=partial(builds, kinds=("read",)))
