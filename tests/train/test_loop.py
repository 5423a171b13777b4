from __future__ import annotations

import errno
import json
import math
import os
import re
import resource
import shutil
import signal
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
import torch
from child_processes import end_children, start_child
from model_fixtures import plain_loss
from train_fixtures import SMALL, config, curve, prepare, ranks, run_chatmill, sums, trained, weights, write_files

from chatmill.audit import verify_log
from chatmill.errors import ChatmillError, DataError, UsageError
from chatmill.load.loader import EpisodeLoader
from chatmill.load.source import conversation
from chatmill.store import files
from chatmill.store.read import open_dataset
from chatmill.train.checkpoint_files import list_checkpoints, model_folder, self_sha256
from chatmill.train.gpt import GPT
from chatmill.train.load_model import open_model
from chatmill.train.loop import train_model
from chatmill.train.out_of_memory import OutOfMemoryError
from chatmill.train.result import StepRecord
from chatmill.train.run_dir import read_metrics, read_rows
from chatmill.train.score import score_model
from chatmill.train.step import NotFiniteError, Stepper


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
        # AdamW amplifies the rounding of gradients that are close to zero.
        np.testing.assert_allclose(tensor, model.state_dict()[name].numpy(), rtol=0, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("changes", [{"gradient_accumulation_steps": 2}, {"gradient_accumulation_steps": 4}], ids=str)
def test_a_run_does_not_depend_on_gradient_accumulation(sums_data, tmp_path, changes):
    whole = trained(sums_data, tmp_path, name="whole")
    parts = trained(sums_data, tmp_path, name="parts", **changes)
    np.testing.assert_allclose(curve(parts.folder), curve(whole.folder), rtol=0, atol=1e-5)


def test_packed_rows_train_the_same_conversations(sums_data, tmp_path):
    result = trained(sums_data, tmp_path, packing="bins", block_size=63, max_iters=None, batch_size=2)
    data = EpisodeLoader(sums_data, config()).plan("train")
    rows = data.num_eligible
    assert result.step == result.total < rows // 2
    assert result.tokens > 0.8 * result.step * 2 * 63


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


def test_progress_is_printed_as_lines_without_a_terminal(sums_data, tmp_path, capsys):
    settings = config(log_interval=3, eval_interval=8)
    train_model(settings, model_name="run", dataset_dir=sums_data, out_dir=tmp_path)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("step ")]
    assert [line.split("  ")[0] for line in lines[:3]] == ["step 3/8", "step 6/8", "step 8/8"]
    assert [word.split()[-1] for word in lines[0].split("  ")[3:]] == ["tokens/s", "trained/s", "left"]
    assert lines[3].startswith("step 8: val loss ")
    assert len(lines) == 4


def test_the_losses_of_conversations_are_logged_by_step(sums_data, tmp_path):
    def run(rank: int) -> None:
        trained(sums_data, tmp_path, name="two", log_rows=True, max_iters=3)

    one = trained(sums_data, tmp_path, log_rows=True, max_iters=3)
    ranks(2, run)
    plan = EpisodeLoader(sums_data, config()).plan("train")
    for number, step in zip(range(3), plan.one_epoch(), strict=False):
        rows = read_rows(one.folder, number + 1)
        assert [row.episode for row in rows] == step.episodes.tolist()
        mean = sum(row.loss * row.weight for row in rows) / sum(row.weight for row in rows)
        assert abs(mean - curve(one.folder)[number][1]) < 1e-6
        both = read_rows(tmp_path / "two", number + 1)
        assert [row.episode for row in both] == step.episodes.tolist()
        np.testing.assert_allclose([row.loss for row in both], [row.loss for row in rows], rtol=0, atol=1e-5)
    with pytest.raises(DataError, match="has no losses for step 4"):
        read_rows(one.folder, 4)
    with pytest.raises(DataError, match="train with --log_rows"):
        read_rows(tmp_path, 1)


@pytest.mark.parametrize("damage", ["{}", "[]", "3", "{", '{"step": "1"}', "[" * 100_000])
def test_a_damaged_line_of_metrics_is_reported(sums_data, tmp_path, damage):
    metrics = trained(sums_data, tmp_path, max_iters=2).folder / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + damage + "\n")
    with pytest.raises(DataError) as error:
        trained(sums_data, tmp_path, resume="auto", max_iters=4)
    assert str(error.value) == f"{metrics}:3: is damaged; expected a JSON object with a step; remove the line"


