from __future__ import annotations

import errno
import hashlib
import json
import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from model_fixtures import small_gpt
from safetensors.torch import load_file, save_file

from chatmill.errors import DataError, UsageError
from chatmill.train.checkpoint import choose, open_checkpoint, restore, save, set_aside_later
from chatmill.train.config import OptimizerConfig
from chatmill.train.distributed import World
from chatmill.train.run_dir import open_resumed
from chatmill.train.sharded_tensors import ShardedTensors, TensorEntry, TensorRows, file_info, write_tensors
from chatmill.train.step import make_optimizer

ALONE = World(0, 1, torch.device("cpu"))


def test_write_tensors_writes_a_valid_safetensors_file(tmp_path):
    tensors = {
        "a": torch.arange(6.0).reshape(2, 3),
        "b": torch.tensor(3.5),
        "c": torch.ones(4, dtype=torch.bfloat16),
        "d": torch.arange(3),
        "none": torch.empty(0, 5),
    }
    entries = [TensorEntry(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]
    info = write_tensors(tmp_path / "x.safetensors", entries, iter(tensors.values()))
    assert info == file_info(tmp_path / "x.safetensors")
    read = load_file(tmp_path / "x.safetensors")
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)
    pieces = ShardedTensors([tmp_path / "x.safetensors"])
    assert {name: pieces.shape(name) for name in pieces.names} == {n: tuple(t.shape) for n, t in tensors.items()}
    assert torch.equal(pieces.read("b", 0, 1), tensors["b"])


@given(st.integers(0, 20), st.lists(st.integers(0, 20), max_size=4), st.integers(0, 20), st.integers(0, 20))
def test_rows_are_read_from_any_number_of_parts(tmp_path_factory, rows, cuts, one, other):
    folder = tmp_path_factory.mktemp("pieces")
    tensor = torch.arange(rows * 2.0).reshape(rows, 2)
    edges = [0, *sorted(min(cut, rows) for cut in cuts), rows]
    paths = []
    for number, (start, stop) in enumerate(pairwise(edges)):
        entry = TensorEntry("t", (stop - start, 2), torch.float32, TensorRows(start, rows))
        paths.append(folder / f"{number}.safetensors")
        write_tensors(paths[-1], [entry], iter([tensor[start:stop]]))
    start, stop = sorted((min(one, rows), min(other, rows)))
    pieces = ShardedTensors(paths)
    assert pieces.shape("t") == (rows, 2)
    assert torch.equal(pieces.read("t", start, stop), tensor[start:stop])


def test_missing_rows_are_an_error(tmp_path):
    entry = TensorEntry("t", (2,), torch.float32, TensorRows(3, 9))
    write_tensors(tmp_path / "x", [entry], iter([torch.ones(2)]))
    with pytest.raises(DataError, match="t: rows 2 to 5 are incomplete"):
        ShardedTensors([tmp_path / "x"]).read("t", 2, 5)


def test_optimizer_moments_are_restored_exactly(tmp_path):
    model = small_gpt()
    optimizer = make_optimizer(model, OptimizerConfig(learning_rate=0.1, beta1=0.9, beta2=0.9, weight_decay=0.0))
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    path = save(tmp_path, {"step": 1}, model, optimizer, ALONE, sharded=True, keep=1, about=None)
    other = small_gpt(seed=3)
    fresh = make_optimizer(other, OptimizerConfig(learning_rate=0.1, beta1=0.9, beta2=0.9, weight_decay=0.0))
    restore(open_checkpoint(path, ALONE), other, fresh)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
        assert optimizer.state[one].keys() == fresh.state[two].keys() == {"step", "exp_avg", "exp_avg_sq"}
        for name, value in optimizer.state[one].items():
            assert torch.equal(value, fresh.state[two][name])
            assert value.dtype == fresh.state[two][name].dtype
    assert np.isclose(float(fresh.state[next(other.parameters())]["step"]), 1.0)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_all_files_of_a_checkpoint_have_the_permissions_of_new_files(tmp_path, sharded, mask):
    """safetensors creates files that only their owner can read, whatever the umask is."""
    model = small_gpt()
    optimizer = make_optimizer(model, OptimizerConfig(learning_rate=0.1, beta1=0.9, beta2=0.9, weight_decay=0.0))
    before = os.umask(mask)
    try:
        path = save(
            tmp_path, {"step": 1}, model, optimizer, ALONE, sharded=sharded, keep=1, about={"training.json": b"{}"}
        )
    finally:
        os.umask(before)
    files = [file for file in path.rglob("*") if file.is_file()]
    assert sum(file.suffix == ".safetensors" for file in files) > 1, files
    assert {file.stat().st_mode & 0o777 for file in files} == {0o666 & ~mask}


