from __future__ import annotations

from pathlib import Path
from typing import Any

from fault_injection.crash_disk import File, Model, Recorder
from fault_injection.disks import Unsynced, in_place
from fault_injection.processes import outcome
from fault_injection.trial import Tally, Trial
from fault_injection.trials.crashes import crashes


class Late(Recorder):
    """Records file operations; files written by other libraries are recorded when they are synced."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._seen: set[Path] = set()

    def make_folder(self, path: Path) -> None:
        # A folder that is created again does not contain its earlier files.
        self._seen = {seen for seen in self._seen if path not in seen.parents}
        super().make_folder(path)

    def create(self, path: Path) -> int:
        self._seen.add(path)
        return super().create(path)

    def sync(self, path: Path) -> None:
        if path.is_file() and path not in self._seen:
            self._seen.add(path)
            place, data = self._inside(path), path.read_bytes()
            self.steps.append(lambda model: model.change(place[:-1], {place[-1]: File(data)}))
        super().sync(path)


def work(size: int, seed: int, folder: Path, tally: Tally) -> None:
    """Write `size` checkpoints in addition to two existing ones; write the last one twice."""
    import torch
    from model_fixtures import small_gpt

    from chatmill.train.checkpoint import clean, list_checkpoints, open_checkpoint, restore, save
    from chatmill.train.config import OptimizerConfig
    from chatmill.train.distributed import World
    from chatmill.train.step import make_optimizer

    alone = World(0, 1, torch.device("cpu"))

    def made() -> tuple[Any, Any]:
        model = small_gpt(seed=seed)
        return model, make_optimizer(model, OptimizerConfig(learning_rate=0.1, beta1=0.9, beta2=0.9, weight_decay=0.0))

    def write(step: int) -> None:
        model, optimizer = made()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(step)
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        save(disk / "run", {"step": step}, model, optimizer, alone, sharded=False, keep=2, about={"a.json": b"{}"})

    def newest() -> int:
        checkpoint = open_checkpoint(list_checkpoints(at / "run")[-1], alone)
        model, optimizer = made()
        restore(checkpoint, model, optimizer)
        assert all(torch.all(parameter == checkpoint.step) for parameter in model.parameters()), "other weights"
        return checkpoint.step

    disk, at = folder / "disk", folder / "crashed"
    disk.mkdir()
    write(1)
    write(2)
    model, recorder = Model(disk), Late(disk)
    last = 2 + size
    with in_place(recorder):
        for step in [*range(3, last + 1), last]:
            write(step)
    read: dict[Any, Any] = {}
    with in_place(Unsynced()):
        for number, kind in crashes(at, model, recorder):
            # An older checkpoint may be incomplete if its removal was interrupted.
            kept = sorted(path for path in list_checkpoints(at / "run")[-1].rglob("*.*") if path.is_file())
            key = tuple((path.relative_to(at), path.read_bytes()) for path in kept)
            if key not in read:
                read[key] = outcome(newest)
            ended = read[key]
            clean(at / "run")
            right = {last} if number == len(recorder.steps) else set(range(2, last + 1))
            whole = ended.value in right and not list((at / "run").glob(".*"))
            what = ended.refused or ended.broke or f"checkpoint {ended.value}"
            tally.judge(survived=whole, lost=f"step {number}, unsynced changes kept: {kind}: {what}")


TRIAL = Trial(
    "power loss, writing checkpoints",
    "Replays every step of writing checkpoints on a simulated disk that loses unsynced data. The newest checkpoint "
    "must be complete",
    work,
    full=4,
    short=1,
    in_memory=True,
)