@pytest.mark.parametrize(
    "damage",
    [
        '{"step": 9, "x": 1}',
        '{"step": 9, "data": 1, "episodes": [], "segments": [], "losses": [], "weights": []}',
        '{"step": 9, "data": {}, "episodes": [], "segments": [], "losses": [], "weights": []}',
        '{"step": 9, "data": {"dataset_dir": "d", "dataset_sha256": "", "mix_sft": null}, '
        '"episodes": [1], "segments": [], "losses": [1], "weights": [1]}',
        '{"step": 9, "data": {"dataset_dir": "d", "dataset_sha256": "", "mix_sft": null}, '
        '"episodes": ["a"], "segments": [-1], "losses": [1], "weights": [1]}',
        '{"step": 9, "data": {"dataset_dir": 5, "dataset_sha256": "", "mix_sft": null}, '
        '"episodes": [1], "segments": [-1], "losses": [1], "weights": [1]}',
    ],
)
def test_a_damaged_line_of_losses_is_reported(tmp_path, damage):
    path = tmp_path / "rows" / "rank_00000.jsonl"
    path.parent.mkdir()
    path.write_text("anything\n" + damage + "\n")
    with pytest.raises(DataError) as error:
        read_rows(tmp_path, 9)
    right = "a step with its data and the columns episodes, segments, losses, weights"
    assert str(error.value) == f"{path}:2: is damaged; expected {right}; remove the line"


def test_a_resumed_run_continues_its_audit_log_which_verifies(sums_data, tmp_path):
    audit = str(tmp_path / "logs")
    trained(sums_data, tmp_path, audit_dir=audit, max_iters=4, lr_schedule="constant")
    again = trained(sums_data, tmp_path, audit_dir=audit, resume="auto", lr_schedule="constant")
    (log,) = (tmp_path / "logs").glob("audit_*.log")
    said = json.loads((again.checkpoint / "checkpoint.json").read_text())["audit"]
    checked = verify_log(log, sums_data, heads={"the checkpoint": said["head"]})
    assert checked.fault is None
    actions = [part.split("action=")[1].split(" ")[0] for part in log.read_text().splitlines()]
    first, second = ["dataset_load", "epoch_start", "steps"], ["resume", "dataset_load", "steps"]
    assert actions == [*first, "checkpoint", *second, "checkpoint"]


def test_a_run_that_started_without_an_audit_log_cannot_resume_with_one(sums_data, tmp_path):
    trained(sums_data, tmp_path, max_iters=4)
    with pytest.raises(UsageError, match="started without an audit log; set audit_dir to null"):
        trained(sums_data, tmp_path, audit_dir=str(tmp_path / "logs"), resume="auto")


def test_ranks_share_one_audit_log(sums_data, tmp_path):
    def run(rank: int) -> None:
        trained(sums_data, tmp_path, audit_dir=str(tmp_path / "logs"), max_iters=4)

    ranks(2, run)
    (log,) = (tmp_path / "logs").glob("audit_*.log")
    assert verify_log(log, sums_data).fault is None
    assert "ranks=all" in log.read_text()


# Stopping.


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_a_checkpoint_and_ends_the_run(sums_data, tmp_path, number):
    usual = signal.getsignal(number)

    def stop(step):
        if step.step == 3:
            os.kill(os.getpid(), number)

    result = train_model(
        config(max_iters=40),
        model_name="run",
        dataset_dir=sums_data,
        out_dir=tmp_path,
        watch=stop,
        quiet=True,
    )
    assert result.stopped_by == number.name
    assert 3 < result.step < 10
    assert result.checkpoint == tmp_path / "run" / f"step_{result.step:08d}"
    assert len(curve(result.folder)) == result.step
    assert signal.getsignal(number) == usual
    again = trained(sums_data, tmp_path, resume="auto", max_iters=40)
    whole = trained(sums_data, tmp_path, name="whole", max_iters=40)
    assert (again.step, again.stopped_by) == (40, None)
    assert curve(again.folder) == curve(whole.folder)


