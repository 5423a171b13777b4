from __future__ import annotations

import numpy as np
import pytest
from hf_runs import make_trainer, train
from test_hf import assert_rows_of_the_loop, verified
from trainer_fixtures import PACKED, STEPS, own_run, ranks

from chatmill.integrations import hf

TWO_STEPS = {**PACKED, "gradient_accumulation_steps": 2}


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="session")
def results(weighted, plain, model_folder, folder):
    return ranks(2, "hf_runs:on_a_rank", weighted=weighted, plain=plain, model=model_folder, folder=folder)


@pytest.fixture(scope="session")
def own(weighted, model_folder):
    return own_run(weighted, model_folder, PACKED)


def test_each_rank_trains_the_rows_of_the_own_loop(results, weighted):
    for rank, result in enumerate(results):
        assert len(result["inputs"]) == 2 * 50
        assert_rows_of_the_loop(result["inputs"], weighted, TWO_STEPS, rank=rank, world_size=2)


def test_losses_are_those_of_the_own_loop(results, own):
    # Only the first rank logs.
    np.testing.assert_allclose(results[0]["losses"][:STEPS], own[0], rtol=0, atol=1e-5)
    np.testing.assert_allclose(results[0]["sft_losses"], own[0], rtol=0, atol=1e-5)


def test_the_loss_of_val_is_that_of_the_own_loop(results, own):
    for result in results:
        assert result["evaluations"] == [pytest.approx(own[1], abs=1e-5)]
        assert result["sft_evaluation"] == pytest.approx(own[1], abs=1e-5)


def test_resume_gives_each_rank_the_rows_that_would_have_come(results, weighted):
    for rank, result in enumerate(results):
        assert len(result["resumed_inputs"]) == 2 * 20
        assert_rows_of_the_loop(result["resumed_inputs"], weighted, TWO_STEPS, first=30, rank=rank, world_size=2)
    np.testing.assert_allclose(results[0]["resumed_losses"], results[0]["losses"], rtol=0, atol=1e-6)


def test_a_run_of_two_ranks_resumes_on_one(results, weighted, model_folder, folder):
    trainer = make_trainer(hf.TrainRows(weighted, TWO_STEPS, steps=50), model_folder, folder / "run")
    losses, inputs = train(trainer, resume=folder / "run" / "checkpoint-30")
    assert len(inputs) == 2 * 20
    assert_rows_of_the_loop(inputs, weighted, TWO_STEPS, first=30)
    np.testing.assert_allclose(losses, results[0]["losses"], rtol=0, atol=1e-5)


def test_the_audit_log_covers_the_rows_of_both_ranks(results, folder):
    result = verified(folder / "audit")
    assert (result.fault, result.steps) == (None, 50 + 20)
    [log] = (folder / "audit").glob("*.log")
    assert "world_size=2 | ranks=all" in log.read_text()


def test_wrong_ways_of_reading_are_refused_in_one_line_on_both_ranks(results):
    for rank, result in enumerate(results):
        order = (
            "which are not its next rows in the run; use a sampler that does not shuffle, and shard the data only once"
        )
        refusals = result["refusals"]
        first = {"sharded twice": rank * 8 + rank, "sharded twice, row by row": 4 + rank * 3}
        last = {"sharded twice": first["sharded twice"] + 6, "sharded twice, row by row": 4 + rank * 3}
        for way in first:
            assert refusals[way] == f"rank {rank} of 2 reads rows {first[way]} to {last[way]}, {order}"
        assert refusals["other batches"] == (
            "the trainer reads batches of 8 rows on 2 ranks; expected 4 for batch_size 8 and 1 accumulation steps"
        )
        assert refusals["uneven"] == (
            "batch_size 5 cannot be split across 2 ranks with 1 accumulation steps each; expected a multiple of 2"
        )
