"""The loader returns the batches of a dataset for one rank. The position of the loader can be saved and restored.

    loader = EpisodeLoader("data/v1", "config.json")
    for batch in loader: …

`LoadPlan` decides which episodes are in which batch, and `BatchBuilder` builds the arrays. The loader prefetches
batches and keeps a cursor for each split.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from chatmill.errors import UsageError, one_line
from chatmill.load.batch import Batch, BatchCounts
from chatmill.load.batch_builder import BatchBuilder, ReadyBatch
from chatmill.load.config import LoadConfig, order_sha256
from chatmill.load.digests import sha256_rows
from chatmill.load.plan import Cursor, LoadPlan, PlannedStep, datasets_hash
from chatmill.load.prefetch import BatchStream
from chatmill.load.reader_check import check_batch_reader, check_epoch_reader, check_length_reader
from chatmill.load.remote import start_prefetch
from chatmill.load.source import DataSource, open_sources, val_only_sources
from chatmill.remote.prefetch import Prefetch, Progress
from chatmill.remote.urls import Place, place
from chatmill.rows import Index
from chatmill.store.layout import SPLITS

try:
    from torch.utils.data import IterableDataset, get_worker_info

    from chatmill.load.tensors import Tensors

    HAS_TORCH = True
except ImportError:
    HAS_TORCH = False
    IterableDataset = object

    def get_worker_info() -> Any:
        return None


STATE_VERSION = 1


class Listener(Protocol):
    """Callbacks that a loader calls, for example to write an audit log."""

    def loaded(self, loader: EpisodeLoader) -> None:
        """Called after the datasets are opened and before the first batch."""

    def epoch_started(self, plan: LoadPlan, epoch: int) -> None:
        """Called before the first batch of an epoch is returned."""

    def delivered(
        self, plan: LoadPlan, step: PlannedStep, digest: NDArray[np.uint64], source_counts: Index | None
    ) -> None:
        """Called before a batch is returned; `digest` is the sum of the digests of this rank's rows.

        In a mix, `source_counts` has the number of rows, tokens or trained tokens of each source, depending on
        `mix_by`.
        """

    def epoch_completed(self, plan: LoadPlan, epoch: int, step: PlannedStep) -> None:
        """Called before the last batch of an epoch is returned; `step.dropped` contains the leftover episodes, which
        are too few to fill a batch.
        """


class EpisodeLoader(IterableDataset):
    """Loads batches from a dataset, a cache, or a mix of sources; iterates forever unless `epochs` is given.

    Each rank loads batch_size / world_size rows of every global batch. Batches contain torch tensors if torch is
    installed and `tensors` is true, and numpy arrays otherwise. If `device` is given, the tensors are on this device.
    If batches are built faster than they are consumed, a thread prefetches up to `ahead` chunks of batches; `ahead=0`
    disables prefetching.

    >>> from pathlib import Path
    >>> job = chatmill.Job(sources=(chatmill.InputSource(("data/conversations.jsonl",)),))
    >>> _ = chatmill.prepare_dataset(job, Path("chat_sft"))
    >>> loader = chatmill.EpisodeLoader("chat_sft", {"batch_size": 4, "block_size": 64, "use_loss_mask": True})
    >>> batch = loader.get_batch()
    >>> tuple(batch.x.shape), loader.state_dict()["cursors"]["train"]["step"]
    ((4, 64), 1)
    >>> loader.close()
    """

    def __init__(
        self,
        dataset_dir: str | Place,
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
        self.dataset_dir = place(dataset_dir)
        self.sources, self.config = open_sources(dataset_dir, _load_config(config))
        self._val_only = val_only_sources(self.sources)
        self.split, self.rank, self.world_size, self.epochs = split, rank, world_size, epochs
        self._check_world()
        self._options: dict[str, Any] = {}
        if tensors or pin_memory or device is not None:
            if not HAS_TORCH:
                raise UsageError("tensors require torch, which is not installed; pip install 'chatmill[train]'")
            self._options["output"] = Tensors(device, pin_memory=pin_memory)
        self._ahead = ahead
        self._listener: Listener | None = None
        self._plans: dict[str, LoadPlan] = {}
        self._cursors: dict[str, Cursor] = {}
        self._counts: dict[str, BatchCounts] = {}
        self._streams: dict[str, BatchStream] = {}
        self._prefetches: dict[str, Prefetch] = {}
        """The running downloads of datasets at URLs, by split."""
        self._skip: int | None = None
        """In a DataLoader worker, the number of batches to skip before the next batch, or None before the first batch.
        """
        # Check the settings now, so that errors are raised before the first batch.
        order = self._builder(self.plan(split)).plan.order
        if epochs is not None and order.length is None:
            raise UsageError(f"epochs is {epochs}, but the order {order.name} has no epochs; remove epochs")
        if listener is not None:
            self.listen(listener)

    def listen(self, listener: Listener) -> None:
        """Notify `listener` of every batch; call this method before loading the first batch."""
        self._listener = listener
        listener.loaded(self)

    def _check_world(self) -> None:
        size, steps = self.config.batch_size, self.config.gradient_accumulation_steps
        if not 0 <= self.rank < self.world_size:
            raise UsageError(f"rank is {self.rank}; expected 0 to {self.world_size - 1} (world_size - 1)")
        if size % (self.world_size * steps):
            raise UsageError(
                f"batch_size {size} cannot be split across {self.world_size} ranks with {steps} accumulation steps "
                f"each; expected a multiple of {self.world_size * steps}"
            )

    # The dataset.

    @property
    def num_rows(self) -> int:
        """Number of rows per batch on this rank."""
        return self.config.batch_size // self.world_size

    @property
    def splits(self) -> tuple[str, ...]:
        """Splits that have an episode of at least `episode_min_tokens` tokens."""
        return tuple(name for name in SPLITS if self.sources_of(name))

    def sources_of(self, split: str) -> tuple[DataSource, ...]:
        """Return the sources that have an episode of at least `episode_min_tokens` tokens in a split."""
        least = self.config.episode_min_tokens
        return tuple(
            source
            for source in (*self.sources, *self._val_only)
            if split in source and len(source.short(split, least)) < len(source.episodes(split))
        )

    @property
    def sha256(self) -> str:
        """The hash of all datasets that the loader reads."""
        return datasets_hash(self.sources)

    @property
    def vocab_size(self) -> int | None:
        """The vocabulary size, or None if the dataset does not record it."""
        return self.sources[0].vocab_size

    def plan(self, split: str) -> LoadPlan:
        """Return the load plan of a split; raise `DataError` if the dataset does not have the split."""
        if split not in self._plans:
            self._plans[split] = LoadPlan(self.sources, self.config, split)
        return self._plans[split]

    def cursor(self, split: str | None = None) -> Cursor:
        """Return the position of the next batch of a split."""
        return self._cursors.get(split or self.split, Cursor())

    def counts(self, split: str | None = None) -> BatchCounts:
        """Return the number of rows and tokens that this rank has loaded from a split so far."""
        return self._counts.get(split or self.split, BatchCounts())

    # Batches.

    def __iter__(self) -> Iterator[Batch]:
        check_batch_reader(self.rank, self.world_size)
        worker = get_worker_info()
        if worker is not None:
            yield from self._work(worker.id, worker.num_workers)
            return
        while self.epochs is None or self.cursor().epoch < self.epochs:
            yield self.get_batch()

    def __len__(self) -> int:
        """Return the total number of batches in `epochs` epochs, including batches that were already returned."""
        check_length_reader()
        if self.epochs is None:
            raise TypeError("an EpisodeLoader without epochs has no length; set epochs")
        return sum(map(self.plan(self.split).num_steps, range(self.epochs)))

    def __bool__(self) -> bool:
        return True

    def set_epoch(self, epoch: int) -> None:
        """Do nothing, because the loader tracks the epoch itself; raise `UsageError` if Accelerate would shard the
        batches.
        """
        check_epoch_reader(self.rank, self.world_size)

    def get_batch(self, split: str | None = None) -> Batch:
        """Return the next batch of a split; each split has its own cursor."""
        name = split or self.split
        stream = self._streams.get(name)
        if stream is None or stream.process != os.getpid():
            plan = self.plan(name)
            if (warning := self.prefetch(split=name)) is not None:
                warnings.warn(warning, stacklevel=2)
            stream = BatchStream(self._builder(plan), plan.steps(self.cursor(name)), self._ahead)
            self._streams[name] = stream
        try:
            item = next(stream.batches)
        except BaseException:
            # The next call retries the step that failed.
            self._streams.pop(name).close()
            raise
        return self._return(stream.plan, item)

    def prefetch(self, steps: int | None = None, *, split: str | None = None) -> str | None:
        """If the dataset is at a URL, start downloading the files for the next `steps` batches, by default for one
        epoch.

        `get_batch` calls this method if the caller has not. Return a warning message if the local cache is too small,
        otherwise None.
        """
        name = split or self.split
        return self._start_prefetch(name, self.plan(name), self.cursor(name), steps)

    def _start_prefetch(self, name: str, plan: LoadPlan, at: Cursor, steps: int | None) -> str | None:
        """Start the downloads of a split, unless this process has already started them."""
        # A forked process starts its own downloads, because threads do not survive a fork.
        if name in self._prefetches and self._prefetches[name].process == os.getpid():
            return None
        if (started := start_prefetch(plan, at, steps)) is None:
            return None
        self._prefetches[name], warning = started
        return warning

    @property
    def downloads(self) -> Progress | None:
        """The progress of all downloads, or None if nothing is downloaded."""
        parts = [each.progress for each in self._prefetches.values()]
        return Progress(*map(sum, zip(*parts, strict=True))) if parts else None

    def one_pass(self, split: str, *, source: DataSource | None = None) -> Iterator[Batch]:
        """Yield batches that contain each episode of at least `episode_min_tokens` tokens once, in stored order.

        The cursors of the loader do not change. With `source`, only the episodes of this source are read, and their
        indices start at 0. The last batch is padded with empty rows, so that all ranks get the same number of batches.
        """
        sources = (source,) if source is not None else self.sources_of(split) or self.sources
        plan = LoadPlan(sources, self.config, split, in_stored_order=True)
        builder = BatchBuilder(plan, self.rank, self.num_rows, **self._options)
        self._start_prefetch(f"{split} of {source.name if source else 'all'}", plan, Cursor(), None)
        with closing(BatchStream(builder, plan.one_epoch(), self._ahead)) as stream:
            for item in stream.batches:
                if item.on_return is not None:
                    item.on_return()
                yield item.batch

    def _builder(self, plan: LoadPlan) -> BatchBuilder:
        digests = None if self._listener is None else sha256_rows
        return BatchBuilder(plan, self.rank, self.num_rows, digests, **self._options)

    def _return(self, plan: LoadPlan, item: ReadyBatch) -> Batch:
        """Report a batch to the listener, advance the cursor, and return the batch."""
        split, step = plan.split, item.step
        if self._listener is not None:
            if step.begins_epoch:
                self._listener.epoch_started(plan, step.at.epoch)
            assert item.digest is not None
            self._listener.delivered(plan, step, item.digest, item.source_counts)
        if item.on_return is not None:
            item.on_return()
        self._cursors[split] = step.after
        self._counts[split] = self.counts(split).plus(item.counts)
        if self._listener is not None and step.ends_epoch:
            self._listener.epoch_completed(plan, step.at.epoch, step)
        return item.batch

    def _work(self, number: int, workers: int) -> Iterator[Batch]:
        """Yield every `workers`-th batch, because the DataLoader reads from its workers in turn."""
        if self._listener is not None:
            raise UsageError("a loader with a listener cannot run in DataLoader workers; set num_workers=0")
        plan = self.plan(self.split)
        self.prefetch()
        steps = islice(plan.steps(self.cursor()), self._skipped(number), None, workers)
        for item in self._builder(plan).batches(steps):
            if self.epochs is not None and item.step.at.epoch >= self.epochs:
                return
            self._skip = workers - 1
            yield self._return(plan, item)

    def _skipped(self, number: int) -> int:
        return number if self._skip is None else self._skip

    # State.

    def state_dict(self) -> dict[str, Any]:
        """Return the cursors of all splits in a form that can be saved as JSON. The state is the same on all ranks."""
        order, worker = self.config.order_part(), self._worker()
        state: dict[str, Any] = {
            "version": STATE_VERSION,
            "dataset_sha256": self.sha256,
            "config": order,
            "config_sha256": order_sha256(order),
            "cursors": {split: cursor._asdict() for split, cursor in sorted(self._cursors.items())},
        }
        return state if worker is None else {**state, "worker": worker}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state that `state_dict` returned; the number of ranks can be different. Raise `UsageError` if
        the state was saved with another dataset or another order of episodes.
        """
        version = state.get("version") if isinstance(state, Mapping) else None
        if version != STATE_VERSION:
            raise UsageError(f"the loader state has version {_shown(version)}; expected {STATE_VERSION}")
        if faults := _differences(state, self.sha256, self.config.order_part()):
            advice = "use the old values, or start a new run (with chatmill train, another --model_name)"
            raise UsageError(f"the loader state does not match this loader: {'; '.join(faults)}; {advice}")
        try:
            cursors = {
                split: Cursor(**{name: _whole(at[name]) for name in Cursor._fields})
                for split, at in state["cursors"].items()
            }
        except (AttributeError, KeyError, TypeError):
            raise UsageError("the loader state is damaged: cannot read its cursors") from None
        skip = _skip(state.get("worker"), self._worker())
        for split, cursor in cursors.items():
            self.plan(split).check(cursor)
        self.close()
        self._cursors, self._skip = cursors, skip

    def _worker(self) -> dict[str, int] | None:
        """Return this worker's index, and the number of batches to skip before its next batch."""
        worker = get_worker_info()
        if worker is None:
            return None
        return {"number": worker.id, "workers": worker.num_workers, "skip": self._skipped(worker.id)}

    def close(self) -> None:
        """Stop the prefetching threads; the loader can still be used."""
        # Stop downloads first, because a prefetching thread may be waiting for a download.
        for prefetch in self._prefetches.values():
            prefetch.stop()
        for stream in self._streams.values():
            stream.close()
        self._streams, self._prefetches = {}, {}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_streams": {}, "_prefetches": {}, "_plans": {}}


