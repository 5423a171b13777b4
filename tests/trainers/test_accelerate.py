from __future__ import annotations

from itertools import islice

import accelerate_runs as runs
import numpy as np
import pytest
import torch
from page_sections import PAGE
from torch.utils.data import DataLoader
from trainer_fixtures import PACKED, UNPACKED, open_model, own_batches, own_losses, ranks
from transformers import Trainer, TrainingArguments

from chatmill import EpisodeLoader
from chatmill.audit import verify_log
from chatmill.errors import UsageError
from chatmill.integrations.accelerate import causal_lm_loss, train_loader

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:'set_vital':UserWarning"),
]


@pytest.fixture(autouse=True)
def fresh_accelerate():
    yield
    runs.AcceleratorState._reset_state(True)
    runs.GradientState._reset_state()


@pytest.fixture(scope="module")
def own(weighted, model_folder) -> list[float]:
    return own_losses(weighted, model_folder, PACKED)


@pytest.fixture(scope="module")
def two_ranks(weighted, model_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("two_ranks")
    results = ranks(2, "accelerate_runs:on_two_ranks", dataset=weighted, model=model_folder, folder=folder)
    return folder, results


def same_as_own(columns, batch, step_weight) -> None:
    assert columns.keys() == {"input_ids", "labels", "position_ids", "weights", "step_weight"}
    assert columns["input_ids"][:, :-1].tolist() == batch["x"].tolist()
    assert columns["labels"][:, 1:].tolist() == batch["y"].tolist()
    assert (columns["labels"][:, 0] == -100).all()
    assert columns["weights"][:, 1:].tolist() == batch["weights"].tolist()
    assert (columns["weights"][:, 0] == 0).all()
    assert columns["position_ids"][:, :-1].tolist() == batch["positions"].tolist()
    trained = batch["y"][:, -1] != -100
    assert columns["input_ids"][trained, -1].tolist() == batch["y"][trained, -1].tolist()
    assert float(columns["step_weight"]) == pytest.approx(step_weight, rel=1e-6)


# Batches.


@pytest.mark.parametrize("config", [UNPACKED, PACKED], ids=["unpacked", "packed"])
def test_one_rank_trains_the_batches_of_the_loader_for_50_steps(weighted, config):
    batches = runs.batches(weighted, config, steps=50)
    assert len(batches) == 50
    for columns, batch in zip(batches, own_batches(weighted, config, 50), strict=True):
        same_as_own(columns, batch, batch["weights"].sum())


def test_each_of_two_ranks_trains_its_rows_of_the_batches_for_50_steps(weighted, two_ranks):
    whole = own_batches(weighted, PACKED, 50)
    for rank, result in enumerate(two_ranks[1]):
        rows = own_batches(weighted, PACKED, 50, rank=rank, world_size=2)
        for columns, part, batch in zip(result["batches"], rows, whole, strict=True):
            same_as_own(columns, part, batch["weights"].sum() / 2)


def test_micro_batches_are_the_rows_of_a_step_in_order(weighted):
    parts = runs.batches(weighted, PACKED, steps=6, accumulation=2)
    assert len(parts) == 12
    for step, batch in enumerate(own_batches(weighted, PACKED, 6)):
        for number, rows in enumerate((slice(0, 2), slice(2, 4))):
            part = {name: array[rows] for name, array in batch.items()}
            same_as_own(parts[2 * step + number], part, batch["weights"].sum() / 2)


def test_a_run_of_epochs_has_the_steps_of_these_epochs(weighted):
    loader = train_loader(runs.new_accelerator(2), weighted, UNPACKED, epochs=2)
    steps = len(EpisodeLoader(weighted, UNPACKED, epochs=2))
    assert (loader.steps, len(loader), len(list(loader))) == (steps, 2 * steps, 2 * steps)


def test_the_batches_are_not_prepared_again(weighted):
    loader = train_loader(runs.new_accelerator(), weighted, PACKED, steps=1)
    assert runs.is_untouched(loader)


# Losses.


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_losses_are_those_of_the_own_loop(weighted, model_folder, own, accumulation):
    assert runs.losses(weighted, model_folder, accumulation=accumulation) == pytest.approx(own, abs=1e-5)


@pytest.mark.parametrize("way", ["losses", "accumulated"])
def test_the_losses_on_two_ranks_are_those_of_the_own_loop(two_ranks, own, way):
    for result in two_ranks[1]:
        assert result[way] == pytest.approx(own, abs=1e-5)


def test_a_cache_would_mix_the_conversations_of_a_packed_row(weighted, model_folder):
    """With a KV cache, packed conversations would attend to each other, so `causal_lm_loss` disables the cache by
    default.
    """
    model = open_model(model_folder)
    batch = next(iter(train_loader(runs.new_accelerator(), weighted, PACKED, steps=1)))
    with torch.no_grad():
        apart, mixed = causal_lm_loss(model, batch), causal_lm_loss(model, batch, use_cache=True)
    assert abs(float(apart - mixed)) > 1e-4


def test_rows_for_flash_attention_stand_in_one_row_with_their_borders(weighted, model_folder):
    batch = next(iter(train_loader(runs.new_accelerator(), weighted, PACKED, steps=1)))
    flat = next(iter(train_loader(runs.new_accelerator(), weighted, PACKED, steps=1, flatten=True)))
    starts = [place for place, position in enumerate(batch["position_ids"].flatten().tolist()) if position == 0]
    edges = [*starts, batch["input_ids"].numel()]
    assert flat["input_ids"].tolist() == [batch["input_ids"].flatten().tolist()]
    assert flat["cu_seq_lens_q"].tolist() == flat["cu_seq_lens_k"].tolist() == edges
    assert flat["max_length_q"] == flat["max_length_k"] == max(np.diff(edges))
    with torch.no_grad():
        losses = [float(causal_lm_loss(open_model(model_folder), each)) for each in (batch, flat)]
    assert losses[1] == pytest.approx(losses[0], abs=1e-6)


def test_flash_attention_without_flat_rows_is_refused(weighted, model_folder):
    model = torch.nn.Module()
    model.module = open_model(model_folder)
    model.module.config._attn_implementation = "flash_attention_2"
    batch = next(iter(train_loader(runs.new_accelerator(), weighted, PACKED, steps=1)))
    with pytest.raises(UsageError, match="make the batches with flatten=True"):
        causal_lm_loss(model, batch)


def test_a_step_that_trains_nothing_has_loss_zero(weighted, model_folder):
    batch = next(iter(train_loader(runs.new_accelerator(), weighted, PACKED, steps=1)))
    nothing = {"labels": torch.full_like(batch["labels"], -100), "weights": 0 * batch["weights"]}
    with torch.no_grad():
        loss = causal_lm_loss(open_model(model_folder), {**batch, **nothing, "step_weight": 0 * batch["step_weight"]})
    assert float(loss) == 0.0


# Checkpoints.


def test_a_run_resumes_at_every_step_with_the_rows_that_would_have_come(weighted, tmp_path):
    undisturbed = runs.batches(weighted, PACKED, steps=8, accumulation=2)
    runs.saved_at_each_step(weighted, tmp_path, steps=8, accumulation=2)
    for step in range(9):
        after = runs.resumed(weighted, tmp_path / str(step), steps=8, accumulation=2)
        assert_same(after, undisturbed[2 * step :])


def test_two_ranks_resume_at_every_step(two_ranks):
    for result in two_ranks[1]:
        for step, after in enumerate(result["resumed"]):
            assert_same(after, result["batches"][step:5])


def test_one_rank_goes_on_with_a_checkpoint_of_two(weighted, two_ranks):
    after = runs.resumed(weighted, two_ranks[0] / "steps" / "3", steps=5)
    assert_same(after, runs.batches(weighted, PACKED, steps=5)[3:])


@pytest.mark.parametrize("at", [0, 3, runs.FEWER])
def test_losses_after_a_resume_are_those_of_a_run_that_was_not_stopped(weighted, model_folder, tmp_path, at):
    undisturbed = runs.losses(weighted, model_folder, accumulation=2)[: runs.FEWER]
    assert runs.interrupted(weighted, model_folder, tmp_path, at=at, accumulation=2) == undisturbed


def test_losses_of_two_ranks_after_a_resume_are_those_of_a_run_that_was_not_stopped(two_ranks):
    for result in two_ranks[1]:
        assert result["interrupted"] == result["losses"][: runs.FEWER]


def test_a_state_inside_of_a_step_is_refused(weighted, tmp_path):
    accelerator = runs.new_accelerator(2)
    loader = train_loader(accelerator, weighted, PACKED, steps=4)
    list(islice(loader, 3))
    with pytest.raises(UsageError, match=r"after micro-batch 1 of 2 of step 1, whose gradients would be lost"):
        accelerator.save_state(str(tmp_path))


def test_a_loop_that_was_left_goes_on_with_the_next_micro_batch(weighted):
    loader = train_loader(runs.new_accelerator(2), weighted, PACKED, steps=3)
    parts = [runs.arrays(batch) for batch in islice(loader, 3)] + [runs.arrays(batch) for batch in loader]
    assert_same(parts, runs.batches(weighted, PACKED, steps=3, accumulation=2))


def test_a_second_loop_over_a_run_that_ended_is_refused(weighted):
    loader = train_loader(runs.new_accelerator(), weighted, PACKED, steps=2)
    assert len(list(loader)) == 2
    with pytest.raises(UsageError, match="the run ended after 2 of 2 steps; loop only once"):
        list(loader)


# Tests of the audit log.


def test_the_audit_log_of_a_resumed_run_is_verified(weighted, model_folder, tmp_path):
    runs.interrupted(weighted, model_folder, tmp_path, at=5)
    check_log(weighted, tmp_path)


def test_the_audit_log_of_two_ranks_is_verified(weighted, two_ranks):
    check_log(weighted, two_ranks[0])


def test_a_state_that_is_saved_after_the_loop_keeps_the_end_of_the_audit_log(weighted, tmp_path):
    for steps in (3, 5):
        accelerator = runs.new_accelerator()
        loader = train_loader(accelerator, weighted, PACKED, steps=steps, audit_dir=tmp_path / "audit")
        if steps == 5:
            accelerator.load_state(str(tmp_path / "end"))
        assert len(list(loader)) == {3: 3, 5: 2}[steps]
        accelerator.save_state(str(tmp_path / "end"))
    (log,) = (tmp_path / "audit").glob("*.log")
    result = verify_log(log, weighted)
    assert (result.fault, result.steps, result.abandoned) == (None, 5, 0)


def test_a_run_that_began_without_an_audit_log_goes_on_without(weighted, tmp_path):
    runs.saved_at_each_step(weighted, tmp_path, steps=1)
    accelerator = runs.new_accelerator()
    train_loader(accelerator, weighted, PACKED, steps=2, audit_dir=tmp_path / "audit")
    with pytest.raises(UsageError, match="the run began without an audit log; remove audit_dir to resume"):
        accelerator.load_state(str(tmp_path / "1"))


def check_log(dataset, folder) -> None:
    (log,) = (folder / "audit").glob("*.log")
    result = verify_log(log, dataset)
    assert (result.fault, result.steps, result.abandoned) == (None, runs.FEWER + 2, 2)
    assert "| ranks=all |" in log.read_text()


# Settings.


@pytest.mark.parametrize(
    ("accumulation", "config", "length", "message"),
    [
        (1, PACKED, {}, "pass either epochs or steps"),
        (1, PACKED, {"epochs": 1, "steps": 1}, "pass either epochs or steps"),
        (4, {**PACKED, "gradient_accumulation_steps": 2}, {"steps": 1}, "is 2 in the config, but 4 in the accelerator"),
        (3, PACKED, {"steps": 1}, "batch_size 4 cannot be split across 1 ranks with 3 accumulation steps each"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(weighted, accumulation, config, length, message):
    with pytest.raises(UsageError, match=message):
        train_loader(runs.new_accelerator(accumulation), weighted, config, **length)


def test_accelerate_does_not_shard_a_loader_a_second_time(two_ranks):
    for rank, result in enumerate(two_ranks[1]):
        assert len(result["refusals"]) == (14 if rank == 0 else 12)
        for (world_size, *_), line in result["refusals"].items():
            what = f"(rank {rank} of 2) across 2 ranks again, so rows would be lost"
            if world_size == 1:
                what = "each of 2 ranks a full batch from this EpisodeLoader, so one step would train on 2 batches"
            assert what in line
            assert "use chatmill.integrations.accelerate.train_loader" in line


def test_the_page_shows_the_line_that_refuses_a_second_sharding(two_ranks):
    assert f"\n{two_ranks[1][0]['refusals'][2, None, 0, False]}\n" in PAGE.read_text("utf-8")


def test_loaders_that_accelerate_does_not_shard_are_read(weighted, two_ranks):
    for rank, result in enumerate(two_ranks[1]):
        (first,) = own_batches(weighted, PACKED, 1, rank=rank, world_size=2)
        assert result["unprepared"] == [first["x"].tolist()] * 6


@pytest.mark.parametrize("workers", [0, 2])
def test_accelerate_on_one_rank_reads_a_loader(weighted, workers):
    data = DataLoader(EpisodeLoader(weighted, PACKED), batch_size=None, num_workers=workers)
    prepared = runs.new_accelerator().prepare(data)
    rows = [batch.x.numpy() for batch in islice(prepared, 5)]
    assert np.array_equal(rows, [batch["x"] for batch in own_batches(weighted, PACKED, 5)])


@pytest.mark.parametrize("epochs", [None, 1])
@pytest.mark.parametrize("max_steps", [-1, 2])
def test_trainer_refuses_a_loader_with_the_name_of_its_integration(weighted, model_folder, tmp_path, epochs, max_steps):
    arguments = TrainingArguments(str(tmp_path), max_steps=max_steps, use_cpu=True, report_to="none")
    loader = EpisodeLoader(weighted, PACKED, epochs=epochs)
    with pytest.raises(UsageError, match=r"use TrainRows from chatmill\.integrations\.hf"):
        Trainer(open_model(model_folder), arguments, train_dataset=loader)


def assert_same(parts, expected) -> None:
    assert len(parts) == len(expected)
    for part, other in zip(parts, expected, strict=True):
        for name in part.keys() - {"step_weight"}:
            assert np.array_equal(part[name], other[name]), name
