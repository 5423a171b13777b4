from __future__ import annotations

import json

import numpy as np
import pytest
from train_fixtures import SMALL, config, curve, prepare, trained, write_blocks

from chatmill import pack_chat_blocks
from chatmill.errors import UsageError
from chatmill.load.loader import EpisodeLoader
from chatmill.train.loop import train_model
from chatmill.train.run_dir import read_metrics

SYSTEM, USER, ASSISTANT, END, EOS = 1, 2, 3, 4, 5
TALK = [SYSTEM, 9, END, USER, 10, END, ASSISTANT, 11, 12, END, USER, 13, END, ASSISTANT, 14, END]
MASK = [0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 1, 1, 1]
MARKERS = {"system_id": SYSTEM, "user_id": USER, "assistant_id": ASSISTANT, "end_id": END, "eos_id": EOS}
SIZE = {"block_size": len(TALK) - 1, "pad_token_id": 0}
POST = {"post_training": True, "epoch_drop_last": False, **SIZE}


def test_the_loss_mask_marks_assistant_spans_with_their_markers(tmp_path):
    data = write_blocks(tmp_path / "data", [TALK], [MASK])
    settings = config(batch_size=1, **POST)
    batch = EpisodeLoader(data, settings).get_batch()
    assert batch.x.tolist() == [TALK[:-1]]
    assert batch.loss_mask.tolist() == [[bool(bit) for bit in MASK[1:]]]


def test_the_loss_mask_is_packed_and_aligned_with_the_ids():
    blocks, masks = pack_chat_blocks([TALK], block_size=len(TALK) + 3, **MARKERS)
    assert blocks == [[*TALK, EOS, EOS, EOS]]
    assert masks == [[*(bool(bit) for bit in MASK), False, False, False]]


def test_untrained_tokens_have_targets_of_minus_100(tmp_path):
    data = write_blocks(tmp_path / "data", [TALK], [MASK])
    batch = EpisodeLoader(data, config(batch_size=1, **POST)).get_batch()
    expected = [token if bit else -100 for token, bit in zip(TALK[1:], MASK[1:], strict=True)]
    assert batch.y.tolist() == [expected]