def test_an_old_checkpoint_with_other_files_is_kept(tmp_path):
    model = small_gpt()
    optimizer = make_optimizer(model, OptimizerConfig(learning_rate=0.1, beta1=0.9, beta2=0.9, weight_decay=0.0))

    def save_step(step: int) -> Path:
        return save(tmp_path, {"step": step}, model, optimizer, ALONE, sharded=True, keep=1, about={"x.json": b"{}"})

    (save_step(1) / "model/notes.txt").write_text("mine")
    save_step(2)
    assert (tmp_path / "step_00000001/model/notes.txt").read_text() == "mine"
    (tmp_path / "step_00000001/model/notes.txt").rename(tmp_path / "notes.txt")
    save_step(3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "step_00000003"]
    assert set_aside_later(tmp_path, 2) == [tmp_path / "step_00000003.left"]
    (tmp_path / "step_00000003.left/notes.txt").write_text("mine")
    save_step(3)
    assert set_aside_later(tmp_path, 2) == [tmp_path / "step_00000003.left1"]
    assert (tmp_path / "step_00000003.left/notes.txt").read_text() == "mine"


@pytest.mark.parametrize("name", ["config.json", "loss.svg", "rows", "mine.jsonl"])
def test_a_run_does_not_start_in_a_folder_with_other_files(tmp_path, name):
    (tmp_path / name).write_text('{"model_type": "qwen3"}')
    for resume in (None, "auto"):
        with pytest.raises(UsageError, match=rf"contains {name}, but is not a run folder; use another"):
            open_resumed(tmp_path, resume, ALONE, otherwise="another", logs=("mine.jsonl",))


def test_a_missing_checkpoint_is_reported_with_the_available_ones(tmp_path):
    with pytest.raises(UsageError) as none:
        choose(tmp_path, str(tmp_path / "nope"))
    assert str(none.value) == (f"{tmp_path}/nope: no such checkpoint; expected auto; {tmp_path} has no checkpoint yet")
    for step in (1, 2):
        (tmp_path / f"step_{step:08d}").mkdir()
    with pytest.raises(UsageError) as some:
        choose(tmp_path, str(tmp_path / "nope"))
    listed = f"{tmp_path}/step_00000001, {tmp_path}/step_00000002"
    assert str(some.value) == f"{tmp_path}/nope: no such checkpoint; expected auto or one of {listed}"
    assert choose(tmp_path, "auto") == tmp_path / "step_00000002"
    with pytest.raises(UsageError) as run:
        choose(tmp_path, str(tmp_path))
    assert str(run.value) == f"{tmp_path}: is a run, not a checkpoint; expected auto or one of {listed}"


def test_a_checkpoint_without_required_keys_is_damaged_even_with_a_valid_hash(tmp_path):
    path = tmp_path / "step_00000001"
    path.mkdir()
    for lacking, said in (("version", {}), ("step", {"version": 1}), ("files", {"version": 1, "step": 1})):
        hashed = hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()
        (path / "checkpoint.json").write_text(json.dumps({**said, "sha256": hashed}))
        with pytest.raises(DataError) as raised:
            open_checkpoint(path, ALONE)
        assert str(raised.value).startswith(f"{path}/checkpoint.json: is damaged; {lacking} is missing")


# Checkpoints from untrusted sources.

LISTED = "state-00000-of-00001.safetensors"


@pytest.fixture
def saved(tmp_path):
    model = small_gpt()
    optimizer = make_optimizer(model, OptimizerConfig(learning_rate=0.1))
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return save(tmp_path, {"step": 3}, model, optimizer, ALONE, sharded=False, keep=9, about={"training.json": b"{}"})


def rewrite(checkpoint, **changes):
    path = checkpoint / "checkpoint.json"
    body = {name: value for name, value in json.loads(path.read_bytes()).items() if name != "sha256"} | changes
    sha256 = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps({**body, "sha256": sha256}))


@pytest.mark.parametrize(
    "name", ["state-!.safetensors", "state-00001-of-00002.safetensors", "more.safetensors", "model/adapter_config.json"]
)
def test_a_file_that_is_not_listed_is_refused(saved, name):
    (saved / name).write_bytes((saved / LISTED).read_bytes())
    with pytest.raises(DataError, match=rf"{name}: this file is not listed in checkpoint.json.*; remove the file; "):
        open_checkpoint(saved, ALONE)


