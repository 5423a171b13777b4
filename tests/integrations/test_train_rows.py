from __future__ import annotations

import doctest
import json
import os
import pickle
import random
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import chatmill.load.plan
from chatmill import EpisodeLoader, InputSource, Job, prepare_dataset
from chatmill.errors import UsageError
from chatmill.integrations.columns import causal_lm_columns, sequence_lengths, split_labels, weighted_labels
from chatmill.integrations.train_rows import EvalRows, TrainRows, rank_and_world_size
from chatmill.load.batch_builder import trained_weights
from chatmill.load.plan import Cursor

BASE = {"batch_size": 12, "block_size": 60, "use_loss_mask": True}
ORDERS = {
    "epoch": {},
    "kept last": {"epoch_drop_last": False},
    "in order": {"epoch_shuffle": False},
    "random": {"batch_sampling_mode": "random"},
    "feistel": {"batch_sampling_mode": "feistel"},
    "packed": {"packing": "bins", "block_size": 200},
    "packed, kept last": {"packing": "bins", "block_size": 200, "epoch_drop_last": False},
    "packed feistel": {"packing": "bins", "block_size": 200, "batch_sampling_mode": "feistel"},
    "mixed": {"mix_sft": {"a": 0.7, "b": 0.3}},
    "mixed by tokens": {"mix_sft": {"a": 0.5, "b": 0.5}, "mix_by": "tokens"},
    "packed and mixed": {"packing": "bins", "block_size": 200, "mix_sft": {"a": 1, "b": 2}},
    "epochs of a mix": {"mix_epochs": {"a": 1, "b": 2}},
    "packed epochs of a mix": {"packing": "bins", "block_size": 200, "mix_epochs": {"a": 2, "b": 1}},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    rng = random.Random(3)
    for name, count in (("a", 130), ("b", 70)):
        lines = []
        for number in range(count):
            answer = {"role": "assistant", "content": "x" * rng.randint(1, 30)}
            if name == "b" and number % 3 == 0:
                answer["weight"] = 0.3
            lines.append(json.dumps({"messages": [{"role": "user", "content": f"{name}{number}"}, answer]}))
        source = folder / f"{name}.jsonl"
        source.write_text("\n".join(lines) + "\n")
        job = Job((InputSource((str(source),)),), val_split=0.2, shard_tokens=500)
        prepare_dataset(job, folder / "mix" / name)
    return folder / "mix"


def config_and_folder(order, data):
    config = {**BASE, **ORDERS[order]}
    return config, data if "mix_sft" in config or "mix_epochs" in config else data / "a"


@pytest.mark.parametrize("value", [TrainRows, causal_lm_columns, sequence_lengths, weighted_labels])
def test_the_example_of_a_docstring_runs(value, tmp_path, monkeypatch):
    (tmp_path / "data").symlink_to(Path(__file__).resolve().parents[2] / "data")
    monkeypatch.chdir(tmp_path)
    [test] = doctest.DocTestFinder(recurse=False).find(value, globs={"chatmill": chatmill})
    assert doctest.DocTestRunner().run(test).failed == 0 < len(test.examples)


@pytest.mark.parametrize("order", ORDERS)
@settings(max_examples=3)
@given(window=st.integers(20, 80), size=st.integers(2, 8), seed=st.integers(0, 1000), steps=st.permutations(range(16)))
def test_the_cursor_of_a_step_is_where_all_steps_before_it_end(data, order, window, size, seed, steps):
    config, folder = config_and_folder(order, data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chatmill.load.plan, "WINDOW", window)
        patch.setattr(chatmill.load.plan, "BLOCK", min(window, 16))
        plan = EpisodeLoader(folder, {**config, "batch_size": size, "epoch_seed": seed}).plan("train")
        one_by_one = [step.at for step in islice(plan.steps(Cursor()), 16)]
        assert [plan.cursor_at(step) for step in steps] == [one_by_one[step] for step in steps]


@pytest.mark.parametrize("order", [order for order in ORDERS if "random" not in order and "mix" not in order])
@pytest.mark.parametrize("epochs", [1, 3])
def test_the_length_of_a_loader_is_the_number_of_its_batches(data, order, epochs):
    config, folder = config_and_folder(order, data)
    loader = EpisodeLoader(folder, config, epochs=epochs)
    assert len(loader) == len(list(loader)) >= epochs


def test_a_loader_without_epochs_has_no_length(data):
    with pytest.raises(TypeError, match="without epochs has no length"):
        len(EpisodeLoader(data / "a", BASE))


# Rows.


@pytest.mark.parametrize(
    ("order", "world_size", "accumulation"),
    [*((order, 2, 3) for order in ORDERS), ("packed", 1, 1), ("epoch", 2, 1), ("packed", 1, 4)],
)
def test_each_rank_has_the_rows_of_its_loader(data, order, world_size, accumulation, monkeypatch):
    config, folder = config_and_folder(order, data)
    config = {**config, "gradient_accumulation_steps": accumulation}
    of_all = list(islice(EpisodeLoader(folder, config, tensors=False, ahead=0), 6))
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    for rank in range(world_size):
        monkeypatch.setenv("RANK", str(rank))
        rows = TrainRows(folder, config, steps=6, weights_in_labels=True)
        count = 12 // world_size // accumulation
        assert rows.rows_per_batch == count
        loader = EpisodeLoader(folder, config, rank=rank, world_size=world_size, tensors=False, ahead=0)
        for step, batch in enumerate(islice(loader, 6)):
            # Batch b goes to rank b modulo the number of ranks.
            firsts = [12 * step + count * (micro * world_size + rank) for micro in range(accumulation)]
            given = [row for first in firsts for row in rows.__getitems__(range(first, first + count))]
            stacked = {name: torch.stack([row[name] for row in given]) for name in given[0]}
            labels, weights = split_labels(stacked.pop("labels"))
            expected = causal_lm_columns(batch, pad_token_id=rows.plan.pad_token_id)
            scaled = weights / expected.pop("weights").clamp(min=1e-9) * (labels >= 0)
            assert torch.equal(labels, expected.pop("labels"))
            assert stacked.keys() == expected.keys() == {"input_ids", "position_ids"}
            assert all(torch.equal(stacked[name], expected[name]) for name in expected)
            # Within a step, all ranks scale the weights by the same factor.
            [factor] = np.unique(scaled[labels >= 0].numpy().round(4))
            whole = of_all[step]
            assert factor == pytest.approx((whole.y >= 0).sum() / whole.weights.sum(), abs=1e-4)
            alone = rows[firsts[-1]]
            assert all(torch.equal(alone[name], given[-count][name]) for name in alone)


def test_trained_weights_are_those_of_the_arrays(data):
    config, folder = config_and_folder("packed and mixed", data)
    plan = EpisodeLoader(folder, {**config, "epoch_drop_last": False}).plan("train")
    for step, batch in zip(islice(plan.steps(Cursor()), 8), EpisodeLoader(folder, config, tensors=False), strict=False):
        counts, weights = trained_weights(plan, step, 3)
        by_three = (batch.y >= 0).reshape(4, -1).sum(axis=1), batch.weights.reshape(4, -1).sum(axis=1, dtype=float)
        np.testing.assert_array_equal(counts, by_three[0])
        np.testing.assert_allclose(weights, by_three[1], rtol=1e-12)


def test_the_rows_end_with_the_run(data):
    rows = TrainRows(data / "a", BASE, epochs=2)
    assert (len(rows), rows.steps) == (rows.steps * 12, len(EpisodeLoader(data / "a", BASE, epochs=2)))
    assert len(list(rows)) == len(rows)
    with pytest.raises(IndexError):
        rows[-1]


def test_an_incomplete_last_batch_is_filled_with_rows_without_a_label(data):
    rows = TrainRows(data / "a", {**BASE, "epoch_drop_last": False}, epochs=1)
    episodes = len(EpisodeLoader(data / "a", BASE).sources[0].episodes("train"))
    with_labels = [bool((row["labels"] >= 0).any()) for row in rows]
    assert with_labels == [True] * episodes + [False] * (len(rows) - episodes)
    assert len(rows) > episodes


def test_rows_are_read_by_forked_and_by_fresh_worker_processes(data, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    rows = TrainRows(data / "a", BASE, steps=6)
    expected = [rows[row]["input_ids"].tolist() for row in range(6, 12)]
    monkeypatch.setattr(os, "environ", {**os.environ})
    copied = pickle.loads(pickle.dumps(rows))  # noqa: S301
    monkeypatch.delenv("RANK")
    monkeypatch.delenv("WORLD_SIZE")
    assert rank_and_world_size() == (0, 1)
    assert copied.rank_and_world_size == (1, 2)
    assert [row["input_ids"].tolist() for row in copied.__getitems__(range(6, 12))] == expected


# Weights.


@given(
    labels=st.lists(st.one_of(st.just(-100), st.integers(0, 2**32 - 1)), min_size=1, max_size=20),
    weights=st.lists(st.floats(2**-60, 2**60, width=32), min_size=20, max_size=20),
)
def test_labels_carry_any_weight_and_any_id(labels, weights):
    ids = torch.tensor(labels)
    given = torch.tensor(weights[: len(labels)], dtype=torch.float32)
    carried = weighted_labels(ids, given)
    assert torch.equal(carried == -100, ids == -100)
    back, weight = split_labels(carried)
    assert torch.equal(back, ids)
    assert torch.equal(weight, torch.where(ids == -100, 0.0, given))
    assert torch.equal(weighted_labels(ids, torch.ones(len(ids))), ids)


def test_weights_are_refused_unless_labels_carry_them(data):
    rows = TrainRows(data / "b", BASE, steps=2)
    with pytest.raises(
        UsageError, match="train: trained tokens have different weights, which plain labels cannot express"
    ):
        rows.__getitems__(range(12))
    assert (TrainRows(data / "b", {**BASE, "use_loss_mask": False}, steps=2)[0]["labels"][1:] != -100).any()


def test_val_has_every_row_once_and_weights_that_make_the_mean_of_batches_the_loss(data, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = {**BASE, "batch_size": 4}
    rows = TrainRows(data / "b", config, steps=2, weights_in_labels=True)
    val = EvalRows(rows)
    batches = list(EpisodeLoader(data / "b", config, tensors=False).one_pass("val"))
    assert len(val) == 4 * len(batches)
    x, y, weights = (np.concatenate([getattr(batch, name) for batch in batches]) for name in ("x", "y", "weights"))
    np.testing.assert_array_equal(torch.stack([row["input_ids"] for row in val])[:, :-1], x)
    labels, scaled = split_labels(torch.stack([row["labels"] for row in val])[:, 1:])
    np.testing.assert_array_equal(labels, y)
    # A trainer divides the loss of each batch by the number of labels in the batch (over both ranks), and then takes
    # the mean over batches.
    losses = np.random.default_rng(0).random(y.shape)
    sums = (scaled.numpy() * losses).reshape(len(val) // 4, -1).sum(axis=1)
    of_trainer = np.mean(sums / np.maximum(1, (y >= 0).reshape(len(val) // 4, -1).sum(axis=1)))
    assert of_trainer == pytest.approx((weights * losses).sum() / weights.sum(), rel=1e-6)
    monkeypatch.setenv("RANK", "1")
    assert [row["labels"].tolist() for row in val.__getitems__([2, 3])] == [val[at]["labels"].tolist() for at in (2, 3)]
    with pytest.raises(
        UsageError, match="rank 1 of 2 evaluates 2 rows, starting at row 0; expected batches of 2 rows in order"
    ):
        val.__getitems__([0, 1])


def read(rows, batches):
    return [rows.__getitems__(batch) for batch in batches]


def test_a_run_starts_and_resumes_at_any_step_and_starts_again(data):
    rows = TrainRows(data / "a", {**BASE, "batch_size": 4}, steps=20)
    read(rows, [range(4)])  # the batch of this request is not used
    for start in (0, 28, 8, 8, 0):
        assert len(read(rows, [range(at, at + 4) for at in range(start, start + 12, 4)])) == 3


@pytest.mark.parametrize(
    ("batches", "line"),
    [
        ([[0, 2, 4, 6]], "rank 0 of 1 reads rows 0 to 6, which are not its next rows in the run"),
        ([[2, 3, 4, 5]], "rank 0 of 1 reads rows 2 to 5, which are not"),
        ([range(4), range(8, 12)], "rank 0 of 1 reads rows 8 to 11, which are not"),
        ([range(4), range(4, 8), range(12, 16), range(20, 24)], "rank 0 of 1 reads rows 20 to 23, which are not"),
        ([[0, 1]], "reads batches of 2 rows on 1 ranks; expected 4 for batch_size 4 and 1 accumulation steps"),
        ([range(8)], "reads batches of 8 rows on 1 ranks; expected 4 for batch_size 4 and 1 accumulation steps"),
    ],
)
def test_rows_out_of_order_are_refused(data, batches, line):
    rows = TrainRows(data / "a", {**BASE, "batch_size": 4}, steps=20)
    with pytest.raises(UsageError, match=line):
        read(rows, batches)


def test_a_run_does_not_start_between_the_batches_of_a_step(data):
    rows = TrainRows(data / "a", {**BASE, "batch_size": 4, "gradient_accumulation_steps": 2}, steps=20)
    read(rows, [[4, 5], [6, 7], [8, 9]])
    with pytest.raises(UsageError, match="reads rows 2 to 3, which are not"):
        read(rows, [[2, 3]])


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32))
def test_no_shuffled_order_is_read_to_its_third_batch(data, seed):
    rows = TrainRows(data / "a", {**BASE, "batch_size": 2}, steps=30)
    generator = torch.Generator().manual_seed(seed)
    loader = DataLoader(rows, 2, shuffle=True, generator=generator, collate_fn=list)
    batches = []
    with pytest.raises(UsageError, match="use a sampler that does not shuffle"):
        batches.extend(loader)
    assert len(batches) < 3


def test_a_second_epoch_is_refused(data):
    rows = TrainRows(data / "a", BASE, epochs=1)
    rows.set_epoch(0)
    with pytest.raises(UsageError, match="begins epoch 2, but the dataset contains the whole run of 8 steps"):
        rows.set_epoch(1)


def test_the_length_of_a_run_must_be_clear(data):
    for lengths in ({}, {"epochs": 1, "steps": 2}):
        with pytest.raises(UsageError, match="pass either epochs or steps"):
            TrainRows(data / "a", BASE, **lengths)


def test_a_batch_size_that_the_ranks_cannot_share_is_refused(data, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "5")
    rows = TrainRows(data / "a", BASE, steps=2)
    with pytest.raises(UsageError, match="batch_size 12 cannot be split across 5 ranks with 1 accumulation steps each"):
        rows.__getitems__([0, 1])


# Sequences.


def test_sequences_begin_wherever_a_position_is_0():
    edges, longest = sequence_lengths(torch.tensor([[0, 1, 2, 0], [0, 0, 1, 0]]))
    assert (edges.tolist(), edges.dtype, longest) == ([0, 3, 4, 5, 7, 8], torch.int32, 3)
