from __future__ import annotations

import doctest
import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hf_runs import COMMON, EvaluateAt, make_trainer, train
from trainer_fixtures import PACKED, STEPS, UNPACKED, open_model, own_batches, own_run
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments
from transformers.modeling_flash_attention_utils import prepare_fa_kwargs_from_position_ids

from chatmill.audit import AuditResult, verify_log
from chatmill.errors import ChatmillError, UsageError
from chatmill.integrations import hf
from chatmill.load.loader import EpisodeLoader

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning:torch", "ignore:.*:FutureWarning")
own = cache(lambda dataset, model, packed: own_run(dataset, model, PACKED if packed else UNPACKED))


def assert_rows_of_the_loop(inputs, dataset, config, *, first=0, rank=0, world_size=1):
    accumulation = config.get("gradient_accumulation_steps", 1)
    assert len(inputs) % accumulation == 0
    steps = len(inputs) // accumulation
    of_all = own_batches(dataset, config, first + steps)
    of_rank = own_batches(dataset, config, first + steps, rank=rank, world_size=world_size)
    for step in range(steps):
        whole, batch = of_all[first + step], of_rank[first + step]
        parts = inputs[step * accumulation : (step + 1) * accumulation]
        given = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        assert sorted(given) == ["input_ids", "labels", "position_ids"]
        labels, weights = plain_labels(given["labels"][:, 1:])
        np.testing.assert_array_equal(given["input_ids"][:, :-1], batch["x"])
        np.testing.assert_array_equal(labels, batch["y"])
        np.testing.assert_array_equal(given["position_ids"][:, :-1], batch["positions"])
        scale = (whole["y"] >= 0).sum() / whole["weights"].sum(dtype=np.float64)
        np.testing.assert_allclose(weights, batch["weights"] * scale, rtol=1e-6)
        np.testing.assert_array_equal(given["labels"][:, 0], -100)
        trained = batch["y"][:, -1] >= 0
        np.testing.assert_array_equal(given["input_ids"][trained, -1], batch["y"][trained, -1])
        np.testing.assert_array_equal(given["position_ids"][:, -1], np.where(trained, batch["positions"][:, -1] + 1, 0))


def plain_labels(labels):
    flat = [(label & 0xFFFFFFFF, (label >> 32) ^ 0x3F800000) if label >= 0 else (-100, 0) for label in labels.ravel()]
    ids, bits = np.array(flat, dtype=np.int64).T.reshape(2, *labels.shape)
    return ids, bits.astype(np.uint32).view(np.float32)


@pytest.mark.parametrize(
    ("data", "packed", "accumulation", "steps"),
    [("plain", False, 1, STEPS), ("plain", True, 2, STEPS), ("weighted", False, 2, STEPS), ("weighted", True, 1, 50)],
)
def test_rows_and_losses_are_those_of_the_own_loop(data, packed, accumulation, steps, model_folder, request, tmp_path):
    dataset = request.getfixturevalue(data)
    config = {**(PACKED if packed else UNPACKED), "gradient_accumulation_steps": accumulation}
    rows = hf.TrainRows(dataset, config, steps=steps)
    trainer = make_trainer(rows, model_folder, tmp_path)
    trainer.add_callback(EvaluateAt(STEPS))
    losses, inputs = train(trainer)
    assert len(losses) == steps
    assert_rows_of_the_loop(inputs, dataset, config)
    own_losses, own_val_loss = own(dataset, model_folder, packed)
    np.testing.assert_allclose(losses[:STEPS], own_losses, rtol=0, atol=1e-5)
    [val_loss] = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert val_loss == pytest.approx(own_val_loss, abs=1e-5)


def test_epochs_are_those_of_the_loader(plain, model_folder, tmp_path):
    rows = hf.TrainRows(plain, {**PACKED, "batch_size": 32}, epochs=2)
    assert rows.steps == len(EpisodeLoader(plain, {**PACKED, "batch_size": 32}, epochs=2))
    batches = make_trainer(rows, model_folder, tmp_path).get_train_dataloader()
    inputs = [{name: value.numpy() for name, value in batch.items()} for batch in batches]
    assert len(inputs) == rows.steps
    assert_rows_of_the_loop(inputs, plain, {**PACKED, "batch_size": 32})


# FlashAttention.


