"""Test the loader with a prefetch thread, in the data loaders of torch and torchdata, and with a listener."""

from __future__ import annotations

import copy
import gc
import threading
import time
from itertools import islice

import numpy as np
import pytest
import torch
from load_fixtures import SMALL, same
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from chatmill.errors import UsageError
from chatmill.load.digests import sha256_rows
from chatmill.load.loader import EpisodeLoader


def slowly(loader: EpisodeLoader) -> threading.Thread:
    """Take batches slowly until the loader starts a thread to prefetch them; return the thread."""
    known = set(threading.enumerate())
    while not (new := set(threading.enumerate()) - known):
        loader.get_batch()
        time.sleep(0.05)
    return new.pop()


def test_prefetched_batches_that_were_not_returned_do_not_count(dataset, monkeypatch):
    monkeypatch.setattr("chatmill.load.batch_builder.LOOKUP_BATCHES", 1)
    loader = EpisodeLoader(dataset, SMALL, tensors=False, ahead=3)
    slowly(loader)
    time.sleep(0.2)
    other = EpisodeLoader(dataset, SMALL, tensors=False, ahead=0)
    other.load_state_dict(loader.state_dict())
    for _ in range(9):
        assert same(loader.get_batch(), other.get_batch())
    assert loader.state_dict() == other.state_dict()


def test_the_thread_ends_when_the_loader_is_garbage_collected(dataset, monkeypatch):
    monkeypatch.setattr("chatmill.load.batch_builder.LOOKUP_BATCHES", 1)
    loader = EpisodeLoader(dataset, SMALL, ahead=1)
    thread = slowly(loader)
    del loader
    thread.join(60)
    assert not thread.is_alive()


def test_closing_a_loader_ends_its_thread_and_it_can_still_be_used(dataset, monkeypatch):
    monkeypatch.setattr("chatmill.load.batch_builder.LOOKUP_BATCHES", 1)
    loader = EpisodeLoader(dataset, SMALL, tensors=False, ahead=1)
    thread = slowly(loader)
    before = loader.cursor()
    loader.close()
    thread.join()
    loader.get_batch()
    assert loader.cursor().step == before.step + 1


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_a_torch_data_loader_returns_the_same_batches_with_any_number_of_workers(dataset, workers):
    plain = list(EpisodeLoader(dataset, {**SMALL, "packing": "bins"}, epochs=4))
    loader = EpisodeLoader(dataset, {**SMALL, "packing": "bins"}, epochs=4)
    found = list(DataLoader(loader, batch_size=None, num_workers=workers))
    assert len(found) == len(plain)
    for one, other in zip(found, plain, strict=True):
        assert all(map(torch.equal, one, other))


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning", "ignore:'set_vital':UserWarning")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_data_loader_resumes_from_any_step(dataset, workers):
    def made() -> StatefulDataLoader:
        loader = EpisodeLoader(dataset, SMALL, epochs=2)
        return StatefulDataLoader(loader, batch_size=None, num_workers=workers)

    undisturbed = [batch.episode_ids.tolist() for batch in EpisodeLoader(dataset, SMALL, epochs=2)]
    for step in (0, 3, 8, len(undisturbed)):
        first = made()
        begun = [batch.episode_ids.tolist() for batch in islice(iter(first), step)]
        state = copy.deepcopy(first.state_dict())
        after = made()
        after.load_state_dict(state)
        assert begun + [batch.episode_ids.tolist() for batch in after] == undisturbed, step


def test_a_loader_is_pickled_without_prefetched_batches(dataset):
    loader = EpisodeLoader(dataset, SMALL, tensors=False)
    list(islice(loader, 3))
    other = copy.deepcopy(loader)
    assert same(other.get_batch(), loader.get_batch())


class Heard:
    def __init__(self) -> None:
        self.told: list = []
        self.digests: list = []

    def loaded(self, loader) -> None:
        self.told.append("loaded")

    def epoch_started(self, plan, epoch) -> None:
        self.told.append(("start", plan.split, epoch))

    def delivered(self, plan, step, digest, given) -> None:
        self.told.append(step.at.step)
        self.digests.append(digest.tolist())

    def epoch_completed(self, plan, epoch, step) -> None:
        self.told.append(("complete", epoch, sorted(step.dropped.tolist())))


def test_a_listener_is_called_when_batches_are_returned(dataset):
    heard = Heard()
    loader = EpisodeLoader(dataset, {**SMALL, "batch_size": 8, "epoch_shuffle": False}, listener=heard, ahead=2)
    assert heard.told == ["loaded"]
    list(islice(loader, 4))
    rest = list(range(24, 30))
    assert heard.told == ["loaded", ("start", "train", 0), 0, 1, 2, ("complete", 0, rest), ("start", "train", 1), 3]


def test_digests_of_ranks_add_up_to_the_digest_of_the_global_batch(dataset):
    whole, parts = Heard(), [Heard(), Heard()]
    EpisodeLoader(dataset, SMALL, listener=whole).get_batch()
    for rank in range(2):
        EpisodeLoader(dataset, SMALL, rank=rank, world_size=2, listener=parts[rank]).get_batch()
    total = sum(np.array(part.digests[0], dtype=np.uint64) for part in parts)
    assert total.tolist() == whole.digests[0]
    batch = EpisodeLoader(dataset, SMALL, tensors=False).get_batch()
    assert sha256_rows(batch, [0], 0).sum(axis=0, dtype=np.uint64).tolist() == whole.digests[0]


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
def test_a_loader_with_a_listener_does_not_run_in_workers(dataset):
    loader = DataLoader(EpisodeLoader(dataset, SMALL, listener=Heard()), batch_size=None, num_workers=1)
    with pytest.raises(UsageError, match="set num_workers=0"):
        next(iter(loader))
    # The error and the iterator are in a reference cycle, and the worker exits only when the iterator is deleted.
    gc.collect()