def test_training_ends_after_one_pass_of_the_loader(tmp_path):
    data = prepare(tmp_path, "blocks", "--format", "post-training", "--fit", "blocks", "--max-tokens", "32")
    rows = EpisodeLoader(data, config(block_size=31)).plan("train").num_eligible
    # The last batch is not full, and max_iters is far larger than the number of steps in one pass.
    assert rows % 5
    values = {**SMALL, "block_size": 31, "batch_size": 5, "max_iters": 10_000, "post_training": True}
    values.pop("use_loss_mask")
    result = trained(data, tmp_path, **values)
    assert result.step == result.total == -(-rows // 5)
    assert result.tokens == rows * 31
    said = json.loads((result.checkpoint / "checkpoint.json").read_text())
    assert said["loader"]["cursors"]["train"]["epoch"] == 1
    again = trained(data, tmp_path, **values, resume="auto")
    assert (again.step, again.loss) == (result.step, None)


@pytest.mark.parametrize("packing", ["none", "bins"])
def test_episodes_that_do_not_fill_a_batch_at_the_end_of_the_pass_are_reported(tmp_path, capsys, packing):
    # A block fills its row, so packing has no effect.
    data = write_blocks(tmp_path / "data", [TALK] * 10, [MASK] * 10)
    settings = {**POST, "epoch_drop_last": True, "max_iters": None, "packing": packing, "batch_size": 3}
    chosen = config(**settings)
    train_model(chosen, model_name="run", dataset_dir=data, out_dir=tmp_path)
    assert "1 of 10 episodes do not fill a batch at the end of the epoch and are dropped" in capsys.readouterr().err
    # The note is not repeated when a run resumes, because the setting cannot change.
    train_model(chosen, model_name="run", dataset_dir=data, out_dir=tmp_path, resume="auto")
    assert "fill a batch" not in capsys.readouterr().err


def test_max_iters_may_be_less_than_one_pass(tmp_path):
    data = write_blocks(tmp_path / "data", [TALK] * 9, [MASK] * 9)
    assert trained(data, tmp_path, batch_size=2, max_iters=3, **POST).step == 3


def test_blocks_without_trained_tokens_are_skipped_and_counted(tmp_path):
    nothing = [0] * len(TALK)
    masks = [MASK, nothing, nothing, MASK, nothing, MASK]
    order = {"batch_size": 1, "epoch_shuffle": False, "lr_schedule": "constant", "warmup_iters": 0, "max_iters": None}
    mixed = trained(write_blocks(tmp_path / "mixed", [TALK] * 6, masks), tmp_path, name="a", **order, **POST)
    only = trained(write_blocks(tmp_path / "only", [TALK] * 3, [MASK] * 3), tmp_path, name="b", **order, **POST)
    assert (mixed.step, mixed.skipped_steps, mixed.untrained_rows) == (6, 3, 3)
    assert (only.step, only.skipped_steps, only.untrained_rows) == (3, 0, 0)
    assert [line.get("skipped", 0) for line in read_metrics(mixed.folder)] == [0, 1, 1, 0, 1, 0]
    # A skipped step changes nothing, not even through weight decay or momentum.
    assert [loss for _, loss in curve(mixed.folder)] == [loss for _, loss in curve(only.folder)]
    state = "state-00000-of-00001.safetensors"
    assert (mixed.checkpoint / state).read_bytes() == (only.checkpoint / state).read_bytes()


def test_rows_without_trained_tokens_are_counted(tmp_path):
    data = write_blocks(tmp_path / "data", [TALK] * 4, [MASK, [0] * len(TALK), MASK, MASK])
    result = trained(data, tmp_path, batch_size=2, max_iters=None, **POST)
    assert (result.step, result.skipped_steps, result.untrained_rows) == (2, 0, 1)


def test_an_order_without_epochs_is_refused(tmp_path):
    data = write_blocks(tmp_path / "data", [TALK] * 4, [MASK] * 4)
    with pytest.raises(UsageError, match=r"post_training runs for one pass, .* set batch_sampling_mode to epoch"):
        trained(data, tmp_path, batch_sampling_mode="random", **POST)


def test_a_mix_is_refused_and_one_of_its_sources_is_suggested(tmp_path):
    for name in ("one", "two"):
        write_blocks(tmp_path / "root" / name, [TALK] * 4, [MASK] * 4)
    mix = {"mix_sft": {"one": 1, "two": 1}}
    right = "has no epochs; set dataset_dir to one source of the mix, and remove mix_sft$"
    with pytest.raises(UsageError, match=f"^post_training runs for one pass, but the order .* {right}"):
        trained(tmp_path / "root", tmp_path, **mix, **POST)
    assert trained(tmp_path / "root" / "one", tmp_path, **POST).step == 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"post_training": True, "max_iters": None}, "2 steps; the run has completed one pass"),
        ({"post_training": True, "max_iters": 9}, "2 steps; the run has completed one pass"),
        ({"post_training": True, "max_iters": 1}, "1 steps; raise max_iters (post-training stops after one pass)"),
        ({"max_iters": 1}, "1 steps; raise max_iters"),
        ({"max_iters": None}, "2 steps; the run has completed one pass; set epochs or max_iters to continue"),
        ({"max_iters": None, "epochs": 1}, "2 steps; the run has completed one pass; raise epochs to continue"),
        ({"max_iters": None, "epochs": 2.5}, "5 steps; the run has completed 2.5 epochs; raise epochs to continue"),
    ],
)
def test_a_finished_run_says_how_to_continue(tmp_path, capsys, changes, said):
    data = write_blocks(tmp_path / "data", [TALK] * 8, [MASK] * 8)
    settings = config(**SIZE, **changes)
    for resume in (None, "auto"):
        capsys.readouterr()
        train_model(settings, model_name="run", dataset_dir=data, out_dir=tmp_path, resume=resume)
    assert f"the run is already finished: it has {said}\n" in capsys.readouterr().err


def test_post_training_after_plain_training_starts_a_new_warmup(tmp_path):
    data = write_blocks(tmp_path / "data", [TALK] * 12, [MASK] * 12)
    common = {"batch_size": 2, **SIZE, "warmup_iters": None, "warmup_pct": 0.5, "epoch_drop_last": False}
    trained(data, tmp_path, max_iters=4, **common)
    result = trained(data, tmp_path, max_iters=None, resume="auto", post_training=True, **common)
    # Post-training adds a whole pass of 6 steps, half of them warmup.
    assert result.step == 4 + 6
    rates = [line["lr"] / SMALL["learning_rate"] for line in read_metrics(result.folder)]
    np.testing.assert_allclose(rates[:2], [1 / 2, 1])
    np.testing.assert_allclose(rates[4:7], [1 / 3, 2 / 3, 1])
