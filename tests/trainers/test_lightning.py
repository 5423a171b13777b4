from __future__ import annotations

from pathlib import Path

import lightning_runs
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler
from lightning_runs import Recorder, make_trainer, train
from trainer_fixtures import PACKED, STEPS, UNPACKED, own_batches, own_losses, ranks

from chatmill.audit import verify_log
from chatmill.errors import UsageError
from chatmill.integrations.lightning import EpisodeDataModule, WeightedBatch
from chatmill.load import IGNORE_INDEX

pytestmark = [
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated"),
    pytest.mark.filterwarnings("ignore:GPU available but not used"),
    pytest.mark.filterwarnings("ignore:.*module.s. in eval mode at the start of training"),
    # A trainer with max_steps and no max_epochs runs as many epochs as it needs.
    pytest.mark.filterwarnings("ignore:.max_epochs. was not set"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:Be aware that when using .ckpt_path., callbacks used to create"),
]
ACCUMULATED = {**PACKED, "gradient_accumulation_steps": 2}


def assert_own(batches: list[dict[str, np.ndarray]], own: list[dict[str, np.ndarray]], parts: int = 1) -> None:
    assert len(batches) == len(own) * parts
    for number, arrays in enumerate(own):
        of_step = batches[number * parts : (number + 1) * parts]
        columns = {name: np.concatenate([np.atleast_1d(batch[name]) for batch in of_step]) for name in of_step[0]}
        np.testing.assert_array_equal(columns["input_ids"][:, :-1], arrays["x"])
        np.testing.assert_array_equal(columns["labels"][:, 1:], arrays["y"])
        np.testing.assert_array_equal(columns["weights"][:, 1:], arrays["weights"])
        np.testing.assert_array_equal(columns["position_ids"][:, :-1], arrays["positions"])
        assert (columns["labels"][:, 0] == IGNORE_INDEX).all()
        last, trained = columns["input_ids"][:, -1], arrays["y"][:, -1] != IGNORE_INDEX
        np.testing.assert_array_equal(last[trained], arrays["y"][trained, -1])


def mean_losses(losses: list[list[float]], parts: int = 1) -> np.ndarray:
    return np.array(losses).reshape(len(losses), -1, parts).mean(axis=(0, 2))


def assert_same_batches(batches: list[dict[str, np.ndarray]], expected: list[dict[str, np.ndarray]]) -> None:
    assert len(batches) == len(expected)
    for ours, theirs in zip(batches, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name in ours:
            np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)


@pytest.mark.parametrize("config", [UNPACKED, ACCUMULATED], ids=["unpacked", "packed-accumulated"])
def test_fifty_steps_train_the_batches_of_the_own_loop_on_one_rank(config, weighted):
    parts = config.get("gradient_accumulation_steps", 1)
    run = train(weighted, config, max_steps=50)
    assert run["step"] == 50
    assert_own(run["batches"], own_batches(weighted, config, 50), parts)


@pytest.mark.parametrize("config", [UNPACKED, PACKED, ACCUMULATED], ids=["unpacked", "packed", "packed-accumulated"])
def test_losses_are_those_of_the_own_loop(config, weighted, model_folder):
    parts = config.get("gradient_accumulation_steps", 1)
    run = train(weighted, config, model=model_folder, max_steps=STEPS)
    losses = mean_losses([run["losses"]], parts)
    np.testing.assert_allclose(losses, own_losses(weighted, model_folder, config), rtol=0, atol=1e-5)


def test_two_ranks_train_the_batches_and_losses_of_the_own_loop(weighted, model_folder, tmp_path):
    """One test covers all checks with two ranks, because starting processes is slow."""
    arguments = {"dataset": weighted, "config": ACCUMULATED, "model": model_folder, "folder": tmp_path}
    runs = ranks(2, "lightning_runs:two_rank_runs", **arguments)
    for rank, of_rank in enumerate(runs):
        own = own_batches(weighted, ACCUMULATED, 50, rank=rank, world_size=2)
        assert_own(of_rank["whole"]["batches"], own, 2)
        assert_own(of_rank["resumed"]["batches"], own[STEPS + 1 : 45], 2)
    losses = mean_losses([of_rank["whole"]["losses"][: 2 * STEPS] for of_rank in runs], 2)
    np.testing.assert_allclose(losses, own_losses(weighted, model_folder, ACCUMULATED), rtol=0, atol=1e-5)
    assert_validated([of_rank["validated"] for of_rank in runs], weighted, ACCUMULATED)

    # The first run had 50 steps. The second run resumed at step 21 and ended at step 45.
    (log,) = (tmp_path / "audit").iterdir()
    state = torch.load(tmp_path / "resumed" / "step=45.ckpt", weights_only=True)["EpisodeDataModule"]["audit"]
    result = verify_log(log, weighted, heads={"step=45": state["head"]})
    assert (result.fault, result.steps, state["cursor"]["step"]) == (None, 50 + 45 - (STEPS + 1), 45)
    assert "ranks=all" in log.read_text()

    checkpoint = tmp_path / f"step={STEPS + 1}.ckpt"
    resumed = train(weighted, ACCUMULATED, model=model_folder, ckpt_path=checkpoint, max_steps=45)
    assert_own(resumed["batches"], own_batches(weighted, ACCUMULATED, 45)[STEPS + 1 :], 2)


# Resuming.

SIX = {**PACKED, "batch_size": 6}


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    return lightning_runs.small_dataset(tmp_path_factory.mktemp("data") / "small")


@pytest.fixture
def small_windows(monkeypatch):
    """Use a small packing window, so that epochs have different numbers of packed rows."""
    monkeypatch.setattr("chatmill.load.plan.WINDOW", 16)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_resume_from_a_checkpoint_of_any_step_trains_the_batches_that_would_have_come(accumulation, small, tmp_path):
    config = {**SIX, "gradient_accumulation_steps": accumulation}
    assert lightning_runs.steps_of_epochs(small, config, 3) == [3, 3, 3]
    whole = train(small, config, epochs=3, checkpoints=tmp_path)
    assert_own(whole["batches"], own_batches(small, config, 9), accumulation)
    for step in range(1, 9):
        resumed = train(small, config, epochs=3, ckpt_path=tmp_path / f"step={step}.ckpt")
        assert (resumed["step"], resumed["epoch"]) == (9, 3)
        assert_same_batches(resumed["batches"], whole["batches"][step * accumulation :])
        np.testing.assert_allclose(resumed["losses"], whole["losses"][step * accumulation :], rtol=0, atol=1e-6)


def test_epochs_of_different_lengths_are_trained_by_steps(small, small_windows, tmp_path):
    assert lightning_runs.steps_of_epochs(small, SIX, 3) == [3, 4, 4]
    line = "the 3 epochs have 11 steps in total, but Lightning assumes 3 .*max_epochs=-1 and max_steps=11 to Trainer"
    with pytest.raises(UsageError, match=line):
        train(small, SIX, epochs=3)
    whole = train(small, SIX, epochs=-1, max_steps=11, checkpoints=tmp_path)
    assert_own(whole["batches"], own_batches(small, SIX, 11))
    for step in (2, 3, 4, 7, 10):
        resumed = train(small, SIX, epochs=-1, max_steps=11, ckpt_path=tmp_path / f"step={step}.ckpt")
        assert_same_batches(resumed["batches"], whole["batches"][step:])


def test_a_trainer_that_fetches_ahead_saves_the_position_of_what_it_trained(small, tmp_path):
    # The order `random` has no epochs and no length, so Lightning fetches one batch ahead.
    config = {**UNPACKED, "batch_sampling_mode": "random"}
    train(small, config, max_steps=6, checkpoints=tmp_path)
    for step in (1, 4):
        resumed = train(small, config, max_steps=9, ckpt_path=tmp_path / f"step={step}.ckpt")
        assert_own(resumed["batches"], own_batches(small, config, 9)[step:])


def test_a_checkpoint_between_two_batches_of_a_step_is_refused(small, tmp_path):
    class SaveInsideOfAStep(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if batch_idx == 2:
                trainer.save_checkpoint(tmp_path / "inside.ckpt")

    train(small, ACCUMULATED, max_steps=2, callbacks=(SaveInsideOfAStep(),))
    with pytest.raises(
        UsageError, match="after 1 of 2 batches of step 1, and gradients were lost; resume from a checkpoint"
    ):
        train(small, ACCUMULATED, max_steps=4, ckpt_path=tmp_path / "inside.ckpt")


def test_limits_and_a_second_fit_go_on_with_the_next_rows(small):
    module, data = Recorder(), EpisodeDataModule(small, SIX)
    trainer = make_trainer(epochs=3, limit_train_batches=3, limit_val_batches=0)
    trainer.fit(module, data)
    trainer.fit_loop.max_epochs = 5
    trainer.fit(module, data)
    assert trainer.global_step == 15
    assert_own(module.batches, own_batches(small, SIX, 15))
    module.batches.clear()
    make_trainer(max_steps=2, limit_val_batches=0).fit(module, data)
    assert_own(module.batches, own_batches(small, SIX, 2))


def test_a_batch_that_a_hook_skips_is_trained_next(small):
    class SkipOnce(Recorder):
        skips = 1

        def on_train_batch_start(self, batch, batch_idx):
            if batch_idx == 2 and self.skips:
                self.skips = 0
                return -1
            return None

    module = SkipOnce()
    make_trainer(max_steps=5, limit_val_batches=0).fit(module, EpisodeDataModule(small, SIX))
    assert_own(module.batches, own_batches(small, SIX, 5))


def val_oracle(dataset: Path, config, table: np.ndarray) -> float:
    loader = lightning_runs.EpisodeLoader(dataset, config, tensors=False)
    total = weight = 0.0
    scores = table - np.log(np.exp(table).sum(axis=1, keepdims=True))
    for batch in loader.one_pass("val"):
        for row, column in zip(*np.nonzero(batch.y != IGNORE_INDEX), strict=True):
            at = batch.weights[row, column]
            total -= at * scores[batch.x[row, column], batch.y[row, column]]
            weight += at
    return total / weight


def assert_validated(runs: list[dict], dataset: Path, config) -> None:
    loader = lightning_runs.EpisodeLoader(dataset, config, tensors=False)
    expected = sorted(row.tobytes() for batch in loader.one_pass("val") for row in batch.x)
    rows = [row.tobytes() for run in runs for batch in run["val_batches"] for row in batch["input_ids"][:, :-1]]
    assert sorted(rows) == expected
    assert len({len(run["val_batches"]) for run in runs}) == 1
    for run in runs:
        assert run["val_loss"] == pytest.approx(val_oracle(dataset, config, run["table"]), abs=1e-5)


def test_validation_reads_every_row_of_val_once(weighted):
    run = train(weighted, ACCUMULATED, max_steps=1, limit_val_batches=1.0, val_check_interval=2)
    assert_validated([run], weighted, ACCUMULATED)


@pytest.mark.filterwarnings("ignore:Total length of .list. across ranks is zero")
def test_a_dataset_without_val_has_no_validation(tmp_path):
    data = lightning_runs.small_dataset(tmp_path / "data", val_split=0)
    assert train(data, UNPACKED, max_steps=2, limit_val_batches=1.0)["val_batches"] == []


def test_batches_can_be_those_of_the_loader(small):
    class Plain(Recorder):
        def training_step(self, batch):
            assert isinstance(batch, WeightedBatch)
            self.batches.append({name: array.numpy() for name, array in batch.batch._asdict().items()})
            losses = torch.nn.functional.cross_entropy(
                self.model(batch.batch.x).transpose(1, 2), batch.batch.y, reduction="none"
            )
            return (losses * batch.batch.weights / batch.step_weight).sum()

    module = Plain()
    trainer = make_trainer(max_steps=5, limit_val_batches=0)
    trainer.fit(module, EpisodeDataModule(small, PACKED, columns=False))
    assert_same_batches(module.batches, own_batches(small, PACKED, 5))


def test_the_audit_log_of_a_second_fit_goes_on(small, tmp_path):
    module, data = Recorder(), EpisodeDataModule(small, SIX, audit_dir=tmp_path, audit_steps=2)
    trainer = make_trainer(max_steps=5, limit_val_batches=0)
    trainer.fit(module, data)
    trainer.fit_loop.epoch_loop.max_steps = 8
    trainer.fit(module, data)
    (path,) = tmp_path.iterdir()
    result = verify_log(path, small)
    assert (result.fault, result.steps) == (None, 8)


def test_the_audit_log_does_not_have_a_batch_that_was_only_fetched(small, tmp_path):
    config = {**UNPACKED, "batch_sampling_mode": "random"}
    train(small, config, max_steps=5, audit_dir=tmp_path)
    (path,) = tmp_path.iterdir()
    result = verify_log(path, small)
    assert (result.fault, result.steps) == (None, 5)


def test_another_accumulation_than_that_of_the_config_is_refused(small):
    data = EpisodeDataModule(small, UNPACKED)
    trainer = make_trainer(max_steps=1, accumulate_grad_batches=2)
    with pytest.raises(
        UsageError, match="accumulate_grad_batches is 2, but gradient_accumulation_steps is 1 in the config"
    ):
        trainer.fit(Recorder(), data)


def test_an_accumulation_that_changes_in_the_run_is_refused(small):
    scheduler = GradientAccumulationScheduler({0: 1, 1: 2})
    trainer = make_trainer(epochs=2, limit_val_batches=0, callbacks=(scheduler,))
    with pytest.raises(UsageError, match="accumulate_grad_batches is 2"):
        trainer.fit(Recorder(), EpisodeDataModule(small, SIX))


@pytest.mark.parametrize(
    ("config", "settings", "line"),
    [
        (
            ACCUMULATED,
            {"limit_train_batches": 3, "accumulate_grad_batches": 2},
            "set limit_train_batches to a multiple of 2",
        ),
        (UNPACKED, {"overfit_batches": 2}, "overfit_batches is set"),
        (
            {**UNPACKED, "batch_sampling_mode": "random"},
            {"epochs": 1},
            "the order random.* has no epochs; pass max_steps to Trainer",
        ),
    ],
    ids=["limit", "overfit", "endless"],
)
def test_settings_that_would_train_other_steps_are_refused(config, settings, line, small):
    with pytest.raises(UsageError, match=line):
        make_trainer(limit_val_batches=0, **{"epochs": 1, **settings}).fit(Recorder(), EpisodeDataModule(small, config))


def test_the_checkpoint_of_another_dataset_config_or_module_is_refused(small, weighted, tmp_path):
    train(small, UNPACKED, max_steps=2, checkpoints=tmp_path)
    checkpoint = tmp_path / "step=2.ckpt"
    with pytest.raises(UsageError, match="the loader state does not match this loader: the dataset hash was"):
        train(weighted, UNPACKED, max_steps=4, ckpt_path=checkpoint)
    with pytest.raises(UsageError, match="epoch_seed was 1337, but is now 1"):
        train(small, {**UNPACKED, "epoch_seed": 1}, max_steps=4, ckpt_path=checkpoint)
    with pytest.raises(UsageError, match="was saved with gradient_accumulation_steps 1, but it is now 2"):
        train(small, {**UNPACKED, "gradient_accumulation_steps": 2}, max_steps=4, ckpt_path=checkpoint)
    state = torch.load(checkpoint, weights_only=True)
    del state["EpisodeDataModule"]
    torch.save(state, tmp_path / "other.ckpt")
    with pytest.raises(UsageError, match=r"other\.ckpt: does not contain the state of EpisodeDataModule"):
        train(small, UNPACKED, max_steps=4, ckpt_path=tmp_path / "other.ckpt")


def test_a_trainer_that_does_not_know_of_all_processes_is_refused(small, monkeypatch):
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    with pytest.raises(UsageError, match=r"the trainer has 1 processes, but torch\.distributed has 2"):
        train(small, UNPACKED, max_steps=1)
