"""The loader: batches of a dataset in their order, for one rank, from a position that can be saved and restored.

    loader = EpisodeLoader("data/v1", "config.json")
    for batch in loader: …

What comes when is the plan's; the loader reads it ahead, hands it out, and remembers how far that went.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from chatmill.errors import UsageError, one_line
from chatmill.load.batch import Batch, Counts, lay_out, row_digests
from chatmill.load.config import LoadConfig
from chatmill.load.plan import Cursor, Plan, Step, datasets_hash, fill, join
from chatmill.load.prefetch import Ahead
from chatmill.load.source import open_sources
from chatmill.load.tally import tally
from chatmill.rows import Index

try:
    import torch
    from torch.utils.data import IterableDataset, get_worker_info
except ImportError:
    torch = None
    IterableDataset = object

    def get_worker_info() -> Any:
        return None


STATE_VERSION = 1
SLAB = 1 << 17
"""Positions of x that are made together: many small batches cost little more than one."""


class Listener(Protocol):
    """What wants to know of a loader's doings, such as an audit log. Called as things are handed out, never before."""

    def loaded(self, loader: EpisodeLoader) -> None:
        """The datasets are open; nothing was read yet."""

    def epoch_started(self, plan: Plan, epoch: int) -> None:
        """The first batch of an epoch is about to be handed out."""

    def delivered(self, plan: Plan, step: Step, digest: NDArray[np.uint64], given: Index | None) -> None:
        """A batch is handed out; `digest` is the sum of the digests of this rank's rows, as they really are.

        `given` is what each source has in them, where sources are mixed.
        """

    def epoch_completed(self, plan: Plan, epoch: int, step: Step) -> None:
        """The last batch of an epoch was handed out; `step.dropped` did not fill another."""


class Item(NamedTuple):
    """A batch that is ready, and what is to be told when it is handed out."""

    step: Step
    batch: Batch
    counts: Counts
    digest: NDArray[np.uint64] | None
    given: Index | None