def test_a_signal_to_one_rank_stops_all_at_the_same_step(sums_data, tmp_path):
    def run(rank: int) -> list:
        def stop(step):
            if step.step == 3 and rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)

        result = train_model(
            config(max_iters=40), model_name="run", dataset_dir=sums_data, out_dir=tmp_path, watch=stop, quiet=True
        )
        return [result.step, result.stopped_by]

    (one, why), (other, _) = ranks(2, run)
    assert one == other < 10
    assert why == "a signal that another rank received"
    assert list_checkpoints(tmp_path / "run")[-1].name == f"step_{one:08d}"


def test_a_second_signal_ends_the_run_immediately(sums_data, tmp_path):
    def stop(step):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)

    def both(step):
        stop(step)
        stop(step)

    with pytest.raises(KeyboardInterrupt):
        train_model(config(), model_name="run", dataset_dir=sums_data, out_dir=tmp_path, watch=both, quiet=True)


def broken(settings, vocab_size, value):
    model = GPT(settings.sizes(vocab_size))
    with torch.no_grad():
        model.norm.weight[3] = value
    return model


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_nan_loss_stops_the_run_and_names_the_episodes(sums_data, tmp_path, value):
    settings = config(save_interval=1)
    loader = EpisodeLoader(sums_data, settings)
    episodes = sorted(next(iter(loader.plan("train").one_epoch())).episodes.tolist())
    model = broken(settings, loader.vocab_size, value)
    with pytest.raises(NotFiniteError) as error:
        train_model(settings, model_name="run", dataset_dir=sums_data, out_dir=tmp_path, model=model, quiet=True)
    places = [conversation(loader.sources, "train", episode, -1).place for episode in episodes]
    names = ", ".join(f"{place} (episode {each}, loss nan)" for place, each in zip(places, episodes[:3], strict=False))
    assert str(error.value) == (
        f"step 1: the loss is nan; all 4 conversations have a non-finite loss: {names} and 1 more; lower "
        "learning_rate, or inspect the data, and start the run again, because no checkpoint was written"
    )
    assert list_checkpoints(tmp_path / "run") == []


def test_a_nan_loss_in_a_later_step_names_the_step_and_the_last_good_checkpoint(sums_data, tmp_path):
    with pytest.raises(NotFiniteError, match=r"^step \d+: .* resume from .*step_0000000\d$") as error:
        trained(sums_data, tmp_path, learning_rate=1e30, warmup_iters=0, grad_clip=0, weight_decay=0, save_interval=1)
    step = int(str(error.value).split()[1].rstrip(":"))
    assert list_checkpoints(tmp_path / "run")[-1].name == f"step_{step - 1:08d}"


def test_a_batch_without_trained_tokens_does_not_cause_nan(tmp_path):
    data = write_files(tmp_path / "data", [[1, 2, 3, 4]] * 8, [[0, 0, 0, 0]] * 6 + [[0, 0, 1, 1]] * 2)
    result = trained(data, tmp_path, batch_size=2, pad_token_id=0, max_iters=4, epoch_shuffle=False)
    assert (result.step, result.trained, result.untrained_rows) == (4, 4, 6)
    assert [line["loss"] for line in read_metrics(result.folder)] == [None, None, None, result.loss]
    assert all(np.isfinite(tensor).all() for tensor in weights(result.checkpoint).values())


def test_ids_outside_the_models_vocabulary_are_refused(sums_data, tmp_path):
    with pytest.raises(
        DataError,
        match=r"has token ids up to \d+, but the model's vocabulary size is 100; use the tokenizer of the model",
    ):
        trained(sums_data, tmp_path, vocab_size=100)
    foreign = write_files(tmp_path / "data", [[1, 2, 99, 4]] * 8, [[0, 1, 1, 1]] * 8)
    with pytest.raises(DataError, match="has token ids up to 99, but the model's vocabulary size is 99"):
        trained(foreign, tmp_path, vocab_size=99, pad_token_id=0)
    assert trained(foreign, tmp_path, pad_token_id=0, max_iters=1).step == 1


