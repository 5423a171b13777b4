"""The loader: batches of a dataset in their order, for one rank, from a position that can be saved and restored.

    loader = EpisodeLoader("data/v1", "config.json")
    for batch in loader: …

What comes when is the plan's; the loader reads it ahead, hands it out, and remembers how far that went.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from chatmill.errors import UsageError
from chatmill.load import state as states
from chatmill.load.batch import Batch, BatchCounts
from chatmill.load.batch_builder import BatchBuilder, Output, ReadyBatch, as_arrays
from chatmill.load.config import LoadConfig
from chatmill.load.plan import Cursor, LoadPlan, PlannedStep, datasets_hash
from chatmill.load.prefetch import Prefetcher
from chatmill.load.source import open_sources
from chatmill.rows import Index

try:
    from torch.utils.data import IterableDataset, get_worker_info

    from chatmill.load.tensors import Tensors

    HAS_TORCH = True
except ImportError:
    HAS_TORCH = False
    IterableDataset = object

    def get_worker_info() -> Any:
        return None


class Listener(Protocol):
    """What wants to know of a loader's doings, such as an audit log. Called as things are handed out, never before."""

    def loaded(self, loader: EpisodeLoader) -> None:
        """The datasets are open; nothing was read yet."""

    def epoch_started(self, plan: LoadPlan, epoch: int) -> None:
        """The first batch of an epoch is about to be handed out."""

    def delivered(self, plan: LoadPlan, step: PlannedStep, digest: NDArray[np.uint64], given: Index | None) -> None:
        """A batch is handed out; `digest` is the sum of the digests of this rank's rows, as they really are.

        `given` is what each source has in them, where sources are mixed.
        """

    def epoch_completed(self, plan: LoadPlan, epoch: int, step: PlannedStep) -> None:
        """The last batch of an epoch was handed out; `step.dropped` did not fill another."""


