from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from titan_runs import EpisodeDataLoader, small_llama, train
from trainer_fixtures import PACKED, RATE, STEPS, UNPACKED, own_batches, ranks

from chatmill import EpisodeLoader
from chatmill.audit import verify_log
from chatmill.errors import DataError, UsageError
from chatmill.load import IGNORE_INDEX

pytestmark = [
    pytest.mark.filterwarnings("ignore:DTensor random operators may not have complete support on cpu"),
    pytest.mark.filterwarnings("ignore:To get the last learning rate computed by the scheduler"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint in"),
]
SHORT = {"dp_world_size": 1, "dp_rank": 0, "seq_len": 128, "local_batch_size": 4}
"""Arguments with which torchtitan's trainer builds a dataloader."""


def assert_own(batches: list[dict[str, np.ndarray]], own: list[dict[str, np.ndarray]], parts: int = 1) -> None:
    assert len(batches) == len(own) * parts
    for number, arrays in enumerate(own):
        of_step = batches[number * parts : (number + 1) * parts]
        columns = {name: np.concatenate([batch[name] for batch in of_step]) for name in of_step[0]}
        assert columns.keys() == {"input", "positions", "labels"}
        np.testing.assert_array_equal(columns["input"], arrays["x"])
        np.testing.assert_array_equal(columns["labels"], arrays["y"])
        np.testing.assert_array_equal(columns["positions"], arrays["positions"])


@pytest.fixture(scope="module")
def plain_loop(plain):
    results: list[tuple[dict[str, torch.Tensor], list[float]]] = []

    def compare(run: dict) -> None:
        losses = next((losses for weights, losses in results if equal(weights, run["weights"])), None)
        if losses is None:
            losses = plain_losses(plain, run["weights"])
            results.append((run["weights"], losses))
        np.testing.assert_allclose(run["losses"][:STEPS], losses, rtol=0, atol=1e-5)

    return compare


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def plain_losses(dataset, weights: dict[str, torch.Tensor]) -> list[float]:
    model = small_llama().build()
    model.init_weights(buffer_device=None)
    model.load_state_dict(weights)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    losses = []
    for batch in own_batches(dataset, PACKED, STEPS):
        total, count = torch.tensor(0.0), 0
        for row, segments in enumerate(batch["segments"]):
            for segment in range(segments.max() + 1):
                inside = segments == segment
                labels = torch.from_numpy(batch["y"][row][inside])
                if not (labels != IGNORE_INDEX).any():
                    continue
                ids = torch.from_numpy(batch["x"][row][inside])[None]
                positions = torch.arange(ids.shape[1])[None]
                masks = model.get_attention_masks(positions=positions)
                logits = model(ids, positions=positions, attention_masks=masks)[0]
                total = total + F.cross_entropy(logits, labels, reduction="sum")
                count += int((labels != IGNORE_INDEX).sum())
        loss = total / count
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("accumulation", [1, 2])
def test_fifty_steps_train_the_batches_of_the_own_loop_and_the_losses_of_a_plain_one(
    accumulation, plain, plain_loop, tmp_path
):
    training = {"local_batch_size": 4 // accumulation, "global_batch_size": 4}
    run = train(plain, PACKED, steps=50, folder=tmp_path, training=training)
    assert run["step"] == 50
    assert_own(run["batches"], own_batches(plain, PACKED, 50), accumulation)
    plain_loop(run)


def test_two_ranks_train_the_same_and_resume_on_one(plain, plain_loop, tmp_path):
    """All checks with two ranks are in one test, because starting the processes is slow."""
    runs = ranks(2, "titan_runs:two_rank_runs", dataset=plain, load=PACKED, folder=tmp_path)
    for rank, (whole, resumed) in enumerate(runs):
        own = own_batches(plain, PACKED, 50, rank=rank, world_size=2)
        assert_own(whole["batches"], own, 2)
        assert_own(resumed["batches"], own[STEPS + 1 : 45], 2)
        plain_loop(whole)
        np.testing.assert_allclose(resumed["losses"], whole["losses"][STEPS + 1 : 45], rtol=0, atol=1e-5)

    # The first run has 50 steps. The second run resumes at step 21 and ends at step 45.
    (log,) = (tmp_path / "audit").iterdir()
    result = verify_log(log, plain)
    assert (result.fault, result.steps) == (None, 50 + 45 - (STEPS + 1))
    assert "ranks=all" in log.read_text()

    one = train(plain, PACKED, steps=45, folder=tmp_path, interval=500, load_step=STEPS + 1)
    assert_own(one["batches"], own_batches(plain, PACKED, 45)[STEPS + 1 :])
    np.testing.assert_allclose(one["losses"], runs[0][0]["losses"][STEPS + 1 : 45], rtol=0, atol=1e-5)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_resume_from_a_checkpoint_of_any_step_gives_the_rows_that_would_have_come(accumulation, plain, tmp_path):
    training = {"local_batch_size": 32 // accumulation, "global_batch_size": 32}
    load = {**PACKED, "batch_size": 32}
    # An epoch has 4 steps, so 6 steps cross its end.
    assert EpisodeLoader(plain, load).plan("train").num_steps(0) == 4
    settings = {"folder": tmp_path, "training": training, "interval": 1}
    whole = train(plain, load, steps=6, **settings)
    own = own_batches(plain, load, 6)
    assert_own(whole["batches"], own, accumulation)
    for step in (1, 3, 4, 5):
        resumed = train(plain, load, steps=6, load_step=step, **settings)
        assert_own(resumed["batches"], own[step:], accumulation)
        np.testing.assert_allclose(resumed["losses"], whole["losses"][step:], rtol=0, atol=1e-6)


def test_the_run_ends_where_the_epochs_end(plain, tmp_path):
    load = {**PACKED, "batch_size": 32}
    run = train(plain, load, steps=50, folder=tmp_path, data={"epochs": 1})
    assert_own(run["batches"], own_batches(plain, load, 4))


def test_the_validator_reads_every_row_of_val_once(plain):
    loader = EpisodeDataLoader.Config(dataset_path=str(plain), load=PACKED, split="val", infinite=False).build(**SHORT)
    expected = [batch.x for batch in EpisodeLoader(plain, PACKED, tensors=False).one_pass("val")]
    for _ in range(2):
        inputs = [inputs["input"].numpy() for inputs, _ in loader]
        np.testing.assert_array_equal(np.concatenate(inputs), np.concatenate(expected))


@pytest.mark.parametrize(
    ("load", "given", "line"),
    [
        (UNPACKED, {"seq_len": 64}, "block_size is 128, but training.seq_len is 64; set training.seq_len to 128"),
        (UNPACKED, {"local_batch_size": 8}, "set training.local_batch_size to 4 or one of its divisors, and .* to 4"),
        (UNPACKED, {"local_batch_size": 3}, "set training.local_batch_size to 4 or one of its divisors"),
        (UNPACKED, {"dp_world_size": 3, "local_batch_size": 1}, "batch_size is 4 on 3 ranks; expected a multiple of 3"),
        ({**UNPACKED, "gradient_accumulation_steps": 2}, {}, "takes 1 batches of 4 rows on 1 ranks; remove the key"),
    ],
    ids=["seq_len", "too many rows", "no divisor", "ranks", "accumulation"],
)
def test_sizes_that_do_not_agree_are_refused(load, given, line, plain):
    with pytest.raises(UsageError, match=line):
        EpisodeDataLoader.Config(dataset_path=str(plain), load=load).build(**{**SHORT, **given})


@pytest.mark.parametrize(
    ("local", "whole", "line"),
    [
        (2, 2, "took a step after 1 batches on each rank, but a step of batch_size 4 has 2"),
        (4, 8, "took no step after 1 batches on each rank, but a step of batch_size 4 has 1"),
    ],
    ids=["too few", "too many"],
)
def test_another_global_batch_size_stops_the_run(local, whole, line, plain, tmp_path):
    training = {"local_batch_size": local, "global_batch_size": whole}
    with pytest.raises(UsageError, match=f"{line}; set training.global_batch_size to 4"):
        train(plain, PACKED, steps=5, folder=tmp_path, training=training)


def test_a_dataset_with_weights_is_refused(weighted):
    line = "weighted: a trained token has the weight 0.25, but torchtitan's loss does not support weights"
    with pytest.raises(DataError, match=line):
        EpisodeDataLoader.Config(dataset_path=str(weighted), load=PACKED).build(**SHORT)
    without_mask = {**PACKED, "use_loss_mask": False}
    EpisodeDataLoader.Config(dataset_path=str(weighted), load=without_mask).build(**SHORT)


def test_the_state_of_another_dataset_or_dataloader_is_refused(plain, weighted):
    load = {**PACKED, "use_loss_mask": False}
    loader = EpisodeDataLoader.Config(dataset_path=str(plain), load=load).build(**SHORT)
    other = EpisodeDataLoader.Config(dataset_path=str(weighted), load=load).build(**SHORT)
    with pytest.raises(UsageError, match="the loader state does not match this loader: the dataset hash was"):
        other.load_state_dict(loader.state_dict())
    with pytest.raises(UsageError, match="the checkpoint is from a run with another dataloader"):
        other.load_state_dict({"dp_rank_0": b"", "world_size": 1})
    other.load_state_dict({})


def test_a_dataset_must_be_named():
    with pytest.raises(UsageError, match=r"dataloader\.dataset_path is missing"):
        EpisodeDataLoader.Config().build(**SHORT)


def test_the_state_between_two_batches_of_a_step_is_that_before_the_step(plain):
    loader = EpisodeDataLoader.Config(dataset_path=str(plain), load=PACKED).build(**{**SHORT, "local_batch_size": 2})
    batches = iter(loader)
    first = next(batches)
    resumed = EpisodeDataLoader.Config(dataset_path=str(plain), load=PACKED).build(**{**SHORT, "local_batch_size": 2})
    resumed.load_state_dict(loader.state_dict())
    again = next(iter(resumed))
    torch.testing.assert_close(again[0]["input"], first[0]["input"], rtol=0, atol=0)