def test_the_padding_token_for_data_of_other_programs_must_be_in_the_vocabulary(tmp_path):
    foreign = write_files(tmp_path / "data", [[1, 2, 5, 4]] * 8, [[0, 1, 1, 1]] * 8)
    result = trained(foreign, tmp_path, pad_token_id=7, max_iters=1)
    assert len(weights(result.checkpoint)["embedding.weight"]) == 8
    with pytest.raises(
        DataError, match=r"^rows are padded with token 7, but the model's vocabulary size is 7; set pad_token_id$"
    ):
        trained(foreign, tmp_path, name="small", pad_token_id=7, vocab_size=7)
    with pytest.raises(DataError, match=r"^pad_token_id is 65536; expected an id below 65536, as in .*data$"):
        trained(foreign, tmp_path, name="wide", pad_token_id=65536)
    (foreign / "dataset_metadata.json").write_text("{}")
    (foreign / "tokenizer_state.json").write_text('{"eot_token_id": 100000}')
    right = "its ids must be below 65536; set pad_token_id"
    with pytest.raises(DataError, match=rf"data: the id of its end-of-turn token is 100000, but {right}$"):
        trained(foreign, tmp_path, name="wide")


def test_rows_longer_than_the_models_positions_are_refused(sums_data, tmp_path):
    with pytest.raises(DataError, match="block_size is 65, but the model has 64 positions; lower block_size"):
        trained(sums_data, tmp_path, block_size=65)


def test_a_model_with_a_different_tokenizer_is_refused(sums_data, tmp_path):
    first = trained(sums_data, tmp_path, max_iters=1)
    (tmp_path / "words.jsonl").write_text(sums(200))
    own = str(tmp_path / "tokenizer.json")
    run_chatmill("tokenizer", "train", str(tmp_path / "words.jsonl"), "--vocab-size", "264", "-o", own)
    marked = prepare(tmp_path, "marked", "--tokenizer", own, "--add-tokens")
    start = {"init_from_model": str(first.folder), "name": "second", "max_iters": 1}
    with pytest.raises(
        DataError, match=r"was prepared with tokenizer [0-9a-f]{12}…, but the model was trained with [0-9a-f]{12}…"
    ):
        trained(marked, tmp_path, **start)
    with pytest.raises(DataError, match="was prepared with tokenizer"):
        trained(marked, tmp_path, resume="auto", max_iters=1)
    assert trained(marked, tmp_path, **start, check_tokenizer=False).step == 1


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


def test_a_dataset_that_fails_its_check_is_a_one_line_error(sums_data, tmp_path):
    with pytest.raises(DataError) as error:
        trained(tmp_path / "none", tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "a\udcff", "a\nb"])
def test_a_model_name_that_is_not_a_folder_name_is_refused(sums_data, tmp_path, name):
    with pytest.raises(UsageError, match="model_name is"):
        trained(sums_data, tmp_path, name=name)


