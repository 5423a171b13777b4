from __future__ import annotations

import copy
from itertools import islice

import numpy as np
import pytest
import torchdata_runs as runs
from trainer_fixtures import PACKED, UNPACKED, own_batches, own_losses, ranks

from chatmill import EpisodeLoader
from chatmill.audit import Audit, verify_log
from chatmill.errors import UsageError
from chatmill.integrations.torchdata import stateful_loader

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:'set_vital':UserWarning"),
]
WORKERS = pytest.mark.parametrize("workers", [0, 2])


@pytest.fixture(scope="module")
def two_ranks(weighted, model_folder):
    return ranks(2, "torchdata_runs:on_two_ranks", dataset=weighted, model=model_folder)


def assert_same(batches, expected) -> None:
    assert len(batches) == len(expected)
    for batch, other in zip(batches, expected, strict=True):
        assert batch.keys() == other.keys()
        for name, column in batch.items():
            assert np.array_equal(column, other[name]), name


# Batches.


@WORKERS
def test_one_rank_reads_the_batches_of_the_loader_for_50_steps(weighted, workers):
    assert_same(runs.batches(weighted, steps=50, workers=workers), own_batches(weighted, PACKED, 50))


@WORKERS
def test_each_of_two_ranks_reads_its_rows_of_the_batches_for_50_steps(weighted, two_ranks, workers):
    for rank, result in enumerate(two_ranks):
        assert_same(result[workers], own_batches(weighted, PACKED, 50, rank=rank, world_size=2))


@WORKERS
def test_columns_hold_the_labels_at_their_tokens(weighted, workers):
    batches = islice(stateful_loader(weighted, PACKED, hf_columns=True, num_workers=workers), 5)
    for columns, batch in zip(batches, own_batches(weighted, PACKED, 5), strict=True):
        assert columns["input_ids"][:, :-1].tolist() == batch["x"].tolist()
        assert columns["labels"][:, 1:].tolist() == batch["y"].tolist()
        assert columns["weights"][:, 1:].tolist() == batch["weights"].tolist()
        assert columns["position_ids"][:, :-1].tolist() == batch["positions"].tolist()


def test_ranks_can_be_given_where_some_share_rows(weighted):
    loader = stateful_loader(weighted, PACKED, ranks=(1, 2))
    assert_same(
        [runs.arrays(batch) for batch in islice(loader, 3)], own_batches(weighted, PACKED, 3, rank=1, world_size=2)
    )


def test_the_losses_are_those_of_the_own_loop(weighted, model_folder, two_ranks):
    own = own_losses(weighted, model_folder, PACKED)
    for losses in (runs.losses(weighted, model_folder), *(result["losses"] for result in two_ranks)):
        assert losses == pytest.approx(own, abs=1e-5)


# States.


@WORKERS
def test_a_state_of_any_step_goes_on_with_the_rows_that_would_have_come(weighted, workers):
    def made():
        return stateful_loader(weighted, PACKED, epochs=1, num_workers=workers)

    undisturbed = [runs.arrays(batch) for batch in made()]
    assert len(undisturbed) == len(EpisodeLoader(weighted, PACKED, epochs=1))
    for step in (0, 1, 2, 7, len(undisturbed) - 1, len(undisturbed)):
        first = made()
        begun = [runs.arrays(batch) for batch in islice(first, step)]
        after = made()
        after.load_state_dict(copy.deepcopy(first.state_dict()))
        assert_same(begun + [runs.arrays(batch) for batch in after], undisturbed)


@WORKERS
def test_a_run_that_ended_has_nothing_left_after_a_resume(weighted, workers):
    first, after = (stateful_loader(weighted, PACKED, epochs=1, num_workers=workers) for _ in range(2))
    assert len(list(first)) > 0
    after.load_state_dict(first.state_dict())
    assert list(after) == []


@WORKERS
def test_a_second_loop_goes_on_where_the_first_one_was_left(weighted, workers):
    loader = stateful_loader(weighted, PACKED, num_workers=workers)
    batches = [runs.arrays(batch) for _ in range(3) for batch in islice(loader, 3)]
    assert_same(batches, own_batches(weighted, PACKED, 9))


@WORKERS
def test_a_second_loop_over_all_epochs_is_refused(weighted, workers):
    loader = stateful_loader(weighted, UNPACKED, epochs=1, num_workers=workers)
    assert len(list(loader)) > 0
    with pytest.raises(UsageError, match="all epochs have been read; loop only once"):
        list(loader)


@WORKERS
def test_a_state_goes_on_at_another_number_of_ranks(weighted, workers):
    loader = stateful_loader(weighted, PACKED, num_workers=workers, ranks=(1, 2))
    assert len(list(islice(loader, 5))) == 5
    other = stateful_loader(weighted, PACKED, num_workers=workers)
    other.load_state_dict(loader.state_dict())
    assert_same([runs.arrays(batch) for batch in islice(other, 3)], own_batches(weighted, PACKED, 8)[5:])


def test_a_state_of_other_workers_is_refused(weighted):
    state = stateful_loader(weighted, PACKED, num_workers=2).state_dict()
    with pytest.raises(UsageError, match="saved with num_workers 2, but this loader has 0"):
        stateful_loader(weighted, PACKED).load_state_dict(state)


@pytest.mark.parametrize("state", [{}, {"num_workers": 0}, {"num_workers": 0, "state": 3}])
def test_what_is_not_a_state_is_refused(weighted, state):
    with pytest.raises(UsageError, match="the state is not from a stateful_loader"):
        stateful_loader(weighted, PACKED).load_state_dict(state)


# Settings.


@pytest.mark.parametrize("option", ["batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "collate_fn"])
def test_an_option_that_batches_or_samples_is_refused(weighted, option):
    with pytest.raises(UsageError, match=f"{option}: not supported, because chatmill batches the rows"):
        stateful_loader(weighted, PACKED, **{option: None})


def test_an_audit_log_is_written_without_workers(weighted, tmp_path):
    audit = Audit(tmp_path, every=4)
    assert len(list(islice(stateful_loader(weighted, PACKED, listener=audit), 10))) == 10
    audit.close()
    result = verify_log(audit.path, weighted)
    assert (result.fault, result.steps) == (None, 10)
    with pytest.raises(UsageError, match="num_workers is 2; expected 0"):
        stateful_loader(weighted, PACKED, listener=Audit(tmp_path), num_workers=2)