def test_only_listed_files_are_read(saved):
    (saved / "notes.txt").write_text("mine")
    checkpoint = open_checkpoint(saved, ALONE)
    assert checkpoint.state_files() == [saved / LISTED]


@pytest.mark.parametrize(
    "files",
    [
        [],
        {},
        None,
        7,
        {LISTED: [1]},
        {LISTED: ["1", "0" * 64]},
        {LISTED: [True, "0" * 64]},
        {LISTED: [-1, "0" * 64]},
        {LISTED: [10**30, "0" * 64]},
        {"../x": [1, "0" * 64]},
        {"/etc/passwd": [1, "0" * 64]},
        {"model/../../x": [1, "0" * 64]},
        {"state-00000-of-00002.safetensors": [1, "0" * 64]},
        {"state-00000-of-00000.safetensors": [1, "0" * 64]},
    ],
)
def test_a_file_list_of_the_wrong_type_is_a_one_line_error(saved, files):
    rewrite(saved, files=files)
    with pytest.raises(DataError, match=r"checkpoint.json: files.* is .*; expected ") as caught:
        open_checkpoint(saved, ALONE)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("step", [None, "3", -1, 3.0, True, 10**30, [], 4])
def test_a_step_of_the_wrong_type_or_folder_is_a_one_line_error(saved, step):
    rewrite(saved, step=step)
    with pytest.raises(DataError, match=r"checkpoint.json: (step is|is for step)"):
        open_checkpoint(saved, ALONE)


@pytest.mark.parametrize("name", [LISTED, "model/config.json", "checkpoint.json"])
@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero"), id])
def test_files_that_are_not_regular_are_refused(saved, name, make):
    (saved / name).unlink()
    make(saved / name)
    with pytest.raises(DataError, match=rf"{name}: (cannot be read|is missing|has 0 bytes)"):
        open_checkpoint(saved, ALONE)


@pytest.mark.parametrize("pieces", ["[]", "7", '{"weights/norm.weight": 7}', '{"weights/norm.weight": [-1, 2]}'])
def test_impossible_parts_of_a_tensor_are_a_one_line_error(saved, pieces, tmp_path):
    raw = (saved / LISTED).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length]) | {"__metadata__": {"pieces": pieces}}
    text = json.dumps(header).encode()
    (tmp_path / "x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])
    with pytest.raises(DataError, match=r"x.safetensors: cannot be read"):
        ShardedTensors([tmp_path / "x.safetensors"])


def test_state_that_the_optimizer_does_not_have_is_refused(saved):
    checkpoint = open_checkpoint(saved, ALONE)
    tensors = load_file(saved / LISTED)
    save_file({**tensors, "optimizer/momentum/norm.weight": torch.zeros(32)}, saved / LISTED)
    model = small_gpt()
    with pytest.raises(
        DataError, match=r"optimizer/momentum/norm.weight .* is not part of the optimizer state of this run"
    ):
        restore(checkpoint, model, make_optimizer(model, OptimizerConfig()))


def test_old_checkpoints_are_removed_unless_they_are_links_or_contain_other_files(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "mine").write_text("kept")
    run = tmp_path / "run"
    model = small_gpt()
    optimizer = make_optimizer(model, OptimizerConfig())

    def write(step, **more):
        save(run, {"step": step}, model, optimizer, ALONE, sharded=False, keep=1, about=None, **more)

    write(1)
    (run / "step_00000001" / "notes.txt").write_text("kept")
    (run / "step_00000000").symlink_to(outside)
    (run / ".step_00000007.saving").symlink_to(outside)
    write(2)
    write(3, protected=run / "step_00000002")
    write(4)
    names = ["step_00000000", "step_00000001", "step_00000004"]
    assert sorted(path.name for path in run.iterdir()) == names
    assert (outside / "mine").read_text() == "kept"


def test_an_unreadable_folder_is_not_treated_as_empty(saved, monkeypatch):
    assert choose(saved.parent, "auto") == saved

    def fails(folder):
        raise OSError(errno.EMFILE, "Too many open files", str(folder))

    monkeypatch.setattr(Path, "iterdir", fails)
    monkeypatch.setattr(os, "scandir", fails)
    with pytest.raises(OSError, match="Too many open files"):
        choose(saved.parent, "auto")