def test_a_gpu_out_of_memory_error_suggests_what_to_lower(sums_data, tmp_path, monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore lines.")

    monkeypatch.setattr(Stepper, "step", full)
    with pytest.raises(OutOfMemoryError) as error:
        trained(sums_data, tmp_path, gradient_accumulation_steps=2)
    assert str(error.value) == (
        "the GPU is out of memory with 2 rows of 48 tokens at a time; "
        "raise gradient_accumulation_steps from 2, or set activation_checkpointing, "
        "or set optimizer to adamw8bit (6 bytes per parameter instead of 16)"
    )


@pytest.mark.parametrize("changes", [{}, {"block_size": 65}])
def test_two_ranks_that_finish_no_step_leave_neither_a_folder_nor_an_audit_log(sums_data, tmp_path, changes):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    def refused(rank: int) -> bool:
        Stepper.step = full
        try:
            trained(sums_data, tmp_path / "out", audit_dir=str(tmp_path / "logs"), log_rows=True, **changes)
        except ChatmillError:
            return True
        return False

    assert ranks(2, refused) == [True, True]
    assert list(tmp_path.iterdir()) == []


HOST_IS_FULL = (
    "the host is out of memory (it has N GiB) with 4 rows of 48 tokens at a time; "
    "lower batch_size, block_size or max_positions, or use a smaller model\n"
)


@pytest.mark.parametrize(
    "sizes",
    [
        {"n_embd": 1_000_000_000, "n_head": 1000},
        {"n_embd": 2**31, "n_head": 2**10, "vocab_size": 2**31},
    ],
)
def test_a_model_that_does_not_fit_in_host_memory_is_a_one_line_error(sums_data, tmp_path, sizes):
    def train_and_print_the_error() -> None:
        # If chatmill did allocate the model, this limit would stop it.
        resource.setrlimit(resource.RLIMIT_DATA, (4 << 30, 4 << 30))
        try:
            trained(sums_data, tmp_path, **sizes)
        except OutOfMemoryError as error:
            print(error)

    assert end_children([start_child(train_and_print_the_error, output=tmp_path)]) == [0]
    assert re.sub(r"[0-9.]+ GiB", "N GiB", (tmp_path / "out").read_text()) == HOST_IS_FULL


def test_random_order_has_no_epochs(sums_data, tmp_path):
    with pytest.raises(UsageError, match=r"max_iters is null, which means one pass, .* set max_iters"):
        trained(sums_data, tmp_path, batch_sampling_mode="random", max_iters=None)
    assert trained(sums_data, tmp_path, batch_sampling_mode="random", max_iters=2).step == 2


def test_without_max_iters_a_run_makes_one_pass(sums_data, tmp_path):
    result = trained(sums_data, tmp_path, max_iters=None)
    assert result.step == EpisodeLoader(sums_data, config()).plan("train").num_eligible // SMALL["batch_size"]


def test_all_ranks_raise_if_a_batch_cannot_be_divided_among_them(sums_data, tmp_path):
    def run(rank: int) -> str:
        try:
            trained(sums_data, tmp_path, batch_size=3)
        except ChatmillError as error:
            return str(error)
        return "trained"

    for said in ranks(2, run):
        assert said.startswith("batch_size 3 cannot be split across 2 ranks")


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


def test_a_failed_run_can_be_resumed_in_the_same_process(sums_data, tmp_path):
    def fail(step):
        if step.step == 5:
            raise RuntimeError("enough")

    settings = config(audit_dir=str(tmp_path / "logs"))
    with pytest.raises(RuntimeError, match="enough"):
        train_model(settings, model_name="run", dataset_dir=sums_data, out_dir=tmp_path, watch=fail, quiet=True)
    again = train_model(settings, model_name="run", dataset_dir=sums_data, out_dir=tmp_path, resume="auto", quiet=True)
    assert again.step == 8
    (log,) = (tmp_path / "logs").glob("audit_*.log")
    assert verify_log(log, sums_data).fault is None


@pytest.mark.parametrize("where", ["state-00000-of-00001.safetensors", "checkpoint.json", "training.json"])
def test_a_full_disk_is_a_one_line_error_and_the_last_checkpoint_is_kept(sums_data, tmp_path, monkeypatch, where):
    trained(sums_data, tmp_path, max_iters=4)

    names = {}

    class Full(files.Disk):
        def create(self, path):
            fd = super().create(path)
            names[fd] = path.name
            return fd

        def write(self, fd, data):
            if names.get(fd) == where:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(fd, data)

    with monkeypatch.context() as patch:
        patch.setattr(files, "disk", Full())
        with pytest.raises((ChatmillError, OSError), match="No space left on device"):
            trained(sums_data, tmp_path, resume="auto")
    assert [path.name for path in list_checkpoints(tmp_path / "run")] == ["step_00000004"]
    assert trained(sums_data, tmp_path, resume="auto").step == 8
    assert not list((tmp_path / "run").glob(".*"))


def test_the_duration_of_every_step_includes_data_wait_and_computation(sums_data, tmp_path, monkeypatch):
    computed = []
    step = Stepper.step

    def timed(self, *args, **more):
        began = time.perf_counter()
        pending = step(self, *args, **more)
        computed.append(time.perf_counter() - began)
        return pending

    monkeypatch.setattr(Stepper, "step", timed)
    trained(sums_data, tmp_path, max_iters=4)
    lines = [line for line in read_metrics(tmp_path / "run") if "seconds" in line]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    for line, seconds in zip(lines, computed, strict=True):
        assert line["seconds"] >= line["data_wait"] + seconds