def test_flattened_rows_have_the_losses_of_the_own_loop(weighted, model_folder, tmp_path):
    rows = hf.TrainRows(weighted, PACKED, steps=STEPS)
    trainer = make_trainer(rows, model_folder, tmp_path, flatten=True)
    losses, inputs = train(trainer)
    assert {each["input_ids"].shape for each in inputs} == {(1, 4 * 129)}
    own_losses, own_val_loss = own(weighted, model_folder, True)
    np.testing.assert_allclose(losses, own_losses, rtol=0, atol=1e-5)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(own_val_loss, abs=1e-5)


def test_the_example_of_the_collator_runs():
    [test] = doctest.DocTestFinder(recurse=False).find(hf.Collator)
    assert doctest.DocTestRunner().run(test).failed == 0 < len(test.examples)


def test_flattened_rows_name_their_sequences_as_transformers_does(plain):
    rows = hf.TrainRows(plain, PACKED, steps=30)
    for step in range(30):
        batch = [rows[4 * step + row] for row in range(4)]
        flat = hf.Collator(flatten=True)(batch)
        # DataCollatorWithFlattening expects one example per conversation.
        alone = []
        for row in batch:
            starts = [at for at, position in enumerate(row["position_ids"].tolist()) if position == 0]
            for start, stop in zip(starts, [*starts[1:], len(row["input_ids"])], strict=True):
                alone.append({name: row[name][start:stop].tolist() for name in ("input_ids", "labels")})
        expected = DataCollatorWithFlattening(return_flash_attn_kwargs=True)(alone)
        assert flat.keys() == expected.keys()
        for name, value in expected.items():
            same = torch.equal(flat[name], value) if torch.is_tensor(value) else flat[name] == value
            assert same, name
            assert getattr(flat[name], "dtype", None) == getattr(value, "dtype", None), name
        (lengths, _), (longest, _) = prepare_fa_kwargs_from_position_ids(flat["position_ids"])
        assert torch.equal(flat["cu_seq_lens_q"], lengths) and flat["max_length_q"] == longest


def test_cu_seq_lens_of_two_packed_rows():
    rows = [
        {"input_ids": torch.tensor([5, 6, 7, 8]), "position_ids": torch.tensor([0, 1, 0, 1])},
        {"input_ids": torch.tensor([9, 10, 11, 0]), "position_ids": torch.tensor([0, 1, 2, 0])},
    ]
    batch = hf.Collator(flatten=True)(rows)
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        assert batch[name].dtype == torch.int32
        assert batch[name].tolist() == [0, 2, 4, 7, 8]
    assert (batch["max_length_q"], batch["max_length_k"]) == (3, 3)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9, 10, 11, 0]]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_packed_conversation_gets_the_logits_that_it_gets_alone(attention, plain, model_folder):
    model = open_model(model_folder)
    model.set_attn_implementation(attention)
    batch = hf.Collator()([hf.TrainRows(plain, PACKED, steps=1)[row] for row in range(4)])
    with torch.no_grad():
        logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
    checked = 0
    for row, positions in enumerate(batch["position_ids"].tolist()):
        starts = [at for at, position in enumerate(positions) if position == 0]
        for start, stop in zip(starts, [*starts[1:], len(positions)], strict=True):
            with torch.no_grad():
                alone = model(input_ids=batch["input_ids"][row : row + 1, start:stop]).logits[0]
            torch.testing.assert_close(logits[row, start:stop], alone, rtol=0, atol=1e-5)
            checked += start > 0
    assert checked > 4


def test_data_of_weight_1_trains_with_the_trainers_own_loss(plain, model_folder, tmp_path):
    rows = hf.TrainRows(plain, PACKED, steps=STEPS)
    args = TrainingArguments(str(tmp_path), **COMMON, **hf.training_arguments(rows))
    losses, _ = train(Trainer(open_model(model_folder), args, train_dataset=rows))
    np.testing.assert_allclose(losses, own(plain, model_folder, True)[0], rtol=0, atol=1e-5)


def test_weights_that_plain_labels_cannot_say_are_refused(weighted, model_folder, tmp_path):
    rows = hf.TrainRows(weighted, PACKED, steps=STEPS)
    args = TrainingArguments(str(tmp_path), **COMMON, **hf.training_arguments(rows))
    with pytest.raises(UsageError, match=r"different weights, .* pass \*\*hf\.trainer_arguments\(rows\) to Trainer"):
        Trainer(open_model(model_folder), args, train_dataset=rows).train()


