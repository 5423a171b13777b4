from __future__ import annotations

import functools
import os
import shutil
import signal
import tempfile
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from child_processes import start_child
from model_fixtures import save_qwen
from safetensors.torch import load_file, save_file
from train_fixtures import curve, ranks, trained

from chatmill.store import files
from chatmill.store.files import Disk
from chatmill.train import sharded_save
from chatmill.train.checkpoint import list_checkpoints

WAY: dict[str, Any] = {
    "parallel": "fsdp",
    "save_interval": 2,
    "keep_checkpoints": 9,
    "n_layer": 2,
    "lr_schedule": "constant",
}
ONE = {"max_iters": 2, "save_interval": 0}
MARKER, INDEX = "checkpoint.json", "model.safetensors.index.json"
KILLS = [
    # Each tuple contains the rank to kill, the operation at which to kill it, and part of the file or folder name.
    (1, "write", "model-00002-of-"),
    (0, "create", INDEX),
    (0, "create", MARKER),
    (0, "rename", "step_00000002"),
    (0, "renamed", "step_00000002"),
]


class KillingDisk(Disk):
    def __init__(self, operation: str, name: str) -> None:
        self._at, self._names = (operation, name), {}

    def _reach(self, operation: str, path: Path) -> None:
        if operation == self._at[0] and self._at[1] in path.name:
            os.kill(os.getpid(), signal.SIGKILL)

    def create(self, path: Path) -> int:
        self._reach("create", path)
        fd = super().create(path)
        self._names[fd] = path
        return fd

    def write(self, fd: int, data: Any) -> int:
        if self._at[0] == "write" and self._at[1] in self._names[fd].name:
            super().write(fd, memoryview(data)[: len(data) // 2])
            self._reach("write", self._names[fd])
        return super().write(fd, data)

    def rename_new(self, source: Path, target: Path) -> None:
        self._reach("rename", target)
        super().rename_new(source, target)
        self._reach("renamed", target)


def step(data: Path, folder: Path, *, resume: str | None = None, **changes: Any) -> list[Any]:
    sharded_save.SHARD_BYTES = 4000
    return curve(trained(data, folder, resume=resume, **{**WAY, **changes}).folder)


def killed(data: Path, folder: Path, victim: int, operation: str, name: str, **changes: Any) -> None:
    with tempfile.TemporaryDirectory() as place:

        def run_rank(rank: int) -> None:
            dist.init_process_group("gloo", init_method=f"file://{place}/meet", rank=rank, world_size=2)
            if rank == victim:
                files.disk = KillingDisk(operation, name)
            step(data, folder, resume="auto", **changes)

        children = [start_child(functools.partial(run_rank, rank)) for rank in range(2)]
        wait([child.sentinel for child in children])
        children[victim].join(60)
        for child in children:
            child.kill()
            child.join()
        assert children[victim].exitcode == -signal.SIGKILL, f"{operation} {name} was not reached"


def contents(checkpoint: Path) -> dict[str, bytes]:
    return {
        path.relative_to(checkpoint).as_posix(): path.read_bytes() for path in checkpoint.rglob("*") if path.is_file()
    }


@pytest.fixture(scope="module")
def undisturbed(sums_data, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    ranks(2, lambda _: step(sums_data, folder, max_iters=6))
    return folder / "run"


def test_a_rank_killed_during_a_save_leaves_a_run_that_resumes_bitwise(undisturbed, sums_data, tmp_path):
    """A rank is killed while writing a file, before creating one, and before or after it publishes a checkpoint."""
    for rank, operation, name in KILLS:
        killed(sums_data, tmp_path, rank, operation, name, max_iters=6)
        assert len(list_checkpoints(tmp_path / "run")) == (operation == "renamed")
    losses, _ = ranks(2, lambda _: step(sums_data, tmp_path, resume="auto", max_iters=6))
    assert losses == [list(each) for each in curve(undisturbed)]
    mine, right = list_checkpoints(tmp_path / "run"), list_checkpoints(undisturbed)
    assert {path.name: contents(path) for path in mine} == {path.name: contents(path) for path in right}
    assert len(list((mine[-1] / "model").glob("model-*.safetensors"))) > 4
    assert not list((tmp_path / "run").glob(".step*"))


def test_runs_resume_from_two_ranks_to_four_and_from_four_to_one(undisturbed, sums_data, tmp_path):
    shutil.copytree(undisturbed, tmp_path / "run")
    ranks(4, lambda _: step(sums_data, tmp_path, resume="auto", max_iters=8))
    step(sums_data, tmp_path, resume="auto", max_iters=10, parallel="ddp")
    right = trained(sums_data, tmp_path, name="alone", **{**WAY, "parallel": "ddp", "max_iters": 10})
    np.testing.assert_allclose(curve(tmp_path / "run"), curve(right.folder), rtol=0, atol=1e-5)
    losses = ranks(2, lambda _: step(sums_data, tmp_path, name="more", init_from_model=str(tmp_path / "run"), **ONE))[0]
    whole = trained(sums_data, tmp_path, name="whole", init_from_model=str(tmp_path / "run"), **ONE)
    np.testing.assert_allclose(losses, curve(whole.folder), rtol=0, atol=1e-5)


def test_adapters_on_a_sharded_base_train_like_in_one_process(sums_data, tmp_path):
    base = save_qwen(tmp_path / "base", vocab_size=300)
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(base / "model.safetensors").items()}
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    way = {"init_from_model": str(base), "lora": {"r": 4}, "max_iters": 4, "save_interval": 4}
    close = {"float32": 1e-5, "bfloat16": 0.02}
    curves = ranks(2, lambda _: [step(sums_data, tmp_path, name=f"two-{dtype}", dtype=dtype, **way) for dtype in close])
    assert curves[0] == curves[1]
    for dtype, mine in zip(close, curves[0], strict=True):
        one = trained(sums_data, tmp_path, name=f"one-{dtype}", dtype=dtype, lr_schedule="constant", **way)
        np.testing.assert_allclose(mine, curve(one.folder), rtol=0, atol=close[dtype])
        saved, right = (
            load_file(tmp_path / f"{name}-{dtype}/step_00000004/model/adapter_model.safetensors")
            for name in ("two", "one")
        )
        assert saved.keys() == right.keys()
        for name, tensor in right.items():
            assert saved[name].dtype == torch.float32
            torch.testing.assert_close(saved[name], tensor, rtol=0, atol=10 * close[dtype])
