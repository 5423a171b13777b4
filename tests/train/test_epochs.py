from __future__ import annotations

import json
import math
from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from train_fixtures import config, curve, prepare, trained, weights, write_files

from chatmill.audit import verify_log
from chatmill.config import keys_of
from chatmill.errors import UsageError
from chatmill.load import plan as plan_module
from chatmill.load.loader import EpisodeLoader
from chatmill.rollout.config import RolloutConfig
from chatmill.train.command import run
from chatmill.train.config import TrainConfig, layered
from chatmill.train.loop import train_model
from chatmill.train.run_dir import read_metrics
from chatmill.train.run_length import RunLength, run_length

EPOCHS = {"max_iters": None, "pad_token_id": 0}


def uneven(folder: Path, count: int, *, seed: int = 0) -> Path:
    """Write a dataset whose episodes have 3 to 39 tokens, so that packing differs between epochs."""
    rng = np.random.default_rng(seed)
    episodes = [rng.integers(1, 50, size).tolist() for size in rng.integers(3, 40, count)]
    return write_files(folder, episodes, [[1] * len(ids) for ids in episodes])


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return uneven(tmp_path_factory.mktemp("uneven") / "data", 61)


@pytest.fixture(scope="module")
def mix(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("mix")
    prepare(root, "large", "--val-split", "0.2", seed=1, count=60)
    prepare(root, "small", "--val-split", "0.2", seed=3, count=20)
    return root


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    monkeypatch.setattr(plan_module, "WINDOW", 16)


def length(dataset: Path, **changes: object):
    settings = config(**{**EPOCHS, **changes})
    loader = EpisodeLoader(dataset, settings, ahead=0, tensors=False)
    try:
        return run_length(settings, loader)
    finally:
        loader.close()


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    tenths=st.integers(1, 35),
    batch_size=st.integers(1, 9),
    packing=st.sampled_from(["none", "bins"]),
    drop=st.booleans(),
    mode=st.sampled_from(["epoch", "feistel"]),
)
def test_the_step_count_equals_the_loader_steps_of_these_epochs(data, tenths, batch_size, packing, drop, mode):
    order = {"batch_size": batch_size, "packing": packing, "epoch_drop_last": drop, "batch_sampling_mode": mode}
    epochs = tenths / 10
    loader = EpisodeLoader(data, config(**EPOCHS, **order), epochs=math.ceil(epochs), ahead=0, tensors=False)
    counts: Counter[int] = Counter()
    for _ in iter(lambda: loader.cursor().epoch < math.ceil(epochs), False):
        counts[loader.cursor().epoch] += 1
        loader.get_batch()
    whole = tenths // 10
    expected = sum(counts[epoch] for epoch in range(whole))
    if tenths % 10:
        expected += math.ceil(Fraction(tenths % 10, 10) * counts[whole])
    assert length(data, epochs=epochs, **order).steps == expected


def test_epochs_of_different_packed_lengths_are_all_counted(data):
    one, *more = (length(data, epochs=count, batch_size=1, packing="bins").steps for count in (1, 2, 3, 4, 5, 6))
    differences = np.diff([one, *more])
    assert len(set(differences.tolist()) | {one}) > 1


@pytest.mark.parametrize("order", [{}, {"packing": "bins", "epoch_drop_last": False}])
def test_a_run_of_two_epochs_ends_after_the_second_and_logs_the_epoch(data, tmp_path, order):
    result = trained(data, tmp_path, epochs=2, audit_dir=str(tmp_path / "audit"), **EPOCHS, **order)
    state = json.loads((result.checkpoint / "checkpoint.json").read_text())
    assert state["loader"]["cursors"]["train"] == {"step": result.step, "epoch": 2, "window": 0, "row": 0}
    passed = [line["epoch"] for line in read_metrics(result.folder)]
    assert passed == sorted(passed) and passed[-1] == 2 and 0 < passed[0] < 1 and 1 in passed
    [log] = (tmp_path / "audit").glob("*.log")
    assert verify_log(log).fault is None


@pytest.mark.parametrize(
    ("epochs", "count", "which"), [(1, "1", "the epoch"), (3, "about 1", "each epoch"), (2.5, "about 1", "each epoch")]
)
def test_episodes_that_do_not_fill_a_batch_are_reported(data, epochs, count, which):
    settings = config(epochs=epochs, batch_size=4, **EPOCHS)
    loader = EpisodeLoader(data, settings, ahead=0, tensors=False)
    [note] = run_length(settings, loader).left_out_note(loader)
    assert note.startswith(
        f"{count} of 61 episodes do not fill a batch at the end of {which} and are dropped; add --epoch_drop_last false"
    )


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({"batch_size": 61}, "the run has only 1 optimizer step; raise --epochs to train longer"),
        ({"batch_size": 7}, "the run has only 8 optimizer steps; raise --epochs to train longer"),
        ({"batch_size": 6}, None),
        ({"batch_size": 61, "epochs": 10}, None),
        ({"batch_size": 61, "max_iters": 1}, None),
    ],
)
def test_a_run_with_few_steps_says_how_to_train_longer(data, changes, note):
    settings = config(**{**EPOCHS, **changes})
    loader = EpisodeLoader(data, settings, ahead=0, tensors=False)
    assert list(run_length(settings, loader).short_note(settings)) == ([] if note is None else [note])


