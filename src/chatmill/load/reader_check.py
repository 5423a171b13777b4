"""Raise an error for libraries that would shard a loader's batches a second time, or that cannot read whole batches.

An `EpisodeLoader` returns its rank's part of each batch. `accelerator.prepare` would shard the batches again, with one
of two classes, and silently lose rows:

    IterableDatasetShard   every rank reads its own loader and keeps every n-th batch
    DataLoaderDispatcher   rank 0 reads its loader and sends every n-th batch to each rank

`IterableDatasetShard` and `DataLoaderDispatcher` call the dataset's `set_epoch` on every rank, in the training process,
before they read batches. If a wrapper hides `set_epoch`, the check searches the call stack for Accelerate when the
first batch is read. Searching the call stack does not detect a `DataLoaderDispatcher` that uses worker processes.

transformers' Trainer collates individual rows, and calls `len` on the dataset before it reads rows. Accelerate and
transformers are recognized by their module names and are never imported.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from types import FrameType

from chatmill.errors import UsageError

ACCELERATE = "accelerate.data_loader"
SHARDING = ("IterableDatasetShard", "DataLoaderDispatcher")
"""Accelerate's classes that shard an iterable dataset."""


def check_length_reader() -> None:
    """Raise `UsageError` if transformers calls a loader's `__len__`."""
    if _module(sys._getframe(2)).partition(".")[0] == "transformers":
        raise UsageError(
            "Trainer cannot read from an EpisodeLoader, which returns whole batches; "
            "use TrainRows from chatmill.integrations.hf"
        )


def check_epoch_reader(rank: int, world_size: int) -> None:
    """Raise `UsageError` if Accelerate calls a loader's `set_epoch` in a run with several ranks."""
    if _module(sys._getframe(2)) == ACCELERATE:
        _refuse_sharding(rank, world_size)


def check_batch_reader(rank: int, world_size: int) -> None:
    """Raise `UsageError` if Accelerate shards the batches across several ranks; call this before the first batch."""
    if ACCELERATE not in sys.modules:
        return
    frames = (frame for frame in _callers(sys._getframe(2)) if _module(frame) == ACCELERATE)
    if any(type(frame.f_locals.get("self")).__name__ in SHARDING for frame in frames):
        _refuse_sharding(rank, world_size)


def _refuse_sharding(rank: int, world_size: int) -> None:
    if (ranks := _ranks()) == 1:
        return
    what = (
        f"accelerator.prepare gives each of {ranks} ranks a full batch from this EpisodeLoader, "
        f"so one step would train on {ranks} batches"
        if world_size == 1
        else f"accelerator.prepare shards this EpisodeLoader (rank {rank} of {world_size}) across {ranks} ranks again, "
        "so rows would be lost"
    )
    raise UsageError(f"{what}; use chatmill.integrations.accelerate.train_loader")


def _ranks() -> int:
    """Return the world size from torch.distributed, if initialized, or from the environment variable WORLD_SIZE."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return int(dist.get_world_size())
    return int(os.environ.get("WORLD_SIZE", 1))


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
