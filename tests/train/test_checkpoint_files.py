"""Checkpoints on disk: tensors in pieces, and what a crash at any moment leaves."""

from __future__ import annotations

import shutil
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from model_material import small_gpt
from safetensors.torch import load_file

from chatmill.errors import DataError
from chatmill.store import files
from chatmill.train.checkpoint import clean, found, open_checkpoint, restore, save
from chatmill.train.pieces import Entry, Piece, Pieces, file_info, write_tensors
from chatmill.train.step import make_optimizer
from chatmill.train.world import World

sys.path.append(str(Path(__file__).resolve().parents[1] / "store"))

from crash_disk import File, Model, Recorder, outcomes

ALONE = World(0, 1, torch.device("cpu"))


def test_what_is_written_is_a_safetensors_file(tmp_path):
    tensors = {
        "a": torch.arange(6.0).reshape(2, 3),
        "b": torch.tensor(3.5),
        "c": torch.ones(4, dtype=torch.bfloat16),
        "d": torch.arange(3),
        "none": torch.empty(0, 5),
    }
    entries = [Entry(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]
    info = write_tensors(tmp_path / "x.safetensors", entries, iter(tensors.values()))
    assert info == file_info(tmp_path / "x.safetensors")
    read = load_file(tmp_path / "x.safetensors")
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)
    pieces = Pieces([tmp_path / "x.safetensors"])
    assert {name: pieces.shape(name) for name in pieces.names} == {n: tuple(t.shape) for n, t in tensors.items()}
    assert torch.equal(pieces.read("b", 0, 1), tensors["b"])


@given(st.integers(0, 20), st.lists(st.integers(0, 20), max_size=4), st.integers(0, 20), st.integers(0, 20))
def test_rows_are_read_from_however_many_pieces_they_are_in(tmp_path_factory, rows, cuts, one, other):
    folder = tmp_path_factory.mktemp("pieces")
    tensor = torch.arange(rows * 2.0).reshape(rows, 2)
    edges = [0, *sorted(min(cut, rows) for cut in cuts), rows]
    paths = []
    for number, (start, stop) in enumerate(pairwise(edges)):
        entry = Entry("t", (stop - start, 2), torch.float32, Piece(start, rows))
        paths.append(folder / f"{number}.safetensors")
        write_tensors(paths[-1], [entry], iter([tensor[start:stop]]))
    start, stop = sorted((min(one, rows), min(other, rows)))
    pieces = Pieces(paths)
    assert pieces.shape("t") == (rows, 2)
    assert torch.equal(pieces.read("t", start, stop), tensor[start:stop])


def test_rows_that_no_file_has_are_missed(tmp_path):
    entry = Entry("t", (2,), torch.float32, Piece(3, 9))
    write_tensors(tmp_path / "x", [entry], iter([torch.ones(2)]))
    with pytest.raises(DataError, match="t: rows 2 to 5 are not all there"):
        Pieces([tmp_path / "x"]).read("t", 2, 5)


class Late(Recorder):
    """A recorder that takes note of files which others wrote when they are made safe."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._seen: set[Path] = set()

    def make_folder(self, path):
        # A folder that is made anew holds nothing that was seen under its name before.
        self._seen = {seen for seen in self._seen if path not in seen.parents}
        super().make_folder(path)

    def create(self, path):
        self._seen.add(path)
        return super().create(path)

    def sync(self, path):
        if path.is_file() and path not in self._seen:
            self._seen.add(path)
            place, data = self._inside(path), path.read_bytes()
            self.steps.append(lambda model: model.change(place[:-1], {place[-1]: File(data)}))
        super().sync(path)


def write(folder: Path, step: int) -> None:
    """A checkpoint whose weights are all the number of its step."""
    model = small_gpt()
    optimizer = make_optimizer(model, lr=0.1, betas=(0.9, 0.9), eps=1e-8, weight_decay=0.0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(step)
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    save(folder, {"step": step}, model, optimizer, ALONE, sharded=False, keep=2, about={"training.json": b"{}"})


def test_a_crash_at_any_moment_leaves_whole_checkpoints_of_which_one_is_the_newest(tmp_path, monkeypatch):
    disk = tmp_path / "disk"
    disk.mkdir()
    write(disk / "run", 1)
    write(disk / "run", 2)
    model, recorder = Model(disk), Late(disk)
    with monkeypatch.context() as patch:
        patch.setattr(files, "disk", recorder)
        write(disk / "run", 3)
        write(disk / "run", 3)
    at, newest, read = tmp_path / "crashed", [], {}
    monkeypatch.setattr(files.Disk, "sync", lambda self, path: None)
    for number in range(len(recorder.steps) + 1):
        if number:
            recorder.steps[number - 1](model)
        for keep in outcomes(number).values():
            model.crash(at, keep)
            checkpoints = found(at / "run")
            # Removing an old one may be cut short: only then is it not whole, and a newer one is there.
            key = tuple(
                (path.relative_to(at), path.read_bytes())
                for path in sorted(checkpoints[-1].rglob("*.*"))
                if path.is_file()
            )
            if key not in read:
                checkpoint = open_checkpoint(checkpoints[-1], ALONE)
                opened = small_gpt()
                restore(checkpoint, opened, make_optimizer(opened, lr=0.1, betas=(0, 0), eps=0.1, weight_decay=0))
                read[key] = checkpoint.step
                assert all(torch.all(parameter == checkpoint.step) for parameter in opened.parameters())
            newest.append(read[key])
            clean(at / "run")
            assert not list((at / "run").glob(".*"))
            shutil.rmtree(at)
    assert newest[0] == 2
    assert newest[-1] == 3
    assert set(newest) == {2, 3}


def test_moments_come_back_as_they_were(tmp_path):
    model = small_gpt()
    optimizer = make_optimizer(model, lr=0.1, betas=(0.9, 0.9), eps=1e-8, weight_decay=0.0)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    path = save(tmp_path, {"step": 1}, model, optimizer, ALONE, sharded=True, keep=1, about=None)
    other = small_gpt(seed=3)
    fresh = make_optimizer(other, lr=0.1, betas=(0.9, 0.9), eps=1e-8, weight_decay=0.0)
    restore(open_checkpoint(path, ALONE), other, fresh)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
        assert optimizer.state[one].keys() == fresh.state[two].keys() == {"step", "exp_avg", "exp_avg_sq"}
        for name, value in optimizer.state[one].items():
            assert torch.equal(value, fresh.state[two][name])
            assert value.dtype == fresh.state[two][name].dtype
    assert np.isclose(float(fresh.state[next(other.parameters())]["step"]), 1.0)