def _load_config(config: LoadConfig | Mapping[str, Any] | str | Path | None) -> LoadConfig:
    if isinstance(config, LoadConfig):
        return config
    if isinstance(config, str | Path):
        return LoadConfig.from_file(config)
    return LoadConfig.from_mapping(config or {})


# Reading a state.


def _differences(state: Mapping[str, Any], dataset_sha256: str, order: Mapping[str, Any]) -> list[str]:
    faults = []
    if state.get("dataset_sha256") != dataset_sha256:
        saved = one_line(str(state.get("dataset_sha256")), 12)
        faults.append(f"the dataset hash was {saved}, but is now {one_line(dataset_sha256, 12)}")
    theirs = state.get("config")
    if not isinstance(theirs, Mapping) or state.get("config_sha256") != order_sha256(theirs):
        return [*faults, "the config does not match its hash"]
    # Compare values as JSON, in which lists and tuples are equal.
    mine = json.loads(json.dumps(order))
    for name in sorted(mine.keys() | theirs.keys()):
        if mine.get(name) != theirs.get(name):
            faults.append(f"{one_line(name)} was {_shown(theirs.get(name))}, but is now {_shown(mine.get(name))}")
    return faults


def _skip(saved: Any, mine: Mapping[str, int] | None) -> int | None:
    """Return the number of batches to skip before this worker's first batch, or None if no DataLoader worker saved the
    state.
    """
    if saved is None:
        return None
    same = ("number", "workers")
    if not isinstance(saved, Mapping) or mine is None or any(saved.get(name) != mine[name] for name in same):
        here = "a loader without workers" if mine is None else f"worker {mine['number']} of {mine['workers']}"
        raise UsageError(
            f"the loader state was saved by worker {_shown(saved)}, but this is {here}; expected the same worker"
        )
    return _whole(saved.get("skip"))


def _whole(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise UsageError(f"the loader state is damaged: {_shown(value)} is not an integer of at least 0")
    return value


def _shown(value: Any) -> str:
    return one_line(json.dumps(value, default=str))
