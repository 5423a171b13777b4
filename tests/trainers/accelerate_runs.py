"""Functions that the Accelerate tests run, either on several ranks with `trainer_fixtures.ranks` or in one process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.state import AcceleratorState, GradientState
from torch.utils.data import DataLoader, IterableDataset
from trainer_fixtures import PACKED, RATE, STEPS, open_model

from chatmill import EpisodeLoader
from chatmill.errors import ChatmillError
from chatmill.integrations.accelerate import AcceleratorBatches, causal_lm_loss, train_loader
from chatmill.integrations.torchdata import stateful_loader

Columns = dict[str, np.ndarray]
FEWER = 8
"""Number of steps of interrupted runs."""


def new_accelerator(accumulation: int = 1, **settings: Any) -> Accelerator:
    """Return an `Accelerator` with new state, which shares only the process group with earlier accelerators."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    return Accelerator(cpu=True, gradient_accumulation_steps=accumulation, **settings)


def arrays(batch: Mapping[str, torch.Tensor]) -> Columns:
    return {name: column.numpy() for name, column in batch.items()}


def batches(dataset: Path, config: Mapping[str, Any], *, steps: int, accumulation: int = 1) -> list[Columns]:
    return [arrays(batch) for batch in train_loader(new_accelerator(accumulation), dataset, config, steps=steps)]


class Run:
    def __init__(
        self, dataset: Path, model: Path, *, steps: int = STEPS, accumulation: int = 1, **options: Any
    ) -> None:
        self.accelerator = new_accelerator(accumulation)
        opened = open_model(model).train()
        optimizer = torch.optim.AdamW(opened.parameters(), lr=RATE, weight_decay=0.0)
        self.model, self.optimizer = self.accelerator.prepare(opened, optimizer)
        self.loader = train_loader(self.accelerator, dataset, PACKED, steps=steps, **options)

    def losses(self) -> Iterator[float]:
        parts = []
        for batch in self.loader:
            with self.accelerator.accumulate(self.model):
                loss = causal_lm_loss(self.model, batch)
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.optimizer.zero_grad()
            parts.append(float(self.accelerator.reduce(loss.detach(), "mean")))
            if self.accelerator.sync_gradients:
                yield float(np.mean(parts))
                parts = []


def losses(dataset: Path, model: Path, *, accumulation: int = 1) -> list[float]:
    return list(Run(dataset, model, accumulation=accumulation).losses())


def interrupted(dataset: Path, model: Path, folder: Path, *, at: int, accumulation: int = 1) -> list[float]:
    run = {"steps": FEWER, "accumulation": accumulation, "audit_dir": folder / "audit"}
    first = Run(dataset, model, **run)
    steps = first.losses()
    begun = list(islice(steps, at))
    first.accelerator.save_state(str(folder / "checkpoint"))
    list(islice(steps, 2))
    first.loader.close()
    again = Run(dataset, model, **run)
    again.accelerator.load_state(str(folder / "checkpoint"))
    return begun + list(again.losses())


def saved_at_each_step(dataset: Path, folder: Path, *, steps: int, accumulation: int = 1) -> None:
    accelerator = new_accelerator(accumulation)
    loader = train_loader(accelerator, dataset, PACKED, steps=steps)
    accelerator.save_state(str(folder / "0"))
    for number, _ in enumerate(loader, start=1):
        if number % accumulation == 0:
            accelerator.save_state(str(folder / str(number // accumulation)))


def resumed(dataset: Path, checkpoint: Path, *, steps: int, accumulation: int = 1) -> list[Columns]:
    accelerator = new_accelerator(accumulation)
    loader = train_loader(accelerator, dataset, PACKED, steps=steps)
    accelerator.load_state(str(checkpoint))
    return [arrays(batch) for batch in loader]


# Second shardings.


class Wrapped(IterableDataset):
    def __init__(self, loader: EpisodeLoader) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in self.loader:
            yield {"x": batch.x, "y": batch.y}


def only(items: list[Any]) -> Any:
    (item,) = items
    return item


def refusal(read: Any) -> str:
    try:
        next(iter(read))
    except ChatmillError as error:
        return str(error)
    return ""


def refusals(dataset: Path) -> dict[tuple[Any, ...], str]:
    lines = {}
    rank, world_size = (accelerator := new_accelerator()).process_index, accelerator.num_processes
    for dispatch in (None, False):
        for workers in (0, 2):
            for ranks in ((rank, world_size), (0, 1)):
                for wraps in (False, True):
                    if wraps and dispatch is None and (workers or rank):
                        continue  # only rank 0 would read, and the other ranks would wait for it forever
                    config = DataLoaderConfiguration(dispatch_batches=dispatch)
                    accelerator = new_accelerator(dataloader_config=config)
                    loader = EpisodeLoader(dataset, PACKED, rank=ranks[0], world_size=ranks[1])
                    # Accelerate shards a dataset only if it has a batch size.
                    size = {"batch_size": 1, "collate_fn": only} if wraps else {"batch_size": None}
                    data = DataLoader(Wrapped(loader) if wraps else loader, num_workers=workers, **size)
                    lines[ranks[1], dispatch, workers, wraps] = refusal(accelerator.prepare(data))
    return lines


def unprepared(dataset: Path) -> list[list[list[int]]]:
    accelerator = new_accelerator()
    rank, world_size = accelerator.process_index, accelerator.num_processes

    def loader() -> EpisodeLoader:
        return EpisodeLoader(dataset, PACKED, rank=rank, world_size=world_size)

    told = loader()
    told.set_epoch(3)
    ways = [
        loader(),
        told,
        DataLoader(loader(), batch_size=None),
        DataLoader(loader(), batch_size=None, num_workers=2),
        stateful_loader(dataset, PACKED),
        stateful_loader(dataset, PACKED, num_workers=2),
    ]
    return [next(iter(way)).x.tolist() for way in ways]


def on_two_ranks(dataset: Path, model: Path, folder: Path) -> dict[str, Any]:
    """Return all results that the tests need from two ranks. A single function computes them, so that the processes are
    started only once.
    """
    saved_at_each_step(dataset, folder / "steps", steps=5)
    return {
        "batches": batches(dataset, PACKED, steps=50),
        "losses": losses(dataset, model),
        "accumulated": losses(dataset, model, accumulation=2),
        "interrupted": interrupted(dataset, model, folder, at=3),
        "resumed": [resumed(dataset, folder / "steps" / str(step), steps=5) for step in range(6)],
        "unprepared": unprepared(dataset),
        "refusals": refusals(dataset),
    }


def is_untouched(loader: AcceleratorBatches) -> bool:
    return new_accelerator().prepare(loader) is loader
