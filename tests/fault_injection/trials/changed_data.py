"""Without `--verify`, a token id outside the vocabulary must still stop the run before the step that reads it."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from fault_injection.processes import apart, load_torch
from fault_injection.trial import Tally, Trial
from fault_injection.trials.damage import files_of, flip

STEPS = 45
"""Three epochs."""


def work(size: int, seed: int, folder: Path, tally: Tally) -> None:
    from train_fixtures import prepare

    load_torch()
    rng = random.Random(seed)
    data = prepare(folder, "sums", seed=seed)
    vocab_size = _vocab_size(data)
    for number in range(size):
        place = folder / str(number)
        shutil.copytree(data, place / "data")
        if number % 3 == 2:
            what, verify, at = "an id outside the vocabulary", False, -1
            tokens = np.memmap(place / "data/train/shard_00000/tokens.bin", dtype="<u2", mode="r+")
            tokens[rng.randrange(len(tokens))] = rng.choice([vocab_size, 65535])
            tokens.flush()
            path = place
        else:
            paths = [path for path in files_of(place / "data") if path.suffix in (".bin", ".idx")]
            path, verify, at = rng.choice(paths), True, -1 if number % 3 else rng.randrange(1, STEPS - 1)
            what = f"a bit of {path.name} " + ("before the run" if at < 0 else f"after step {at}")
            if at < 0:
                path.write_bytes(flip(path.read_bytes(), rng))
        ended = apart(lambda place=place, path=path, at=at, verify=verify: train(place, path, at, verify=verify))
        if ended.value is not None:
            tally.is_wrong(f"{what}: the run continued to its end, step {ended.value}")
        else:
            tally.judge(found=bool(ended.refused), lost=f"{what}: {ended.broke or 'killed'}")
        shutil.rmtree(place)


def _vocab_size(data: Path) -> int:
    from chatmill.store.metadata import read_metadata

    return read_metadata(data).vocab_size


def train(place: Path, path: Path, at: int, *, verify: bool) -> int:
    from train_fixtures import config

    from chatmill.train import train_model

    def change(record: Any) -> None:
        if record.step == at:
            with path.open("r+b") as file:
                first = file.read(1)
                file.seek(0)
                file.write(bytes([first[0] ^ 1]))

    changes = {"max_iters": STEPS, "save_interval": 10, "audit_dir": None, "use_loss_mask": False}
    settings = config(**changes, verify=verify)
    result = train_model(
        settings, model_name="run", dataset_dir=place / "data", out_dir=place, watch=change, quiet=True
    )
    return result.step


TRIAL = Trial(
    "data changed during training",
    "Flips a bit of a file before or during `train --verify`, or stores an id outside the vocabulary. The run must "
    "stop with a one-line error",
    work,
    full=60,
    short=3,
    in_memory=True,
)
