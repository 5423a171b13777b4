"""Kill a training run repeatedly, and resume it after each kill. One in five kills happens within half a second of the
start of the process, and the others happen shortly after a training step. Checkpoints are written slowly, so that some
kills happen while a checkpoint is being saved.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chatmill.store import files
from fault_injection import TESTS
from fault_injection.disks import Dribbling
from fault_injection.processes import Ended, begin, load_torch, outcome
from fault_injection.trial import Tally, Trial

DATA = TESTS.parent / "data" / "conversations.jsonl"
CONFIG: dict[str, Any] = {
    "n_layer": 2,
    "n_embd": 32,
    "n_head": 4,
    "n_ffn": 64,
    "max_positions": 256,
    "batch_size": 4,
    "block_size": 96,
    "use_loss_mask": True,
    "packing": "bins",
    "save_interval": 3,
    "eval_interval": 10,
    "eval_iters": 1,
    "device": "cpu",
}
STEPS_A_KILL = 20
LATER = 0.05
"""Maximum seconds from the end of a step to the kill."""


class Runs:
    def __init__(self, folder: Path, steps: int) -> None:
        from train_fixtures import run_chatmill

        load_torch()
        self.folder, self.steps = folder, steps
        run_chatmill("prepare", str(DATA), "-o", str(folder / "data"), "--val-split", "0.1", "--workers", "1")

    def train(self, name: str, each_step: Callable[[], object] = lambda: None, **changes: Any) -> None:
        from chatmill.train.config import TrainConfig
        from chatmill.train.loop import train_model

        files.disk = Dribbling(1 << 16)
        places = {"dataset_dir": str(self.folder / "data"), "audit_dir": str(self.folder / f"logs-{name}")}
        config = TrainConfig.from_mapping({**CONFIG, **places, "max_iters": self.steps, **changes})
        watch = lambda step: each_step() and None  # noqa: E731
        train_model(config, model_name=name, out_dir=self.folder / "out", resume="auto", watch=watch, quiet=True)

    def killed(self, name: str, after: int, seconds: float) -> Ended:
        steps_made, send_step = os.pipe()
        child = begin(lambda: self.train(name, lambda: os.write(send_step, b".")))
        os.close(send_step)
        while after > 0 and (seen := os.read(steps_made, after)):
            after -= len(seen)
        time.sleep(seconds)
        ended = child.kill()
        os.close(steps_made)
        return ended

    def came_to(self, name: str) -> dict[str, Any]:
        """Return the hashes of the tensor files in the last checkpoint, and the losses of the run. Raise
        `AssertionError` if the audit log does not match the last checkpoint.
        """
        import torch

        from chatmill.audit import verify_log
        from chatmill.train.checkpoint import list_checkpoints, open_checkpoint
        from chatmill.train.distributed import World
        from chatmill.train.run_dir import read_metrics
        from chatmill.train.sharded_tensors import file_info

        run = self.folder / "out" / name
        last = open_checkpoint(list_checkpoints(run)[-1], World(0, 1, torch.device("cpu")))
        said = last.state["audit"]
        log = self.folder / f"logs-{name}" / said["log"]
        checked = verify_log(log, self.folder / "data", heads={"the checkpoint": said["head"]})
        assert checked.fault is None, checked.fault
        tensors = [*sorted(last.path.glob("state-*")), last.path / "model/model.safetensors"]
        curve = [[line["step"], line.get("loss"), line.get("val_loss")] for line in read_metrics(run)]
        return {"step": last.step, "files": {path.name: file_info(path).sha256 for path in tensors}, "curve": curve}


def work(size: int, seed: int, folder: Path, tally: Tally) -> None:
    rng, runs = random.Random(seed), Runs(folder, STEPS_A_KILL * size)
    tally.expected = size
    undisturbed = begin(lambda: runs.train("undisturbed")).end(600)
    assert not (undisturbed.refused or undisturbed.broke), undisturbed
    stood = 0
    for number in range(size):
        # The run has enough steps that it does not end before the last kill.
        after, seconds = rng.randint(1, STEPS_A_KILL), rng.uniform(0, LATER)
        if number % 5 == 4:
            after, seconds = 0, rng.uniform(0, 10 * LATER)
        ended = runs.killed("killed", after, seconds)
        tally.notes["kills hit a checkpoint that was being written"] += any((folder / "out/killed").glob(".step_*"))
        if not ended.killed:
            tally.loses(
                f"kill {number}: the run cannot be resumed: {ended.refused or ended.broke or 'it had already ended'}"
            )
        else:
            stood += 1
    last = begin(lambda: runs.train("killed")).end(600)
    mine, right = outcome(lambda: runs.came_to("killed")), outcome(lambda: runs.came_to("undisturbed"))
    assert right.value is not None, right
    for _ in range(stood):
        if last.refused or last.broke or mine.value is None:
            tally.loses(f"the run after its last kill: {last.refused or last.broke or mine.refused or mine.broke}")
        elif mine.value != right.value:
            differ = [what for what in right.value if mine.value[what] != right.value[what]]
            tally.is_wrong(f"after {size} kills, these differ from the uninterrupted run: {differ}")
        else:
            tally.survives()
    tally.notes["steps in the run"] = runs.steps


TRIAL = Trial(
    "kill at random moments, training",
    "Kills one training run at random moments and resumes it each time. Weights, optimizer state and losses must be "
    "bitwise equal to those of an uninterrupted run, and `audit verify` must accept the log",
    work,
    full=20,
    short=2,
)
