"""Kill a training run at random moments, again and again, and compare what it comes to with an undisturbed one.

    python scripts/train_gauntlet.py --kills 20
    python scripts/train_gauntlet.py --kills 20 --ranks 2

The run gets SIGKILL, all its ranks at once, and goes on with --resume auto. One moment in five is before its first
step, the others a little after one of its next steps; checkpoints are written slowly, so that some are hit. At the end
weights and moments must have the same bits as those of the undisturbed run, the loss of every step must be equal, and
the audit log must verify with the head that the last checkpoint keeps. All is done in a temporary folder.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import os
import random
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
import torch._dynamo  # which the optimizer would import again in every process that is begun

from chatmill.cli.main import main as chatmill
from chatmill.load.audit_check import verify_log
from chatmill.store import files
from chatmill.train.checkpoint import found, open_checkpoint
from chatmill.train.config import TrainConfig
from chatmill.train.journal import read_metrics
from chatmill.train.loop import train
from chatmill.train.world import World

DATA = Path(__file__).resolve().parents[1] / "data" / "conversations.jsonl"
SIZES = {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_ffn": 64, "max_positions": 256}
LATER = 0.05
"""Seconds, at most, from the end of a step to the kill."""


class Slow(files.Disk):
    """Takes its time to write."""

    def write(self, fd: int, data: bytes) -> int:
        time.sleep(0.0005)
        return os.write(fd, data[: random.randint(1, 1 << 16)])


def config(steps: int, folder: Path) -> TrainConfig:
    values = {
        **SIZES,
        "dataset_dir": str(folder / "data"),
        "audit_dir": str(folder / "logs"),
        "batch_size": 4,
        "block_size": 96,
        "use_loss_mask": True,
        "packing": "bins",
        "max_iters": steps,
        "save_interval": 3,
        "eval_interval": 10,
        "eval_iters": 1,
        "device": "cpu",
    }
    return TrainConfig.from_mapping(values)


def run(folder: Path, name: str, steps: int, each_step: Callable[[], object] = lambda: None) -> None:
    """Train, or go on with it."""
    torch.set_num_threads(1)
    files.disk = Slow()
    train(
        config(steps, folder),
        model_name=name,
        out_dir=folder / "out",
        resume="auto",
        watch=lambda step: each_step() and None,
        quiet=True,
    )


def started(folder: Path, name: str, steps: int, ranks: int) -> tuple[int, int]:
    """Begin a run in processes of a group of their own: its leader, and a pipe that gets a byte at every step."""
    told, tell = os.pipe()
    leader = os.fork()
    if leader:
        os.close(tell)
        return leader, told
    try:
        os.setsid()
        if ranks > 1:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            os.environ |= {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            others = []
            for rank in range(1, ranks):
                other = os.fork()
                if other == 0:
                    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                    run(folder, name, steps)
                    os._exit(0)
                others.append(other)
            os.environ |= {"RANK": "0", "LOCAL_RANK": "0"}
        run(folder, name, steps, lambda: os.write(tell, b"."))
        if ranks > 1:
            for other in others:
                os.waitpid(other, 0)
        os._exit(0)
    finally:
        os._exit(1)


def killed(folder: Path, name: str, steps: int, ranks: int, after: int, seconds: float) -> bool:
    """Begin or go on, and kill some seconds after so many of its steps; whether it still ran."""
    leader, told = started(folder, name, steps, ranks)
    while after > 0 and (seen := os.read(told, after)):
        after -= len(seen)
    time.sleep(seconds)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)
    _, status = os.waitpid(leader, 0)
    os.close(told)
    return os.WIFSIGNALED(status)


def finished(folder: Path, name: str, steps: int, ranks: int) -> None:
    leader, told = started(folder, name, steps, ranks)
    _, status = os.waitpid(leader, 0)
    os.close(told)
    if os.waitstatus_to_exitcode(status):
        raise SystemExit(f"{name}: the run did not end well")


def outcome(folder: Path, name: str) -> dict[str, object]:
    """What a run came to: the hashes of its tensors, and its loss curve."""
    run = folder / "out" / name
    last = found(run)[-1]
    paths = [*sorted(last.glob("state-*")), last / "model" / "model.safetensors"]
    curve = [(line["step"], line.get("loss"), line.get("val_loss")) for line in read_metrics(run)]
    return {
        "files": {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths},
        "curve": curve,
    }


def audited(folder: Path, name: str) -> int:
    """Hold the audit log against the dataset and the last checkpoint; how many lines were abandoned."""
    last = open_checkpoint(found(folder / "out" / name)[-1], World(0, 1, torch.device("cpu")))
    said = last.said["audit"]
    checked = verify_log(folder / "logs" / said["log"], folder / "data", heads={"the checkpoint": said["head"]})
    if checked.fault is not None:
        raise SystemExit(f"the audit log does not verify: {checked.fault}")
    return checked.abandoned


def gauntlet(kills: int, steps: int, ranks: int, seed: int, folder: Path) -> Counter[str]:
    rng, counts = random.Random(seed), Counter[str]()
    sys.argv = ["chatmill", "prepare", str(DATA), "-o", str(folder / "data"), "--val-split", "0.1", "--workers", "1"]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        chatmill()
    finished(folder, "undisturbed", steps, ranks)
    for number in range(kills):
        # Few enough steps that the run cannot come to its end before the last kill.
        after, seconds = rng.randint(1, max(1, steps // kills)), rng.uniform(0, LATER)
        if number % 5 == 4:
            after, seconds = 0, rng.uniform(0, 10 * LATER)
        counts["killed while it ran"] += killed(folder, "killed", steps, ranks, after, seconds)
        counts["hit a checkpoint that was being written"] += any((folder / "out" / "killed").glob(".step_*"))
    finished(folder, "killed", steps, ranks)
    mine, right = outcome(folder, "killed"), outcome(folder, "undisturbed")
    for what in ("files", "curve"):
        if mine[what] != right[what]:
            raise SystemExit(f"after {kills} kills the {what} differ: {mine[what]} instead of {right[what]}")
    counts["tried"], counts["steps"] = kills, steps
    counts["abandoned lines of the audit log"] = audited(folder, "killed")
    counts["files of equal bits"] = len(mine["files"])  # type: ignore[arg-type]
    counts["equal losses"] = len(mine["curve"])  # type: ignore[arg-type]
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="chatmill-train-") as folder:
        counts = gauntlet(args.kills, args.steps, args.ranks, args.seed, Path(folder))
    for name, count in counts.items():
        print(f"{name:<42} {count:>6}")
    return 0 if counts["killed while it ran"] == args.kills else 1


if __name__ == "__main__":
    sys.exit(main())