class EpisodeLoader(IterableDataset):
    """Batches of a dataset, a cache, or a folder of caches that are mixed; without end unless `epochs` are given.

    Each rank gets its rows of the global batch, in order: batch_size / world_size of them. Arrays are tensors if
    torch is installed, unless `tensors` is false; with a `device` they are moved there ahead of time. A thread
    makes `ahead` slabs of batches ahead, as soon as they are taken more slowly than made; with 0 there is none.
    """

    def __init__(
        self,
        dataset_dir: str | Path,
        config: LoadConfig | Mapping[str, Any] | str | Path | None = None,
        *,
        split: str = "train",
        rank: int = 0,
        world_size: int = 1,
        epochs: int | None = None,
        listener: Listener | None = None,
        tensors: bool = HAS_TORCH,
        device: Any = None,
        pin_memory: bool = False,
        ahead: int = 2,
    ) -> None:
        super().__init__()
        self.dataset_dir = Path(dataset_dir)
        self.sources, self.config = open_sources(dataset_dir, _config(config))
        self.split, self.rank, self.world_size, self.epochs = split, rank, world_size, epochs
        self._check_world()
        self._output = _output(tensors, device, pin_memory)
        self._ahead, self._listener = ahead, listener
        self._plans: dict[str, LoadPlan] = {}
        self._cursors: dict[str, Cursor] = {}
        self._counts: dict[str, BatchCounts] = {}
        self._reading: dict[str, _Reading] = {}
        self._skip: int | None = None
        """In a worker: batches that others make before its next; None before the first."""
        # Batches that no memory holds are refused here, before a run writes anything.
        self._maker(self.plan(split))
        order = self.plan(split).order
        if epochs is not None and order.length is None:
            raise UsageError(f"epochs is {epochs}, and the order {order.name} has none; leave it out")
        if listener is not None:
            listener.loaded(self)

    def _check_world(self) -> None:
        size, steps = self.config.batch_size, self.config.gradient_accumulation_steps
        if not 0 <= self.rank < self.world_size:
            raise UsageError(f"rank {self.rank} of {self.world_size}; ranks are numbered from 0")
        if size % (self.world_size * steps):
            raise UsageError(
                f"batch_size {size} cannot be shared by {self.world_size} ranks in {steps} steps each; "
                f"expected a multiple of {self.world_size * steps}"
            )

    # What there is.

    @property
    def num_rows(self) -> int:
        """Rows of a batch on this rank."""
        return self.config.batch_size // self.world_size

    @property
    def splits(self) -> tuple[str, ...]:
        """Splits of which every source has an episode."""
        names = self.sources[0].dataset.splits
        return tuple(name for name in names if all(name in source for source in self.sources))

    @cached_property
    def sha256(self) -> str:
        """The hash that stands for all that is read."""
        return datasets_hash(self.sources)

    @property
    def vocab_size(self) -> int | None:
        """One more than the largest id there may be; None if the dataset does not say."""
        return self.sources[0].vocab_size

    def plan(self, split: str) -> LoadPlan:
        """What comes when in a split; `DataError` if the dataset does not have it."""
        if split not in self._plans:
            self._plans[split] = LoadPlan(self.sources, self.config, split)
        return self._plans[split]

    def cursor(self, split: str | None = None) -> Cursor:
        """Where the next batch of a split begins."""
        return self._cursors.get(split or self.split, Cursor())

    def counts(self, split: str | None = None) -> BatchCounts:
        """What became of the tokens of the rows that were handed out on this rank since the loader was made."""
        return self._counts.get(split or self.split, BatchCounts())

    # Batches.

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        if worker is not None:
            yield from self._work(worker.id, worker.num_workers)
            return
        while self.epochs is None or self.cursor().epoch < self.epochs:
            yield self.get_batch()

    def get_batch(self, split: str | None = None) -> Batch:
        """The next batch of a split, by its own cursor."""
        name = split or self.split
        reading = self._reading.get(name)
        if reading is None or reading.process != os.getpid():
            plan = self.plan(name)
            reading = self._reading[name] = _Reading(self._maker(plan), plan.steps(self.cursor(name)), self._ahead)
        try:
            item = next(reading.items)
        except BaseException:
            # What failed is tried again, not taken for the end.
            self._reading.pop(name).close()
            raise
        return self._hand_out(reading.plan, item)

    def one_pass(self, split: str) -> Iterator[Batch]:
        """Every eligible episode once, in the order of the files; moves no cursor, and leaves nothing out.

        The last batch is filled up with empty rows, so that all ranks get equally many.
        """
        plan = LoadPlan(self.sources, self.config, split, in_stored_order=True)
        reading = _Reading(self._maker(plan, listened=False), plan.one_epoch(), self._ahead)
        try:
            for item in reading.items:
                if item.ready is not None:
                    item.ready()
                yield item.batch
        finally:
            reading.close()

    def _maker(self, plan: LoadPlan, *, listened: bool = True) -> BatchBuilder:
        return BatchBuilder(plan, self.rank, self.num_rows, listened and self._listener is not None, self._output)

    def _hand_out(self, plan: LoadPlan, item: ReadyBatch) -> Batch:
        split, step = plan.split, item.step
        if self._listener is not None:
            if step.begins_epoch:
                self._listener.epoch_started(plan, step.at.epoch)
            assert item.digest is not None
            self._listener.delivered(plan, step, item.digest, item.given)
        if item.ready is not None:
            item.ready()
        self._cursors[split] = step.after
        self._counts[split] = self.counts(split).plus(item.counts)
        if self._listener is not None and step.ends_epoch:
            self._listener.epoch_completed(plan, step.at.epoch, step)
        return item.batch

    def _work(self, number: int, workers: int) -> Iterator[Batch]:
        """Every so-manieth batch, as one of several worker processes whose batches are taken in turn."""
        if self._listener is not None:
            raise UsageError("a loader with a listener runs in the process that trains; give DataLoader no workers")
        plan = self.plan(self.split)
        steps = islice(plan.steps(self.cursor()), self._skipped(number), None, workers)
        for item in chain.from_iterable(self._maker(plan).slabs(steps)):
            if self.epochs is not None and item.step.at.epoch >= self.epochs:
                return
            self._skip = workers - 1
            yield self._hand_out(plan, item)

    def _skipped(self, number: int) -> int:
        return number if self._skip is None else self._skip

    # State.

    def state_dict(self) -> dict[str, Any]:
        """Where every split stands, as JSON holds it; the same on all ranks."""
        return states.save(self._cursors, **self._identity())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another loader stood, at any number of ranks; `UsageError` says what differs."""
        cursors, skip = states.restore(state, **self._identity())
        for split, cursor in cursors.items():
            self.plan(split).check(cursor)
        self.close()
        self._cursors, self._skip = cursors, skip

    def _identity(self) -> dict[str, Any]:
        worker = get_worker_info()
        return {
            "dataset_sha256": self.sha256,
            "order": self.config.order_part(),
            "worker": worker and states.WorkerInfo(worker.id, worker.num_workers, self._skipped(worker.id)),
        }

    def close(self) -> None:
        """End the threads that read ahead; the loader can go on after it."""
        for reading in self._reading.values():
            reading.close()
        self._reading = {}

    def __getstate__(self) -> dict[str, Any]:
        """What travels to another process: all but what is being read ahead, and the plans with what they remember."""
        return {**vars(self), "_reading": {}, "_plans": {}}


class _Reading:
    """Batches of a split as they are made; by a thread, from when on the caller leaves time for it."""

    def __init__(self, maker: BatchBuilder, steps: Iterator[PlannedStep], ahead: int) -> None:
        self.plan = maker.plan
        # Threads do not follow into a forked process.
        self.process = os.getpid()
        self._threads: list[Prefetcher[list[ReadyBatch]]] = []
        self.items = _items(maker.slabs(steps), ahead, self._threads)

    def close(self) -> None:
        for thread in self._threads:
            thread.close()


def _items(
    slabs: Iterator[list[ReadyBatch]], ahead: int, threads: list[Prefetcher[list[ReadyBatch]]]
) -> Iterator[ReadyBatch]:
    """All that is in the slabs; a thread that makes them from some time on is put among the threads."""
    making = taking = 0.0
    # Where batches are taken as fast as they are made a thread would only be in the way.
    while not ahead or taking <= making:
        started = perf_counter()
        slab = next(slabs, None)
        if slab is None:
            return
        made = perf_counter()
        yield from slab
        making, taking = made - started, perf_counter() - made
    threads.append(Prefetcher(slabs, ahead))
    yield from chain.from_iterable(threads[-1])


def _output(tensors: bool, device: Any, pin_memory: bool) -> Output:
    if not (tensors or pin_memory or device is not None):
        return as_arrays
    if not HAS_TORCH:
        raise UsageError("tensors are asked for, and torch is not installed; pip install 'chatmill[train]'")
    return Tensors(device, pin_memory=pin_memory)


def _config(config: LoadConfig | Mapping[str, Any] | str | Path | None) -> LoadConfig:
    if isinstance(config, LoadConfig):
        return config
    if isinstance(config, str | Path):
        return LoadConfig.from_file(config)
    return LoadConfig.from_mapping(config or {})
