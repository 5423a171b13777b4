from __future__ import annotations

import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from model_fixtures import plain_loss
from train_fixtures import config, curve, prepare, trained, weights, write_files

from chatmill.load.loader import EpisodeLoader
from chatmill.train.checkpoint_files import model_folder
from chatmill.train.gpt import GPT
from chatmill.train.load_model import open_model
from chatmill.train.loop import train_model
from chatmill.train.run_dir import read_metrics
from chatmill.train.score import score_model


def test_evaluation_is_the_mean_over_all_trained_tokens(sums_data, tmp_path):
    result = trained(sums_data, tmp_path, eval_interval=8)
    model = open_model(model_folder(result.folder))
    loader = EpisodeLoader(sums_data, config(batch_size=1, epoch_shuffle=False, epoch_drop_last=False), split="val")
    count = loader.plan("val").num_eligible
    with torch.no_grad():
        parts = [plain_loss(model, loader.get_batch()) for _ in range(count)]
    loss = sum(float(total) for total, _ in parts) / sum(weight for _, weight in parts)
    line = read_metrics(result.folder)[-1]
    assert abs(result.val_loss - loss) < 1e-5
    assert abs(result.val_perplexity - math.exp(loss)) < 1e-3
    assert (line["val_loss"], line["val_trained"]) == (result.val_loss, sum(weight for _, weight in parts))


def test_evaluation_does_not_change_training(sums_data, tmp_path):
    without = trained(sums_data, tmp_path, name="without")
    with_it = trained(sums_data, tmp_path, name="with", eval_interval=1, eval_iters=1)
    assert curve(with_it.folder) == curve(without.folder)
    lines = [line for line in read_metrics(with_it.folder) if "val_loss" in line]
    assert len(lines) == 8
    assert 0 < lines[0]["val_trained"] < 40


def test_values_of_on_eval_are_logged_in_the_metrics(sums_data, tmp_path):
    seen = []

    def ask(model, step):
        seen.append((type(model), model.training, step))
        return {"stop_rate": 0.5}

    train_model(
        config(eval_interval=4), model_name="run", dataset_dir=sums_data, out_dir=tmp_path, quiet=True, on_eval=ask
    )
    assert seen == [(GPT, True, 4), (GPT, True, 8)]
    assert [line["stop_rate"] for line in read_metrics(tmp_path / "run") if "val_loss" in line] == [0.5, 0.5]


@pytest.mark.parametrize("count", [1, 3])
def test_sample_answers_are_the_models_and_do_not_change_training(sums_data, tmp_path, count):
    seen = []

    def watched(model, step):
        asked = score_model(model, sums_data, limit=count, max_tokens=40)
        ends = asked.answers[0].prompt.answer[-1:]
        seen.append([(each.exact, each.ids[-1:] == ends) for each in asked.answers])
        return {}

    settings = {"eval_interval": 8, "max_iters": 24, "learning_rate": 0.03}
    made = {"dataset_dir": sums_data, "out_dir": tmp_path, "quiet": True}
    train_model(config(**settings, eval_samples=0), model_name="without", **made)
    train_model(config(**settings, eval_samples=count), model_name="with", **made, on_eval=watched)
    assert curve(tmp_path / "with") == curve(tmp_path / "without")
    one, other = (weights(tmp_path / name / "step_00000024") for name in ("with", "without"))
    assert one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)
    rates = [(line["val_exact_rate"], line["val_stop_rate"]) for line in evaluations(tmp_path / "with")]
    assert rates == [tuple(np.mean(each, axis=0)) for each in seen]
    assert [line.keys() & {"val_exact_rate", "val_stop_rate"} for line in evaluations(tmp_path / "without")] == [
        set()
    ] * 3


def evaluations(run: Path) -> list[dict]:
    return [line for line in read_metrics(run) if "val_loss" in line]


def test_a_run_without_val_data_says_that_nothing_is_evaluated(tmp_path, capsys):
    data = prepare(tmp_path, "all")
    result = train_model(config(eval_interval=2, max_iters=2), model_name="run", dataset_dir=data, out_dir=tmp_path)
    assert result.val_loss is None
    assert "has no episodes in val; the run does not compute a val loss" in capsys.readouterr().err


def test_val_without_trained_tokens_has_no_loss(tmp_path):
    data = write_files(tmp_path / "data", [[1, 2, 3, 4]] * 8, [[0, 1, 1, 1]] * 8)
    shutil.copytree(data / "train", data / "val")
    mask = data / "val/shard_00000/mask.bin"
    mask.write_bytes(bytes(mask.stat().st_size))
    result = trained(data, tmp_path, pad_token_id=0, max_iters=1, eval_interval=1)
    assert (result.val_loss, result.val_perplexity) == (None, None)
    assert read_metrics(result.folder)[-1] == {
        "step": 1,
        "epoch": 0.5,
        "val_loss": None,
        "val_perplexity": None,
        "val_trained": 0,
    }
