from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
import torch
from model_fixtures import plain_loss
from train_fixtures import SMALL, config, curve, trained, weights, write_files

from chatmill.errors import UsageError
from chatmill.load.loader import EpisodeLoader
from chatmill.store.read import open_dataset
from chatmill.train.checkpoint_files import list_checkpoints, self_sha256
from chatmill.train.gpt import GPT
from chatmill.train.result import StepRecord
from chatmill.train.run_dir import read_metrics


def test_a_run_writes_config_metrics_loss_curve_and_checkpoint(sums_data, tmp_path):
    result = trained(sums_data, tmp_path, eval_interval=4)
    assert sorted(path.name for path in result.folder.iterdir()) == [
        "config.json",
        "first_batch.json",
        "loss.svg",
        "metrics.jsonl",
        "step_00000004",
        "step_00000008",
    ]
    stored = json.loads((result.folder / "config.json").read_text())
    assert stored == {**config(eval_interval=4).to_json(), "dataset_dir": str(sums_data)}
    lines = read_metrics(result.folder)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 4, 5, 6, 7, 8, 8]
    steps = [line for line in lines if "loss" in line]
    assert [sorted(line) for line in steps] == 8 * [
        sorted([*StepRecord._fields, "tokens_per_second", "trained_per_second"])
    ]
    assert sum(line["tokens"] for line in steps) == result.tokens
    assert sum(line["trained"] for line in steps) == result.trained
    assert result.loss == steps[-1]["loss"] < steps[0]["loss"]
    assert (result.step, result.total, result.stopped_by, result.checkpoint) == (
        8,
        8,
        None,
        list_checkpoints(result.folder)[-1],
    )
    picture = ElementTree.fromstring((result.folder / "loss.svg").read_text())
    assert picture.tag.endswith("svg")
    assert len([part for part in picture if part.tag.endswith("polyline")]) == 2


def test_training_equals_adamw_on_the_batches_of_the_loader(sums_data, tmp_path):
    settings = config(max_iters=5)
    result = trained(sums_data, tmp_path, max_iters=5)
    loader = EpisodeLoader(sums_data, settings)
    torch.manual_seed(settings.seed)
    model = GPT(settings.sizes(loader.vocab_size))
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], betas=(0.9, 0.95)
    )
    rates = [0.5, 1.0, *(0.1 + 0.9 * (1 + math.cos(math.pi * way / 3)) / 2 for way in range(3))]
    losses = []
    for rate in rates:
        total, weight = plain_loss(model, loader.get_batch())
        (total / weight).backward()
        losses.append(float(total.detach()) / weight)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * rate
        optimizer.step()
        optimizer.zero_grad()
    np.testing.assert_allclose([loss for _, loss in curve(result.folder)], losses, rtol=0, atol=1e-5)
    for name, tensor in weights(result.checkpoint).items():
        # AdamW amplifies the rounding errors of gradients that are close to zero, so the tolerance is larger than for
        # losses.
        np.testing.assert_allclose(tensor, model.state_dict()[name].numpy(), rtol=0, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("changes", [{"gradient_accumulation_steps": 2}, {"gradient_accumulation_steps": 4}], ids=str)
def test_a_run_does_not_depend_on_gradient_accumulation(sums_data, tmp_path, changes):
    whole = trained(sums_data, tmp_path, name="whole")
    parts = trained(sums_data, tmp_path, name="parts", **changes)
    np.testing.assert_allclose(curve(parts.folder), curve(whole.folder), rtol=0, atol=1e-5)


def test_packed_rows_are_fewer_and_nearly_full(sums_data, tmp_path):
    result = trained(sums_data, tmp_path, packing="bins", block_size=63, max_iters=None, batch_size=2)
    data = EpisodeLoader(sums_data, config()).plan("train")
    rows = data.num_eligible
    assert result.step == result.total < rows // 2
    assert result.tokens > 0.8 * result.step * 2 * 63


def test_a_batch_without_trained_tokens_does_not_cause_nan(tmp_path):
    data = write_files(tmp_path / "data", [[1, 2, 3, 4]] * 8, [[0, 0, 0, 0]] * 6 + [[0, 0, 1, 1]] * 2)
    result = trained(data, tmp_path, batch_size=2, pad_token_id=0, max_iters=4, epoch_shuffle=False)
    assert (result.step, result.trained, result.untrained_rows) == (4, 4, 6)
    assert [line["loss"] for line in read_metrics(result.folder)] == [None, None, None, result.loss]
    assert all(np.isfinite(tensor).all() for tensor in weights(result.checkpoint).values())


def test_training_starts_from_a_run_a_checkpoint_or_a_model_folder(sums_data, tmp_path):
    first = trained(sums_data, tmp_path, name="first")
    for number, folder in enumerate([first.folder, first.checkpoint, first.checkpoint / "model"]):
        name = f"next{number}"
        result = trained(sums_data, tmp_path, name=name, init_from_model=str(folder), learning_rate=0, max_iters=1)
        assert result.step == 1
        for weight, tensor in weights(first.checkpoint).items():
            np.testing.assert_array_equal(weights(result.checkpoint)[weight], tensor)
    with pytest.raises(UsageError, match="nowhere: no such folder"):
        trained(sums_data, tmp_path, name="none", init_from_model="nowhere")


def test_random_order_has_no_epochs(sums_data, tmp_path):
    with pytest.raises(UsageError, match=r"max_iters is null, which means one pass, .* set max_iters"):
        trained(sums_data, tmp_path, batch_sampling_mode="random", max_iters=None)
    assert trained(sums_data, tmp_path, batch_sampling_mode="random", max_iters=2).step == 2


def test_without_max_iters_a_run_makes_one_pass(sums_data, tmp_path):
    result = trained(sums_data, tmp_path, max_iters=None)
    assert result.step == EpisodeLoader(sums_data, config()).plan("train").num_eligible // SMALL["batch_size"]


def test_truncated_conversations_are_counted(sums_data, tmp_path):
    result = trained(sums_data, tmp_path, block_size=20, max_iters=None, epoch_drop_last=False)
    plan = EpisodeLoader(sums_data, config()).plan("train")
    lengths = plan.reader.locate(np.arange(plan.num_episodes)).length
    assert result.cut_episodes == (lengths > 21).sum() > 0
    assert result.cut_tokens == np.maximum(lengths - 21, 0).sum()
    episodes = open_dataset(sums_data)["train"]
    masks = [episodes.mask(number).tolist() for number in range(len(episodes))]
    assert result.answer_cut == sum(len(mask) > 21 and mask[-21] and mask[-22] for mask in masks)


def test_a_checkpoint_without_the_count_of_cut_answers_is_read(sums_data, tmp_path):
    first = trained(sums_data, tmp_path, block_size=20, max_iters=1)
    marker = first.checkpoint / "checkpoint.json"
    state = json.loads(marker.read_text())
    del state["totals"]["answer_cut"], state["sha256"]
    marker.write_text(json.dumps({**state, "sha256": self_sha256(state)}))
    resumed = trained(sums_data, tmp_path, resume="auto", block_size=20, max_iters=2)
    assert (resumed.step, resumed.answer_cut) == (2, 0)
