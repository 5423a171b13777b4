from __future__ import annotations

import numpy as np
import pytest
from hf_runs import EvaluateAt, make_trainer, train
from test_hf import assert_rows_of_the_loop, verified
from trainer_fixtures import PACKED, STEPS, UNPACKED, own_run

from chatmill.errors import UsageError
from chatmill.integrations import hf, trl

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(
    ("kind", "data", "config"),
    [
        ("SFTTrainer", "plain", {**PACKED, "gradient_accumulation_steps": 2}),
        ("SFTTrainer", "plain", UNPACKED),
        ("WeightedSFTTrainer", "weighted", {**PACKED, "gradient_accumulation_steps": 2}),
        ("WeightedSFTTrainer", "weighted", UNPACKED),
    ],
)
def test_rows_and_losses_are_those_of_the_own_loop(kind, data, config, model_folder, request, tmp_path):
    dataset = request.getfixturevalue(data)
    rows = hf.TrainRows(dataset, config, steps=STEPS)
    trainer = make_trainer(rows, model_folder, tmp_path, kind)
    trainer.add_callback(EvaluateAt(STEPS))
    losses, inputs = train(trainer)
    assert_rows_of_the_loop(inputs, dataset, config)
    own_losses, own_val_loss = own_run(dataset, model_folder, config)
    np.testing.assert_allclose(losses, own_losses, rtol=0, atol=1e-5)
    if kind == "WeightedSFTTrainer":
        [val_loss] = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
        assert val_loss == pytest.approx(own_val_loss, abs=1e-5)
    # Accuracy rises only if TRL computes its metrics from plain labels.
    accuracies = [entry["mean_token_accuracy"] for entry in trainer.state.log_history if "mean_token_accuracy" in entry]
    assert accuracies[-1] > accuracies[0]


def test_flattened_rows_have_the_losses_of_the_own_loop(weighted, model_folder, tmp_path):
    rows = hf.TrainRows(weighted, PACKED, steps=5)
    losses, _ = train(make_trainer(rows, model_folder, tmp_path, "WeightedSFTTrainer", flatten=True))
    np.testing.assert_allclose(losses, own_run(weighted, model_folder, PACKED, steps=5)[0], rtol=0, atol=1e-5)


def test_resume_gives_the_rows_that_would_have_come_and_continues_the_audit_log(weighted, model_folder, tmp_path):
    rows = hf.TrainRows(weighted, PACKED, steps=6, audit_dir=tmp_path / "audit")
    saving = {"save_strategy": "steps", "save_steps": 2}
    losses, _ = train(make_trainer(rows, model_folder, tmp_path, "WeightedSFTTrainer", **saving))
    resumed = make_trainer(rows, model_folder, tmp_path, "WeightedSFTTrainer", dataloader_num_workers=2)
    again, inputs = train(resumed, resume=tmp_path / "checkpoint-2")
    assert len(inputs) == 4
    assert_rows_of_the_loop(inputs, weighted, PACKED, first=2)
    np.testing.assert_allclose(again, losses, rtol=0, atol=1e-6)
    result = verified(tmp_path / "audit")
    assert (result.fault, result.steps) == (None, 6 + 4)


def test_weights_are_refused_by_the_trainer_that_cannot_count_them(weighted, model_folder, tmp_path):
    rows = hf.TrainRows(weighted, PACKED, steps=4)
    with pytest.raises(UsageError, match=r"different weights, .* or train with trl\.WeightedSFTTrainer"):
        make_trainer(rows, model_folder, tmp_path, "SFTTrainer").train()


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps is 2; expected 1"),
        ({"max_length": 64}, "max_length is 64; expected None"),
        ({"loss_type": "dft"}, "loss_type is 'dft'; expected 'nll'"),
    ],
)
def test_arguments_that_would_train_other_rows_are_refused(plain, model_folder, tmp_path, changes, fault):
    trainer = make_trainer(hf.TrainRows(plain, PACKED, steps=4), model_folder, tmp_path, "SFTTrainer", **changes)
    with pytest.raises(UsageError) as refused:
        trainer.train()
    assert str(refused.value) == f"the trainer's arguments would change the rows or the loss: {fault}"


def test_the_weighted_trainer_wants_the_rows_of_a_run(model_folder):
    with pytest.raises(UsageError, match=r"pass \*\*trl\.trainer_arguments\(rows\)"):
        trl.WeightedSFTTrainer(str(model_folder), train_dataset=None)