def test_a_short_post_training_run_suggests_smaller_batches():
    [note] = RunLength(1).short_note(config(post_training=True, max_iters=None))
    assert note == "the run has only 1 optimizer step; lower --batch_size for more steps"


def test_a_short_run_prints_its_number_of_steps_when_it_starts(data, tmp_path, capsys):
    train_model(config(**{**EPOCHS, "batch_size": 40}), model_name="run", dataset_dir=data, out_dir=tmp_path)
    err = capsys.readouterr().err
    assert "are dropped; add --epoch_drop_last false to train on these episodes\n" in err
    assert "the run has only 1 optimizer step; raise --epochs to train longer\n" in err


def test_raising_epochs_continues_a_run_in_the_same_order(data, tmp_path):
    same = {"lr_schedule": "constant", "packing": "bins", **EPOCHS}
    whole = trained(data, tmp_path, name="whole", epochs=2.5, **same)
    half = trained(data, tmp_path, name="half", epochs=0.5, **same)
    assert half.step < whole.step
    for resume, steps in ((2.5, whole.step), (2.5, whole.step)):
        half = trained(data, tmp_path, name="half", epochs=resume, resume="auto", **same)
        assert half.step == steps
    assert curve(half.folder) == curve(whole.folder)
    np.testing.assert_equal(weights(half.checkpoint), weights(whole.checkpoint))


@pytest.mark.parametrize("by", ["rows", "tokens", "trained_tokens"])
@pytest.mark.parametrize("drop", [True, False])
def test_an_epoch_of_a_mix_has_as_many_rows_as_its_sources_together(mix, by, drop):
    order = {"mix_sft": {"large": 1, "small": 2}, "mix_by": by, "epoch_drop_last": drop, "batch_size": 5}
    found = length(mix, epochs=2, **order)
    # `large` has 46 rows and `small` 17, so two epochs are 126 rows.
    assert found.steps == (25 if drop else 26)
    if by == "rows":
        # A third of the 126 rows, 42 rows, are from `large`, which is 42 / 46 of a pass over `large`.
        assert found.notes == [
            "2 epochs of the mix correspond to these passes over each source: large 0.913, small 4.94"
        ]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_an_epoch_of_a_packed_mix_has_as_many_episodes_as_its_sources_together(mix, batch_size):
    order = {"mix_sft": {"large": 1, "small": 1}, "packing": "bins", "block_size": 60, "batch_size": batch_size}
    steps = length(mix, epochs=1.5, epoch_drop_last=False, **order).steps
    loader = EpisodeLoader(mix, config(**EPOCHS, **order), ahead=0, tensors=False)
    plan = loader.plan("train")
    taken = [len(step.episodes) for step, _ in zip(plan.steps(loader.cursor()), range(steps), strict=False)]
    assert sum(taken[:-1]) < 1.5 * 63 <= sum(taken)


def test_a_mixed_run_reports_the_passes_over_each_source(mix, tmp_path, capsys):
    settings = config(epochs=0.5, mix_sft={"large": 1, "small": 1}, log_interval=1, **EPOCHS)
    result = train_model(settings, model_name="run", dataset_dir=mix, out_dir=tmp_path)
    assert result.step == 8
    said = capsys.readouterr().err
    # Half an epoch of 46 + 17 rows is 32 rows, 16 from each source.
    assert "0.5 epochs of the mix correspond to these passes over each source: large 0.348, small 0.941\n" in said
    assert "step 4/8  epoch 0.25  loss" in said
    assert [line["epoch"] for line in read_metrics(result.folder)] == [4 * step / 63 for step in range(1, 9)]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"max_iters": 5, "epochs": 3}, "max_iters is 5 and epochs is 3; set only one of these keys"),
        ({"epochs": 0}, "epochs is 0; expected a number greater than 0 and at most 1000000, or null"),
        ({"epochs": float("nan")}, "epochs is NaN; expected a number greater than 0"),
        (
            {"post_training": True, "epochs": 2},
            "post_training is true and epochs is 2; post-training runs for at most one epoch",
        ),
        (
            {"tokens_per_step": 999, "gradient_accumulation_steps": 2},
            "tokens_per_step is 999 and gradient_accumulation",
        ),
    ],
)
def test_keys_that_contradict_each_other_are_refused(changes, said):
    with pytest.raises(UsageError, match=r"^the config: ") as error:
        config(**{"max_iters": None, **changes})
    assert said in str(error.value)


