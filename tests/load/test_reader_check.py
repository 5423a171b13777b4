"""Test that a loader rejects libraries that would read its batches incorrectly. The libraries are replaced by stubs;
tests/trainers uses the real libraries.
"""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
from load_fixtures import talks, write_rows

from chatmill.errors import UsageError
from chatmill.load.loader import EpisodeLoader

SMALL = {"batch_size": 4, "block_size": 16, "use_loss_mask": True}
ACCELERATE = """
class IterableDatasetShard:
    def __init__(self, dataset):
        self.dataset = dataset
    def set_epoch(self, epoch):
        self.dataset.set_epoch(epoch)
    def __iter__(self):
        for element in self.dataset:
            yield element

class DataLoaderShard(IterableDatasetShard):
    pass
"""
TRANSFORMERS = """
def has_length(dataset):
    try:
        return len(dataset) is not None
    except TypeError:
        return False
"""


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("readers") / "d", {"train": talks(1, 30)})


@pytest.fixture
def library(monkeypatch):
    def made(name: str, source: str) -> ModuleType:
        module = ModuleType(name)
        exec(source, vars(module))  # noqa: S102
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return made


@pytest.fixture
def accelerate(library, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    return library("accelerate.data_loader", ACCELERATE)


@pytest.mark.parametrize(
    ("world_size", "line"),
    [
        (2, "accelerator.prepare shards this EpisodeLoader (rank 0 of 2) across 2 ranks again, so rows would be lost"),
        (1, "accelerator.prepare gives each of 2 ranks a full batch from this EpisodeLoader, so one step would"),
    ],
)
def test_sharding_a_second_time_is_refused_before_and_at_the_first_batch(dataset, accelerate, world_size, line):
    shard = accelerate.IterableDatasetShard(EpisodeLoader(dataset, SMALL, world_size=world_size))
    for read in (lambda: shard.set_epoch(0), lambda: next(iter(shard))):
        with pytest.raises(UsageError) as refused:
            read()
        assert str(refused.value).startswith(line)


def test_a_dataset_that_wraps_a_loader_is_refused_at_the_first_batch(dataset, accelerate):
    batches = (batch.x for batch in EpisodeLoader(dataset, SMALL, world_size=2))
    with pytest.raises(UsageError, match="rows would be lost"):
        next(iter(accelerate.IterableDatasetShard(batches)))


def test_readers_that_do_not_shard_get_batches(dataset, accelerate, monkeypatch):
    assert next(iter(accelerate.DataLoaderShard(EpisodeLoader(dataset, SMALL)))) is not None
    loader = EpisodeLoader(dataset, SMALL, world_size=2)
    loader.set_epoch(1)
    assert next(iter(loader)) is not None
    monkeypatch.setenv("WORLD_SIZE", "1")
    shard = accelerate.IterableDatasetShard(EpisodeLoader(dataset, SMALL))
    shard.set_epoch(0)
    assert next(iter(shard)) is not None


@pytest.mark.parametrize("epochs", [None, 1])
def test_trainer_is_refused_when_it_reads_the_length(dataset, library, epochs):
    trainer = library("transformers.trainer_utils", TRANSFORMERS)
    with pytest.raises(UsageError, match=r"use TrainRows from chatmill\.integrations\.hf"):
        trainer.has_length(EpisodeLoader(dataset, SMALL, epochs=epochs))


def test_the_length_of_a_data_loader_over_a_loader_is_read_by_trainer(dataset, library):
    from torch.utils.data import DataLoader

    trainer = library("transformers.trainer_utils", TRANSFORMERS)
    assert trainer.has_length(DataLoader(EpisodeLoader(dataset, SMALL, epochs=1), batch_size=None))