def test_a_step_without_a_trained_token_changes_nothing_to_nan():
    labels = torch.full((1, 4), -100)
    logits = torch.randn(1, 4, 8, requires_grad=True)
    loss = hf.weighted_loss({"logits": logits}, labels, torch.tensor(0))
    loss.backward()
    assert loss.item() == 0 and logits.grad.abs().sum() == 0


# Resume.


@pytest.mark.parametrize("workers", [0, 2])
def test_resume_from_a_checkpoint_gives_the_rows_that_would_have_come(weighted, model_folder, tmp_path, workers):
    config = {**PACKED, "gradient_accumulation_steps": 2}
    rows = hf.TrainRows(weighted, config, steps=12)
    saving = {"save_strategy": "steps", "save_steps": 1, "dataloader_num_workers": workers}
    losses, _ = train(make_trainer(rows, model_folder, tmp_path, **saving))
    for step, data in ((5, rows), (1, hf.TrainRows(weighted, config, steps=12)), (11, rows)):
        resumed = make_trainer(data, model_folder, tmp_path, dataloader_num_workers=workers)
        again, inputs = train(resumed, resume=tmp_path / f"checkpoint-{step}")
        assert len(inputs) == 2 * (12 - step)
        assert_rows_of_the_loop(inputs, weighted, config, first=step)
        # The losses before the checkpoint are restored from the state of the trainer.
        assert again[:step] == losses[:step]
        np.testing.assert_allclose(again, losses, rtol=0, atol=1e-6)


@pytest.fixture
def checkpoint(weighted, model_folder, tmp_path):
    rows = hf.TrainRows(weighted, PACKED, steps=4)
    train(make_trainer(rows, model_folder, tmp_path, max_steps=2, save_strategy="steps", save_steps=2))
    return tmp_path / "checkpoint-2"


def test_a_run_on_other_data_or_in_another_order_does_not_resume(checkpoint, plain, weighted, model_folder):
    for data, config, fault in (
        (plain, PACKED, "the dataset hash was"),
        (weighted, UNPACKED, 'packing was "bins", but is now "none"'),
        (weighted, {**PACKED, "epoch_seed": 1}, "epoch_seed was 1337, but is now 1"),
    ):
        trainer = make_trainer(hf.TrainRows(data, config, steps=4), model_folder, checkpoint.parent)
        with pytest.raises(UsageError, match=rf"chatmill_state\.json: .*{fault}"):
            trainer.train(resume_from_checkpoint=str(checkpoint))


def test_a_damaged_or_missing_state_is_one_line(checkpoint, weighted, model_folder, tmp_path):
    state = checkpoint / "chatmill_state.json"
    saved = json.loads(state.read_text())
    assert saved["loader"]["cursors"]["train"]["step"] == 2 and saved["audit"] is None

    def resume(**options):
        trainer = make_trainer(hf.TrainRows(weighted, PACKED, steps=4, **options), model_folder, checkpoint.parent)
        trainer.train(resume_from_checkpoint=str(checkpoint))

    with pytest.raises(UsageError, match="has no audit log; remove audit_dir"):
        resume(audit_dir=tmp_path / "audit")
    state.write_text("{")
    with pytest.raises(UsageError, match=r"chatmill_state\.json: cannot be read"):
        resume()
    saved["loader"]["cursors"]["train"]["step"] = 1
    state.write_text(json.dumps(saved))
    with pytest.raises(UsageError, match="is at step 1, but the trainer is at step 2"):
        resume()
    state.unlink()
    with pytest.warns(UserWarning, match="does not exist, so chatmill cannot check the position in the data"):
        resume()
    with pytest.raises(UsageError, match="does not exist"):
        resume(audit_dir=tmp_path / "audit")


# Refusals.


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"train_sampling_strategy": "random"}, "train_sampling_strategy is 'random'; expected 'sequential'"),
        ({"per_device_train_batch_size": 2}, "per_device_train_batch_size is 2; expected 4"),
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps is 2; expected 1"),
        ({"num_train_epochs": 2}, "num_train_epochs is 2; expected 1"),
        ({"max_steps": 11}, "max_steps is 11, but the dataset has 10 steps"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor is 0.1; expected 0"),
        ({"remove_unused_columns": True}, "remove_unused_columns is True; expected False"),
        ({"use_cache": True}, "use_cache is True; expected False"),
    ],
)
def test_arguments_that_would_train_other_rows_are_refused_before_the_first_step(
    plain, model_folder, tmp_path, changes, fault
):
    trainer = make_trainer(hf.TrainRows(plain, PACKED, steps=10), model_folder, tmp_path, **changes)
    with pytest.raises(UsageError) as refused:
        trainer.train()
    assert str(refused.value) == f"the trainer's arguments would change the rows or the loss: {fault}"


