from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from model_fixtures import plain_loss
from train_fixtures import config, prepare, ranks, trained, write_files

from chatmill.load.loader import EpisodeLoader
from chatmill.train.checkpoint_files import model_folder
from chatmill.train.command import summary
from chatmill.train.load_model import open_model
from chatmill.train.loop import train_model
from chatmill.train.run_dir import read_metrics
from chatmill.train.sharded_tensors import ShardedTensors

KINDS = ("weights/", "optimizer/exp_avg/", "optimizer/exp_avg_sq/")
MIX = {"large": 0.5, "none": 0.2, "small": 0.3}


@pytest.fixture(scope="module")
def mix(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("mix")
    prepare(root, "large", "--val-split", "0.4", seed=1)
    prepare(root, "none", seed=2, count=20)
    prepare(root, "small", "--val-split", "0.3", seed=3, count=20)
    return root


def losses(checkpoint: Path, dataset: Path) -> tuple[float, int]:
    model = open_model(model_folder(checkpoint))
    loader = EpisodeLoader(dataset, config(batch_size=1, epoch_shuffle=False, epoch_drop_last=False), split="val")
    with torch.no_grad():
        parts = [plain_loss(model, loader.get_batch()) for _ in range(loader.plan("val").num_eligible)]
    loader.close()
    return sum(float(total) for total, _ in parts), int(sum(weight for _, weight in parts))


def test_sources_with_val_rows_are_evaluated_separately_and_together(mix, tmp_path, capsys):
    settings = config(mix_sft=MIX, eval_interval=8, eval_samples=0)
    result = train_model(settings, model_name="run", dataset_dir=mix, out_dir=tmp_path)
    printed = capsys.readouterr().err
    sums = {name: losses(result.folder, mix / name) for name in ("large", "small")}
    total, count = (sum(values) for values in zip(*sums.values(), strict=True))
    line = read_metrics(result.folder)[-1]
    assert line["val_loss"] == pytest.approx(total / count, abs=1e-5) and line["val_trained"] == count
    assert result.val_loss == line["val_loss"]
    for name, (loss, trained_tokens) in sums.items():
        assert line[f"val_loss/{name}"] == pytest.approx(loss / trained_tokens, abs=1e-5)
        assert line[f"val_trained/{name}"] == trained_tokens
        assert result.to_json()["val_sources"][name]["loss"] == line[f"val_loss/{name}"]
        assert result.to_json()["val_sources"][name]["trained"] == trained_tokens
    assert not any(name.endswith("/none") for name in line)
    assert json.loads(json.dumps(result.to_json()))["val_sources"]["none"] is None
    notes = [each for each in printed.splitlines() if "no episodes in val" in each]
    assert notes == ["no episodes in val: none; val loss covers large, small"]
    by_source = ", ".join(f"{name} {line[f'val_loss/{name}']:.4f}" for name in sums)
    assert f"over {count:,} trained tokens ({by_source})" in printed
    large, small = by_source.split(", ")
    assert f"val loss by source: {large}, none has no episodes in val, {small}" in summary(result).splitlines()
    picture = (result.folder / "loss.svg").read_text()
    assert re.search(r">large \d\.\d{4}<", picture) and re.search(r">small \d\.\d{4}<", picture)


def test_losses_do_not_depend_on_ranks_and_micro_batches(mix, sums_data, tmp_path):
    settings = {"max_iters": 1, "eval_interval": 1, "save_interval": 0}

    def evaluated(out_dir: Path, **more: object) -> list[float]:
        one = trained(sums_data, out_dir, name="one", **settings, **more)
        mixed = trained(mix, out_dir, name="mix", mix_sft=MIX, **settings, **more)
        return [one.val_loss, mixed.val_loss, *(each["loss"] for each in mixed.val_sources.values() if each)]

    def on_rank(rank: int) -> list[float]:
        # The learning rate is 0, so the loss does not improve after the first evaluation.
        early = {"max_iters": None, "epochs": 1, "eval_interval": 2, "early_stop_patience": 2, "learning_rate": 0.0}
        place = {"name": "early", "checkpoint": "sharded", "save_interval": 5, "parallel": "fsdp"}
        result = trained(mix, tmp_path / "two", mix_sft=MIX, **early, **place)
        assert (result.step, result.best_step, result.best_val_loss) == (6, 2, result.val_loss)
        assert (result.folder / "best" / "model" / "model.safetensors").is_file()
        assert not (result.folder / "step_00000005" / "model").exists()
        # After an evaluation, the sharded checkpoint still contains both moments of every weight.
        stored = ShardedTensors(result.checkpoint.glob("state-*.safetensors"))
        kinds = [{name.removeprefix(kind) for name in stored.names if name.startswith(kind)} for kind in KINDS]
        assert kinds[0] == kinds[1] == kinds[2] and len(kinds[0]) > 3
        return evaluated(tmp_path / "two")

    in_parts = evaluated(tmp_path / "parts", gradient_accumulation_steps=2)
    on_ranks = ranks(2, on_rank)
    assert len(in_parts) == 4
    assert np.ptp([evaluated(tmp_path), in_parts, *on_ranks], axis=0).max() < 1e-5


def test_sample_answers_come_from_sources_with_val_rows(mix, tmp_path):
    result = trained(mix, tmp_path, mix_sft=MIX, max_iters=1, eval_interval=1, eval_samples=2)
    assert "val_exact_rate" in read_metrics(result.folder)[-1]


def test_eval_iters_counts_batches_per_source(mix, tmp_path):
    result = trained(mix, tmp_path, mix_sft=MIX, max_iters=1, eval_interval=1, eval_iters=1, batch_size=2)
    counts = [each["trained"] for each in result.val_sources.values() if each]
    assert len(counts) == 2 and all(0 < count < 16 for count in counts)


def test_a_mix_without_any_val_rows_is_reported(mix, tmp_path, capsys):
    settings = config(mix_sft={"none": 1}, eval_interval=1, max_iters=1)
    result = train_model(settings, model_name="run", dataset_dir=mix, out_dir=tmp_path)
    assert (result.val_loss, result.val_sources) == (None, {})
    assert f"{mix} has no episodes in val; the run does not compute a val loss" in capsys.readouterr().err


def test_a_single_dataset_is_evaluated_without_source_names(sums_data, tmp_path):
    result = trained(sums_data, tmp_path, max_iters=1, eval_interval=1)
    assert result.val_sources == {} and "by source" not in summary(result)
    line = read_metrics(result.folder)[-1]
    assert [name for name in line if name.startswith("val_")][:3] == ["val_loss", "val_perplexity", "val_trained"]
    assert not any("/" in name for name in line)


def test_val_rows_that_are_all_too_short_are_not_evaluated(tmp_path, capsys):
    data = write_files(tmp_path / "data", [[1, 2, 3]] * 8, [[0, 1, 1]] * 8)
    shutil.copytree(data / "train", data / "val")
    np.array([[0, 1], [5, 1]], np.uint64).tofile(data / "val/shard_00000/episodes.idx")
    settings = config(pad_token_id=0, eval_interval=1, max_iters=1)
    result = train_model(settings, model_name="run", dataset_dir=data, out_dir=tmp_path)
    assert result.val_loss is None
    assert "has no episodes in val; the run does not compute a val loss" in capsys.readouterr().err