def test_rollout_training_does_not_have_keys_without_an_effect():
    keys = {"epochs", "tokens_per_step", "early_stop_patience", "early_stop_min_delta", "keep_best"}
    assert keys <= keys_of(TrainConfig).keys() and not keys & keys_of(RolloutConfig).keys()


def test_orders_without_epochs_are_refused(sums_data, mix, tmp_path):
    for more in ({}, {"mix_sft": {"large": 1}}):
        where = mix if more else sums_data
        with pytest.raises(
            UsageError, match=r"^epochs is 3, but the order .* has no epochs; set max_iters, or batch_samp"
        ):
            trained(where, tmp_path, epochs=3, max_iters=None, batch_sampling_mode="random", **more)
    with pytest.raises(UsageError, match=r"one pass, but the order mix/1.* has no epochs; set max_iters or epochs$"):
        trained(mix, tmp_path, max_iters=None, mix_sft={"large": 1})
    with pytest.raises(
        UsageError, match=r"0.01 epochs of the mix have 1 rows, but a batch has 4 rows; lower batch_size"
    ):
        trained(mix, tmp_path, max_iters=None, epochs=0.01, mix_sft={"large": 1})


def test_a_later_layer_replaces_the_other_key_of_a_pair():
    assert layered({"max_iters": 10}, {"epochs": 3}) == {"epochs": 3}
    assert layered({"epochs": 3}, {"max_iters": 10}) == {"max_iters": 10}
    assert layered({"epochs": 3, "max_iters": None}, {"max_iters": 10}) == {"max_iters": 10}
    # The stored config contains batch_size and tokens_per_step. If tokens_per_step is given, batch_size becomes the
    # number of rows per micro-batch.
    stored = {"batch_size": 64, "gradient_accumulation_steps": 8, "tokens_per_step": None}
    assert layered(stored, {"tokens_per_step": 99}) == {"batch_size": 8, "tokens_per_step": 99}
    assert layered(stored, {"tokens_per_step": 99, "batch_size": 4}) == {"batch_size": 4, "tokens_per_step": 99}


@given(tokens=st.integers(1, 10**6), rows=st.integers(1, 64), block=st.integers(1, 4096))
def test_accumulation_is_as_close_as_possible_to_tokens_per_step(tokens, rows, block):
    stated = TrainConfig(tokens_per_step=tokens, batch_size=rows, block_size=block)
    chosen, [note] = stated.with_accumulation()
    steps = chosen.gradient_accumulation_steps
    assert chosen.batch_size == rows * steps and chosen.tokens_per_step is None
    away = abs(tokens - steps * rows * block)
    assert all(away <= abs(tokens - other * rows * block) for other in (max(1, steps - 1), steps + 1))
    assert note.startswith(
        f"tokens_per_step {tokens}: gradient_accumulation_steps is {steps}, "
        f"with {rows} rows of {block} tokens per micro-batch"
    )
    assert chosen.with_accumulation() == (chosen, [])


def test_tokens_per_step_trains_like_the_batch_size_it_chooses(sums_data, tmp_path, capsys):
    plain = {"batch_size": 8, "gradient_accumulation_steps": 4, "max_iters": 6, "lr_schedule": "constant"}
    expected = trained(sums_data, tmp_path, name="plain", **plain)
    stated = {**plain, "batch_size": 2, "gradient_accumulation_steps": 1, "tokens_per_step": 8 * 48}
    audit = {"audit_dir": str(tmp_path / "audit")}
    train_model(
        config(**{**stated, "max_iters": 3}, **audit), model_name="run", dataset_dir=sums_data, out_dir=tmp_path
    )
    note = "tokens_per_step 384: gradient_accumulation_steps is 4, with 2 rows of 48 tokens per micro-batch\n"
    assert note in capsys.readouterr().err
    flags = {"model_name": "run", "out_dir": str(tmp_path), "resume": "auto"}
    run({**flags, "tokens_per_step": "384", "batch_size": "2", "max_iters": "4"})
    run({**flags, "tokens_per_step": "384", "max_iters": "5"})
    result = run({**flags, "max_iters": "6"})
    assert [step for step, _ in curve(result.folder)] == [1, 2, 3, 4, 5, 6]
    stored = json.loads((result.folder / "config.json").read_text())
    assert (stored["batch_size"], stored["gradient_accumulation_steps"], stored["tokens_per_step"]) == (8, 4, None)
    np.testing.assert_allclose(curve(result.folder), curve(expected.folder), rtol=1e-4)
    chosen = [
        EpisodeLoader(sums_data, config(**stated).with_accumulation()[0], rank=rank, world_size=2) for rank in (0, 1)
    ]
    rows = np.concatenate([loader.get_batch().episode_ids for loader in chosen])
    np.testing.assert_array_equal(rows, EpisodeLoader(sums_data, config(**plain)).get_batch().episode_ids)
    [log] = (tmp_path / "audit").glob("*.log")
    assert verify_log(log).fault is None
