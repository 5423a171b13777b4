"""Modify checkpoints in many ways, and update the stored hashes to match. A run that resumes from a modified checkpoint
must give the same result or stop with a one-line error.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

from fault_injection.processes import apart, load_torch
from fault_injection.trial import Tally, Trial

VALUES: tuple[Any, ...] = (None, [], {}, "", "x", -1, 0, 7, 1.5, 1e400, True, 2**31, 2**63, 10**30, [[]], {"a": {}})
STATE = "state-00000-of-00001.safetensors"
STEPS = 4
CPU_SECONDS = 60.0

Attack = tuple[str, Callable[[Path], object]]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield (*path, key)
        if isinstance(inner, dict | list):
            yield from places(inner, (*path, key))


def rewrite(checkpoint: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = checkpoint / "checkpoint.json"
    body = json.loads(path.read_bytes())
    del body["sha256"]
    change(body)
    sha256 = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps({**body, "sha256": sha256}, sort_keys=True) + "\n")


def put(body: dict[str, Any], place: tuple[Any, ...], value: Any) -> None:
    *inner, last = place
    for key in inner:
        body = body[key]
    body[last] = value


def wrong_values(state: dict[str, Any], rng: random.Random) -> Iterator[Attack]:
    body = {name: value for name, value in state.items() if name != "sha256"}
    for place in places(body):
        for value in rng.sample(VALUES, 4):
            changed = copy.deepcopy(body)
            put(changed, place, value)
            if changed != body:
                name = ".".join(map(str, place))
                yield (
                    f"{name} is {value!r}",
                    lambda checkpoint, place=place, value=value: rewrite(
                        checkpoint, lambda now: put(now, place, value)
                    ),
                )


def moved_cursors() -> Iterator[Attack]:
    """Yield attacks that change all cursors of a checkpoint consistently, so that the checkpoint contradicts only the
    audit log on disk.
    """

    def move(name: str, change: Callable[[int], int]) -> Callable[[dict[str, Any]], None]:
        def edit(body: dict[str, Any]) -> None:
            for cursor in (body["loader"]["cursors"]["train"], body["audit"]["cursor"]):
                cursor[name] = change(cursor[name])
            if name == "step":
                body["stage"]["start"] = body["step"] - body["audit"]["cursor"]["step"]

        return edit

    changes = (lambda at: at + 1, lambda at: max(0, at - 4), lambda at: at + 4, lambda at: 9999)
    for name in ("row", "step", "epoch", "window"):
        for number, change in enumerate(changes):
            edit = move(name, change)
            yield f"the cursor's {name} is moved ({number})", lambda checkpoint, edit=edit: rewrite(checkpoint, edit)


def wrong_files() -> Iterator[Attack]:
    def state_with(checkpoint: Path, name: str) -> None:
        import torch
        from safetensors import safe_open
        from safetensors.torch import save_file

        with safe_open(checkpoint / STATE, "pt") as file:
            steps = [key for key in file.keys() if key.startswith("optimizer/step/")]  # noqa: SIM118
        save_file({key: torch.tensor(1.0) for key in steps}, checkpoint / name)

    for name in (
        "state-!.safetensors",
        "state-00001-of-00002.safetensors",
        "more.safetensors",
        "model/more.safetensors",
    ):
        yield f"{name} is added", lambda checkpoint, name=name: state_with(checkpoint, name)
    for name in ("adapter_config.json", "pytorch_model.bin", "generation_config.json", "model.py"):
        yield f"model/{name} is added", lambda checkpoint, name=name: (checkpoint / "model" / name).write_text("{}")
    for name in (STATE, "model/config.json", "checkpoint.json"):
        for what, make in (
            ("a FIFO", os.mkfifo),
            ("a folder", Path.mkdir),
            ("a link to a device", _device),
            ("gone", id),
        ):
            yield (
                f"{name} is {what}",
                lambda checkpoint, name=name, make=make: ((checkpoint / name).unlink(), make(checkpoint / name)),
            )
    yield (
        "the state is listed twice",
        lambda at: rewrite(
            at, lambda body: body["files"].update({"state-00001-of-00002.safetensors": body["files"][STATE]})
        ),
    )
    yield (
        "a file outside the checkpoint is listed",
        lambda at: rewrite(at, lambda body: body["files"].update({"../other": body["files"][STATE]})),
    )
    yield "no file is listed", lambda at: rewrite(at, lambda body: body.update(files={}))
    yield "the metrics are a FIFO", lambda at: _exchange(at.parent / "metrics.jsonl", os.mkfifo)
    yield "the metrics are damaged", lambda at: (at.parent / "metrics.jsonl").write_text('{"step": "x"}\n')
    yield "the config of the run is a FIFO", lambda at: _exchange(at.parent / "config.json", os.mkfifo)
    yield "the config of the run is a list", lambda at: (at.parent / "config.json").write_text("[]")
    yield "a checkpoint is a FIFO", lambda at: os.mkfifo(at.parent / "step_00000099")
    yield "a checkpoint is a link to another", lambda at: (at.parent / "step_00000099").symlink_to(at.name)


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _exchange(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


class Runs:
    def __init__(self, folder: Path, seed: int) -> None:
        from train_fixtures import prepare

        self.folder = folder
        self.data = prepare(folder, "sums", seed=seed)
        first = apart(lambda: self.train(folder / "first", STEPS - 1, None))
        assert first.value, first
        self.checkpoint = folder / "first" / "run" / f"step_{STEPS - 1:08d}"
        self.right = apart(lambda: self.resumed(folder / "right", lambda at: None)).value
        assert self.right

    def train(self, place: Path, steps: int, resume: str | None) -> dict[str, Any]:
        from train_fixtures import SMALL

        from chatmill.train.command import run

        place.mkdir(exist_ok=True)
        config = {**SMALL, "audit_dir": str(place / "logs"), "dataset_dir": str(self.data), "save_interval": STEPS - 1}
        if resume is None:
            (place / "config.json").write_text(json.dumps(config))
        flags = {"model_name": "run", "out_dir": str(place), "max_iters": str(steps), "log_interval": "1000"}
        named = {"config_file": str(place / "config.json")} if resume is None else {"resume": resume}
        result = run({**flags, **named, "audit_dir": str(place / "logs")})
        assert result.checkpoint is not None
        hashes = [hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(result.checkpoint.glob("state-*"))]
        return {"step": result.step, "loss": result.loss, "hashes": hashes}

    def resumed(self, place: Path, attack: Callable[[Path], object]) -> dict[str, Any]:
        shutil.copytree(self.folder / "first", place)
        attack(place / "run" / self.checkpoint.name)
        return self.train(place, STEPS, "auto")


def work(size: int, seed: int, folder: Path, tally: Tally) -> None:
    load_torch()
    rng, runs = random.Random(seed), Runs(folder, seed)
    state = json.loads((runs.checkpoint / "checkpoint.json").read_bytes())
    values = list(wrong_values(state, rng))
    rng.shuffle(values)
    # Alternate between the kinds of attacks, so that a small run tries every kind.
    in_turn = zip_longest(wrong_files(), moved_cursors(), values)
    attacks = [attack for attacks in in_turn for attack in attacks if attack is not None][:size]
    tally.expected = len(attacks)
    for number, (what, attack) in enumerate(attacks):
        place = folder / str(number)
        ended = apart(lambda place=place, attack=attack: runs.resumed(place, attack), cpu_seconds=CPU_SECONDS)
        if ended.value is not None and ended.value != runs.right:
            tally.is_wrong(f"{what}: the run continues to {ended.value}, expected {runs.right}")
        else:
            lost = f"{what}: {ended.broke or 'killed'}"
            tally.judge(survived=ended.value is not None, found=bool(ended.refused), lost=lost)
        shutil.rmtree(place, ignore_errors=True)


TRIAL = Trial(
    "hostile checkpoints",
    "Changes values and files in checkpoints, and makes the hashes match. The run must resume to the same weights, or "
    "be refused with a one-line error",
    work,
    full=400,
    short=9,
    in_memory=True,
)