class EpisodeLoader(IterableDataset):
    """Batches of a dataset, a cache, or a folder of caches that are mixed; never ends unless `epochs` says when.

    Each rank gets its rows of the global batch, in order: batch_size / world_size of them. Arrays are tensors if
    torch is installed, unless `tensors` says otherwise; with a `device` they are moved there ahead of time.
    `ahead` is how many slabs of batches a thread reads ahead; 0 reads when asked.
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
        tensors: bool | None = None,
        device: Any = None,
        ahead: int = 2,
    ) -> None:
        super().__init__()
        self.dataset_dir = Path(dataset_dir)
        self.sources, self.config = open_sources(dataset_dir, _config(config))
        self.split, self.rank, self.world_size, self.epochs = split, rank, world_size, epochs
        self._check_world()
        if tensors is None:
            tensors = torch is not None
        if (tensors or device is not None) and torch is None:
            raise UsageError("tensors are asked for, and torch is not installed; pip install 'chatmill[train]'")
        self._tensors, self._device, self._ahead = tensors or device is not None, device, ahead
        self._plans: dict[str, Plan] = {}
        self._cursors: dict[str, Cursor] = {}
        self._counts: dict[str, Counts] = {}
        self._reading: dict[str, Iterator[Item]] = {}
        self._process = os.getpid()
        self._skip: int | None = None
        self._listener = listener
        self.plan(split)
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

    def plan(self, split: str) -> Plan:
        """What comes when in a split; `DataError` if the dataset does not have it."""
        if split not in self._plans:
            self._plans[split] = Plan(self.sources, self.config, split)
        return self._plans[split]

    def cursor(self, split: str | None = None) -> Cursor:
        """Where the next batch of a split begins."""
        return self._cursors.get(split or self.split, Cursor())

    def counts(self, split: str | None = None) -> Counts:
        """What became of the tokens of the rows that were handed out on this rank since the loader was made."""
        return self._counts.get(split or self.split, Counts())

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
        plan = self.plan(name)
        return self._hand_out(plan, next(self._items(plan)))

    def one_pass(self, split: str) -> Iterator[Batch]:
        """Every eligible episode once, in the order of the files; moves no cursor, and leaves nothing out.

        The last batch is filled up with empty rows, so that all ranks get equally many.
        """
        plan = Plan(self.sources, self.config, split, in_stored_order=True)
        for step in plan.steps(Cursor()):
            yield self._made(plan, [step])[0].batch
            if step.ends_epoch:
                return

    def _items(self, plan: Plan) -> Iterator[Item]:
        if self._process != os.getpid():
            # Threads do not follow into a forked process.
            self._process, self._reading = os.getpid(), {}
        if plan.split not in self._reading:
            made = self._slabs(plan, plan.steps(self.cursor(plan.split)))
            self._reading[plan.split] = _flat(Ahead(made, self._ahead) if self._ahead else made)
        return self._reading[plan.split]

    def _slabs(self, plan: Plan, steps: Iterator[Step]) -> Iterator[list[Item]]:
        size = max(1, SLAB // (self.num_rows * self.config.block_size))
        # Not through self: the thread that runs this must not keep a forgotten loader alive.
        make = _maker(plan, self.rank, self.num_rows, self._listener is not None, self._output())
        return (make(chunk) for chunk in _chunks(steps, size))

    def _made(self, plan: Plan, steps: list[Step]) -> list[Item]:
        return _maker(plan, self.rank, self.num_rows, False, self._output())(steps)

    def _output(self) -> Callable[[Batch], Batch]:
        if not self._tensors:
            return lambda batch: batch
        return lambda batch: batch.each(torch.from_numpy)

    def _hand_out(self, plan: Plan, item: Item) -> Batch:
        split, step = plan.split, item.step
        if self._listener is not None:
            if step.begins_epoch:
                self._listener.epoch_started(plan, step.at.epoch)
            assert item.digest is not None
            self._listener.delivered(plan, step, item.digest, item.given)
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
        skip = number if self._skip is None else self._skip
        steps = islice(plan.steps(self.cursor()), skip, None, workers)
        for step in steps:
            if self.epochs is not None and step.at.epoch >= self.epochs:
                return
            item = self._made(plan, [step])[0]
            self._skip = workers - 1
            yield self._hand_out(plan, item)

    # State.

    def state_dict(self) -> dict[str, Any]:
        """Where every split stands, as JSON holds it; the same on all ranks."""
        order = self.config.order_part()
        state: dict[str, Any] = {
            "version": STATE_VERSION,
            "dataset_sha256": self.sha256,
            "config": order,
            "config_sha256": _sha256(order),
            "cursors": {split: cursor._asdict() for split, cursor in sorted(self._cursors.items())},
        }
        worker = get_worker_info()
        if worker is not None:
            skip = worker.id if self._skip is None else self._skip
            state["worker"] = {"number": worker.id, "workers": worker.num_workers, "skip": skip}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another loader stood, at any number of ranks; `UsageError` says what differs."""
        cursors, skip = self._checked(state)
        self.close()
        self._cursors, self._skip = cursors, skip

    def _checked(self, state: Mapping[str, Any]) -> tuple[dict[str, Cursor], int | None]:
        version = state.get("version") if isinstance(state, Mapping) else None
        if version != STATE_VERSION:
            raise UsageError(
                f"the state of a loader has version {one_line(str(version))}; this chatmill reads {STATE_VERSION}"
            )
        faults = []
        if state.get("dataset_sha256") != self.sha256:
            saved = one_line(str(state.get("dataset_sha256")), 12)
            faults.append(f"the dataset was {saved}, {self.dataset_dir} is {self.sha256[:12]}…")
        mine, theirs = self.config.order_part(), state.get("config")
        if not isinstance(theirs, Mapping) or state.get("config_sha256") != _sha256(dict(theirs)):
            faults.append("its config does not have the hash it names")
            theirs = mine
        for name in sorted(mine.keys() | theirs.keys()):
            if mine.get(name) != theirs.get(name):
                faults.append(f"{one_line(name)} was {_shown(theirs.get(name))}, is {_shown(mine.get(name))}")
        if faults:
            raise UsageError(f"the state of a loader does not fit: {'; '.join(faults)}")
        try:
            cursors = {
                split: Cursor(**{key: _whole(at[key]) for key in Cursor._fields})
                for split, at in state["cursors"].items()
            }
        except (AttributeError, KeyError, TypeError):
            raise UsageError("the state of a loader is damaged: its cursors cannot be read") from None
        for split, cursor in cursors.items():
            self.plan(split).check(cursor)
        return cursors, self._checked_worker(state.get("worker"))

    def _checked_worker(self, saved: Any) -> int | None:
        """Batches to skip before the first of this worker; None if the state is not that of a worker."""
        if saved is None:
            return None
        worker = get_worker_info()
        mine = (worker.id, worker.num_workers) if worker is not None else (0, 0)
        if not isinstance(saved, Mapping) or (saved.get("number"), saved.get("workers")) != mine:
            raise UsageError(
                f"the state is that of worker {_shown(saved)}; it fits the same worker of as many, "
                "and a loader without workers takes the state of one without"
            )
        return _whole(saved.get("skip"))

    def close(self) -> None:
        """End the threads that read ahead; the loader can go on after it."""
        for items in self._reading.values():
            items.close()  # type: ignore[attr-defined]
        self._reading = {}

    def __getstate__(self) -> dict[str, Any]:
        """What travels to another process: all but what is being read ahead, and the plans with their caches."""
        return {**vars(self), "_reading": {}, "_plans": {}}


def _maker(
    plan: Plan, rank: int, num_rows: int, with_digests: bool, output: Callable[[Batch], Batch]
) -> Callable[[list[Step]], list[Item]]:
    """What turns steps into batches of one rank, several at once."""
    layout = plan.layout

    def make(steps: list[Step]) -> list[Item]:
        parts = [step.rows(rank * num_rows, (rank + 1) * num_rows) for step in steps]
        together = join([fill(part, num_rows) for part in parts])
        made = lay_out(plan.reader, together.episodes, together.first, layout)
        items = []
        for step, rows, (batch, counts) in zip(steps, parts, made.split(num_rows), strict=True):
            digest = given = None
            if with_digests:
                given = tally(plan, rows, batch)
                digests = row_digests(batch, step=step.at.step, first_row=rank * num_rows)
                digest = digests.sum(axis=0, dtype=np.uint64)
            items.append(Item(step, output(batch), counts, digest, given))
        return items

    return make


def _chunks(steps: Iterator[Step], size: int) -> Iterator[list[Step]]:
    while chunk := list(islice(steps, size)):
        yield chunk


def _flat(slabs: Iterator[list[Item]]) -> Iterator[Item]:
    for slab in slabs:
        yield from slab


def _config(config: LoadConfig | Mapping[str, Any] | str | Path | None) -> LoadConfig:
    if isinstance(config, LoadConfig):
        return config
    if isinstance(config, str | Path):
        return LoadConfig.from_file(config)
    return LoadConfig.from_mapping(config or {})


def _sha256(value: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _shown(value: Any) -> str:
    return one_line(json.dumps(value, default=str))


def _whole(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise UsageError(f"the state of a loader is damaged: {_shown(value)} is no whole number from 0 on")
    return value