def test_flash_attention_is_refused_where_rows_are_not_flattened(plain, model_folder, tmp_path):
    trainer = make_trainer(hf.TrainRows(plain, PACKED, steps=10), model_folder, tmp_path)
    trainer.model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UsageError, match=r"flash_attention_2 lets conversations .* expected flatten=True"):
        trainer.train()


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"train_sampling_strategy": "random"}, "rank 0 of 1 reads rows .* use a sampler that does not shuffle"),
        ({"train_sampling_strategy": "random", "dataloader_num_workers": 2}, "use a sampler that does not shuffle"),
        (
            {"train_sampling_strategy": "group_by_length"},
            "rank 0 of 1 reads rows .* use a sampler that does not shuffle",
        ),
        ({"per_device_train_batch_size": 2}, "reads batches of 2 rows on 1 ranks; expected 4 for batch_size 4"),
        ({"num_train_epochs": 2}, "begins epoch 2, but the dataset contains the whole run of 3 steps"),
    ],
)
def test_without_the_callback_the_dataset_itself_refuses(plain, model_folder, tmp_path, changes, fault):
    rows = hf.TrainRows(plain, PACKED, steps=3)
    args = {**COMMON, **hf.training_arguments(rows), **changes}
    trainer = Trainer(open_model(model_folder), TrainingArguments(str(tmp_path), **args), train_dataset=rows)
    with pytest.raises(ChatmillError, match=fault):
        trainer.train()


# Tests of the audit log.


def verified(folder: Path) -> AuditResult:
    [log] = folder.glob("*.log")
    return verify_log(log)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_audit_log_has_the_steps_that_were_trained_and_verifies(weighted, model_folder, tmp_path, workers):
    config = {**PACKED, "batch_size": 16, "gradient_accumulation_steps": 2}
    options = {"save_strategy": "steps", "save_steps": 4, "dataloader_num_workers": workers}
    audited = {"epochs": 2, "audit_dir": tmp_path / "audit"}
    rows = hf.TrainRows(weighted, config, **audited)
    # Workers have already read further batches, which must not be logged.
    train(make_trainer(rows, model_folder, tmp_path, max_steps=6, **options))
    stopped = verified(tmp_path / "audit")
    assert (stopped.fault, stopped.steps) == (None, 6)
    train(
        make_trainer(hf.TrainRows(weighted, config, **audited), model_folder, tmp_path, **options),
        resume=tmp_path / "checkpoint-4",
    )
    result = verified(tmp_path / "audit")
    # Steps 4 and 5 were abandoned when the run resumed from step 4.
    assert (result.fault, result.steps, result.abandoned) == (None, 6 + rows.steps - 4, 2)
    [log] = (tmp_path / "audit").glob("*.log")
    assert log.read_text().count("action=epoch_complete") == 2


def test_the_audit_log_shows_a_batch_that_was_not_the_runs(plain, model_folder, tmp_path, monkeypatch):
    rows = hf.TrainRows(plain, PACKED, steps=4, audit_dir=tmp_path / "audit")
    read = rows.read
    monkeypatch.setattr(rows, "read", lambda first, **kwargs: read(0 if first == 8 else first, **kwargs))
    train(make_trainer(rows, model_folder, tmp_path))
    assert "steps has digest" in verified(tmp_path / "audit").fault


def test_a_run_that_failed_resumes_in_the_same_process_with_its_log(plain, model_folder, tmp_path):
    rows = hf.TrainRows(plain, PACKED, steps=6, audit_dir=tmp_path / "audit")
    trainer = make_trainer(rows, model_folder, tmp_path, save_strategy="steps", save_steps=2)
    training_step = trainer.training_step
    calls = iter(range(3))

    def failing_step(*args):
        next(calls)
        return training_step(*args)

    trainer.training_step = failing_step
    with pytest.raises(StopIteration):
        trainer.train()
    train(make_trainer(rows, model_folder, tmp_path), resume=tmp_path / "checkpoint-2")
    result = verified(tmp_path / "audit")
    assert (result.fault, result.steps) == (None, 7)  # the third step ran twice
