from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from train_fixtures import config, prepare, trained, write_files

from chatmill.errors import DataError
from chatmill.train import open_model, train_model
from chatmill.train.checkpoint_files import list_checkpoints
from chatmill.train.generation import generate
from chatmill.train.score import score_model
from chatmill.train.step import unknown_id


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("data"), "sums", "--val-split", "0.2")


@pytest.fixture
def data(original, tmp_path):
    shutil.copytree(original, tmp_path / "sums")
    return tmp_path / "sums"


def change(data, name="tokens.bin", split="train"):
    with (data / split / "shard_00000" / name).open("r+b") as file:
        byte = file.read(1)[0]
        file.seek(0)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize(("name", "split"), [("tokens.bin", "train"), ("mask.bin", "val"), ("spans.bin", "train")])
def test_changed_data_is_refused_at_the_start(data, tmp_path, name, split):
    change(data, name, split)
    with pytest.raises(
        DataError, match=rf"{split}/shard_00000/{name}: sha256 is .*…, expected .*…; the file has changed"
    ):
        trained(data, tmp_path, verify=True)
    assert not (tmp_path / "run").exists()


def test_verify_does_not_change_the_run(data, tmp_path):
    plain, checked = (trained(data, tmp_path, name=name, verify=name == "checked") for name in ("plain", "checked"))
    files = [(path.name, path.read_bytes()) for path in sorted(plain.checkpoint.glob("state-*"))]
    assert files == [(path.name, path.read_bytes()) for path in sorted(checked.checkpoint.glob("state-*"))]


def run_changed(data, folder, after, **changes):
    settings = config(verify=True, max_iters=60, save_interval=5, **changes)

    def watch(record):
        if record.step == after:
            change(data)

    train_model(settings, model_name="run", dataset_dir=data, out_dir=folder, watch=watch, quiet=True)


def test_changed_data_stops_the_run_and_sets_unverified_checkpoints_aside(data, tmp_path):
    with pytest.raises(
        DataError, match=r"tokens.bin: .*the file has changed; the run stops after step .*--resume auto"
    ):
        run_changed(data, tmp_path, 31)
    kept = [path.name for path in list_checkpoints(tmp_path / "run")]
    aside = sorted(path.name for path in (tmp_path / "run").glob("*.left"))
    assert aside
    assert all(name < aside[0] for name in kept) and all(int(name.split("_")[1]) <= 31 for name in kept)
    with pytest.raises(DataError, match="the file has changed"):
        trained(data, tmp_path, resume="auto", verify=True, max_iters=60, save_interval=5)
    change(data)
    assert trained(data, tmp_path, resume="auto", verify=True, max_iters=60, save_interval=5).step == 60


def test_data_that_changes_in_the_last_epoch_is_found_before_the_last_checkpoint(data, tmp_path):
    with pytest.raises(DataError, match=r"the file has changed; the run stops after step 60"):
        run_changed(data, tmp_path, 59)
    assert not (tmp_path / "run" / "step_00000060").exists()


def test_data_of_other_programs_is_compared_with_the_first_check(tmp_path):
    data = write_files(tmp_path / "theirs", [[1, 2, 3, 4]] * 48, [[0, 1, 1, 1]] * 48)
    with pytest.raises(DataError, match=r"tokens.bin: .*the file has changed; the run stops after"):
        run_changed(data, tmp_path, 31, pad_token_id=0)


def with_unknown_token(data, split="train"):
    path = data / split / "shard_00000" / "tokens.bin"
    tokens = np.fromfile(path, dtype="<u2")
    tokens[5] = 60_000
    tokens.tofile(path)
    return data


def test_an_id_outside_the_vocabulary_ends_the_run_before_its_step_and_names_the_episode(data, tmp_path):
    with_unknown_token(data)
    with pytest.raises(
        DataError, match=rf"^{data}: episode 0 has the token id 60000; the model's vocabulary size is \d+; .*verify"
    ):
        trained(data, tmp_path, max_iters=20)


def test_an_id_outside_the_vocabulary_in_val_ends_the_evaluation(data, tmp_path):
    with_unknown_token(data, "val")
    with pytest.raises(DataError, match=r"episode 0 has the token id 60000"):
        trained(data, tmp_path, max_iters=2, eval_interval=1, eval_samples=0)
    with pytest.raises(DataError, match=r"(prompt|episode) 0 has the token id 60000"):
        trained(data, tmp_path, name="samples", max_iters=2, eval_interval=1)
    model = open_model(trained(data, tmp_path, name="model", max_iters=1).checkpoint / "model")
    with pytest.raises(DataError, match=r"has the token id 60000, but the model's vocabulary size is"):
        score_model(model, data)
    with pytest.raises(DataError, match=r"prompt 1 has the token id 60000"):
        generate(model, [[1], [2, 60000]], max_tokens=1, end_ids=[0])


def test_padding_and_targets_are_checked_too():
    from chatmill.load.batch import Batch

    def batch(x, y):
        one = torch.zeros(1, 2, dtype=torch.int64)
        segments = torch.tensor([[0, 1]])
        return Batch(torch.tensor([x]), torch.tensor([y]), None, None, one, segments, torch.tensor([[7]]))

    assert unknown_id(batch([1, 2], [2, -100]), 3) is None
    assert unknown_id(batch([3, 2], [2, -100]), 3) == "episode 7 has the token id 3; the model's vocabulary size is 3"
    assert unknown_id(batch([1, 3], [2, -100]), 3) == "the padding has the token id 3; the model's vocabulary size is 3"
    assert unknown_id(batch([1, 2], [9, -100]), 3) == "episode 7 has the token id 9; the model's vocabulary size is 3"
