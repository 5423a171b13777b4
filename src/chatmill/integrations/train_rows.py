"""The rows of a run as a map-style dataset, for trainers that shard and batch by themselves.

    row number     0 1 2 3 4 5 6 7   8 9 …        batch_size 8
    step           0                 1
    rank           0 0 1 1 0 0 1 1   0 0 …        2 ranks, 2 rows a batch, 2 accumulation steps
    row of step    0 1 4 5 2 3 6 7   0 1 …        each rank has the rows that an EpisodeLoader gives it

A trainer that reads the numbers in order, a batch for each rank in turn, trains the rows of chatmill's own loop in each
step. Any other order is refused: a sampler that shuffles, or a second sharding, would train other rows.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from chatmill.audit import Audit
from chatmill.errors import UsageError
from chatmill.integrations.columns import causal_lm_columns, weighted_labels
from chatmill.load.batch import Batch
from chatmill.load.batch_builder import BatchBuilder, ReadyBatch, trained_weights
from chatmill.load.config import LoadConfig
from chatmill.load.loader import EpisodeLoader
from chatmill.load.plan import LoadPlan, PlannedStep
from chatmill.remote.urls import Place
from chatmill.rows import Index

ModelInputs = dict[str, Tensor]
"""`input_ids`, `labels` and `position_ids` of a row."""


class TrainRows(Dataset[ModelInputs]):
    """All rows of `epochs` epochs, or of `steps` steps, in the order in which they are trained.

    Each row is a dict of `input_ids`, `labels` and `position_ids`, which begin at 0 in each conversation. A
    `DataLoader` must read batches of equal size in order: no shuffling, and on several ranks batch b on rank b modulo
    their number, as Accelerate deals them.

    Labels cannot say that answers have different weights. Such rows are refused unless `weights_in_labels` is true:
    then each label carries its weight, which `hf.weighted_loss` reads (see `columns.weighted_labels`). The sum of the
    weights of a step is scaled to the number of its labels, by which trainers divide.

    With an `audit_dir`, `hf.RunCallback` writes an audit log of the steps that were trained.

    >>> job = chatmill.Job(sources=(chatmill.InputSource(("data/conversations.jsonl",)),))
    >>> _ = chatmill.prepare_dataset(job, "chat_sft")
    >>> from chatmill.integrations.train_rows import TrainRows
    >>> rows = TrainRows("chat_sft", {"batch_size": 4, "block_size": 64, "use_loss_mask": True}, steps=10)
    >>> len(rows), tuple(rows[0]["input_ids"].shape)
    (40, (65,))
    """

    def __init__(
        self,
        dataset_dir: str | Place,
        config: LoadConfig | Mapping[str, Any] | str | Path | None = None,
        *,
        epochs: int | None = None,
        steps: int | None = None,
        weights_in_labels: bool = False,
        audit_dir: str | Path | None = None,
    ) -> None:
        if (epochs is None) == (steps is None):
            raise UsageError("the length of the run is not clear; give either epochs or steps")
        self.loader = EpisodeLoader(dataset_dir, config, epochs=epochs, tensors=False)
        self.config = self.loader.config
        self.steps = len(self.loader) if steps is None else steps
        """Steps of the run."""
        self.weights_in_labels = weights_in_labels
        self.audit_dir = audit_dir
        self.open_audit: Audit | None = None
        """The audit log of the run that trains these rows."""
        self._digests: Tensor | None = None
        if audit_dir is not None:
            batches = self.steps * self.config.gradient_accumulation_steps
            # Shared with the worker processes that read the rows.
            self._digests = torch.zeros((batches, 3 + len(self.loader.sources)), dtype=torch.int64).share_memory_()
        self._no_counts = np.zeros(len(self.loader.sources), dtype=np.int64)
        self._world: tuple[int, int] | None = None
        """In a worker process: the rank and the number of ranks of the process it works for."""
        self._next: int | None = None
        """The first row of the batch after the one that was read last."""
        self._start: int | None = None
        """The first row since the run started or resumed, until the second batch is read."""
        self._step: PlannedStep | None = None
        """The step that was read last."""
        self._scale = (-1, 1.0)
        """A step, and the factor of its weights."""

    def __len__(self) -> int:
        return self.steps * self.config.batch_size

    def __getitem__(self, row: int) -> ModelInputs:
        """One row, in any order."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row}; the run has {len(self)} rows")
        count = self.rows_per_batch
        return self._inputs(self.read(row - row % count))[row % count]

    def __getitems__(self, rows: Sequence[int]) -> list[ModelInputs]:
        """A batch of rows, as a `DataLoader` reads it; `UsageError` if it is not the next one of this rank."""
        self._check(list(rows))
        first = int(rows[0])
        batch = self.read(first, digest=self._digests is not None)
        if self._digests is not None:
            assert batch.digest is not None
            counts = self._no_counts if batch.source_counts is None else batch.source_counts
            values = np.concatenate([np.ones(1, dtype=np.int64), batch.digest.view(np.int64), counts])
            self._digests[first // (len(rows) * self.rank_and_world_size[1])] = torch.from_numpy(values)
        return self._inputs(batch)

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled for a worker process that is not forked."""
        return {**vars(self), "_world": self.rank_and_world_size, "_step": None, "open_audit": None}

    def set_epoch(self, epoch: int) -> None:
        """Refuse a second epoch, which Accelerate announces with this: the dataset is the whole run."""
        if epoch:
            raise UsageError(
                f"the trainer begins its epoch {epoch + 1}, and the dataset is the whole run of {self.steps} steps; "
                "train one epoch of it, and give the dataset more epochs or steps"
            )

    @property
    def rank_and_world_size(self) -> tuple[int, int]:
        return self._world or rank_and_world_size()

    @property
    def rows_per_batch(self) -> int:
        """Rows that each rank reads at a time; `UsageError` if batch_size cannot be shared by the ranks."""
        world_size, accumulation = self.rank_and_world_size[1], self.config.gradient_accumulation_steps
        rows, remainder = divmod(self.config.batch_size, world_size * accumulation)
        if remainder:
            raise UsageError(
                f"batch_size {self.config.batch_size} cannot be shared by {world_size} ranks in {accumulation} steps "
                f"each; expected a multiple of {world_size * accumulation}"
            )
        return rows

    @property
    def plan(self) -> LoadPlan:
        return self.loader.plan(self.loader.split)

    def read(self, first: int, *, digest: bool = False) -> ReadyBatch:
        """The batch that begins with a row, which must be the first of a batch."""
        count, accumulation = self.rows_per_batch, self.config.gradient_accumulation_steps
        step, row = divmod(first, self.config.batch_size)
        micro_batch, rank = divmod(row // count, self.rank_and_world_size[1])
        builder = BatchBuilder(self.plan, rank * accumulation + micro_batch, count, digest)
        (batch,) = builder.batches(iter([self._planned(step)]))
        return batch

    def digests(self, step: int) -> tuple[Index, Index]:
        """The sum of the digests of this rank's rows of a step as they were read, and what each source contributed."""
        assert self._digests is not None
        accumulation = self.config.gradient_accumulation_steps
        read = self._digests[step * accumulation : (step + 1) * accumulation].numpy()
        if not read[:, 0].all():
            raise UsageError(
                f"step {step} was trained, and its rows were not read from this dataset; audit another one"
            )
        total = read.sum(axis=0)
        return total[1:3], total[3:]

    def _planned(self, step: int) -> PlannedStep:
        last = self._step
        if last is not None and last.at.step == step:
            return last
        follows = last is not None and last.after.step == step
        self._step = self.plan.step(last.after if last is not None and follows else self.plan.cursor_at(step))
        return self._step

    def _inputs(self, batch: ReadyBatch) -> list[ModelInputs]:
        step = batch.step.at.step
        if self._scale[0] != step:
            trained, weight = trained_weights(self.plan, batch.step, self.config.batch_size)
            self._scale = step, float(trained[0] / weight[0]) if trained[0] else 1.0
        return model_inputs(batch.batch, self.plan, self._scale[1], weights_in_labels=self.weights_in_labels)

    def _check(self, rows: list[int]) -> None:
        """Refuse a batch that is not the next of this rank."""
        first, count, (rank, world_size) = int(rows[0]), len(rows), self.rank_and_world_size
        if count != self.rows_per_batch:
            raise UsageError(
                f"the trainer reads batches of {count} rows on {world_size} ranks; batch_size {self.config.batch_size} "
                f"in {self.config.gradient_accumulation_steps} accumulation steps is {self.rows_per_batch} rows a batch"
            )
        worker = get_worker_info()
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        stride = count * world_size
        is_of_rank = rows == list(range(first, first + count)) and first % stride == rank * count
        # A run starts or resumes at any step. Rows that jump again right after that are sharded a second time.
        follows = first == self._next
        starts = (first - number * stride) % self.config.batch_size == rank * count and self._start in (None, first)
        if not is_of_rank or not (follows or starts):
            raise UsageError(
                f"rank {rank} of {world_size} reads rows {rows[0]} to {rows[-1]}, which are not its next rows of the "
                "run; the sampler must not shuffle, and nothing else may shard the data"
            )
        self._start = None if follows else first
        self._next = first + stride * workers


class EvalRows(Dataset[ModelInputs]):
    """Every row of the val split once, padded with empty rows to whole batches.

    With `weights_in_labels`, weights are scaled such that the mean that a trainer takes over batches is the loss over
    all trained tokens, as chatmill computes it.
    """

    def __init__(self, rows: TrainRows) -> None:
        self.rows = rows
        self.steps = self.plan.num_steps(0)
        self._scales: tuple[int, list[float]] | None = None
        """Rows of a batch over all ranks, and the factor of the weights of each batch."""

    def __len__(self) -> int:
        return self.steps * self.rows.config.batch_size

    def __getitem__(self, row: int) -> ModelInputs:
        """One row, in any order."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row}; val has {len(self)} rows")
        count = self.rows.rows_per_batch
        return self._read(row - row % count)[row % count]

    def __getitems__(self, rows: Sequence[int]) -> list[ModelInputs]:
        """A batch of rows, as a `DataLoader` reads it; `UsageError` if it is not a batch of this rank."""
        first, count, (rank, world_size) = int(rows[0]), self.rows.rows_per_batch, self.rows.rank_and_world_size
        if list(rows) != list(range(first, first + count)) or first % (count * world_size) != rank * count:
            raise UsageError(
                f"rank {rank} of {world_size} evaluates {len(rows)} rows from {first} on; expected batches of {count} "
                "rows in order, on each rank in turn"
            )
        return self._read(first)

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled for a worker process that is not forked: all but the plan, which has caches."""
        return {name: value for name, value in vars(self).items() if name != "plan"}

    @cached_property
    def plan(self) -> LoadPlan:
        loader = self.rows.loader
        return LoadPlan(loader.sources_of("val") or loader.sources, loader.config, "val", in_stored_order=True)

    def _read(self, first: int) -> list[ModelInputs]:
        count, size = self.rows.rows_per_batch, self.rows.config.batch_size
        planned = self.plan.step(self.plan.cursor_at(first // size))
        (batch,) = BatchBuilder(self.plan, first % size // count, count).batches(iter([planned]))
        weights_in_labels = self.rows.weights_in_labels
        scale = self._scale(first, count * self.rows.rank_and_world_size[1]) if weights_in_labels else 1.0
        return model_inputs(batch.batch, self.plan, scale, weights_in_labels=weights_in_labels)

    def _scale(self, first: int, size: int) -> float:
        """The factor of the weights of the batch over all ranks, of `size` rows, that a row is in."""
        if self._scales is None or self._scales[0] != size:
            sums = [trained_weights(self.plan, step, size) for step in self.plan.one_epoch()]
            trained, weights = (np.concatenate(parts) for parts in zip(*sums, strict=True))
            if not weights.sum():
                raise UsageError(f"{self.rows.loader.dataset_dir}: val has no trained tokens; leave eval_dataset out")
            # A trainer divides by the labels of each batch, and takes the mean over all batches.
            self._scales = size, (trained * len(trained) / weights.sum()).tolist()
        return self._scales[1][first // size]


def model_inputs(batch: Batch, plan: LoadPlan, scale: float, *, weights_in_labels: bool) -> list[ModelInputs]:
    """The rows of a batch for a model, with weights multiplied by `scale`.

    Labels that carry a weight of 1 are plain labels; if others must not carry theirs, they are refused.
    """
    columns = causal_lm_columns(batch, pad_token_id=plan.pad_token_id)
    weights = (columns.pop("weights").double() * scale).float()
    if not weights_in_labels and ((weights != 1) & (columns["labels"] >= 0)).any():
        raise UsageError(
            f"{plan.split}: trained tokens have different weights, which plain labels cannot say; pass "
            "**hf.trainer_arguments(rows) to Trainer, or train with trl.WeightedSFTTrainer"
        )
    columns["labels"] = weighted_labels(columns["labels"], weights)
    return [{name: column[row] for name, column in columns.items()} for row in range(len(batch.x))]


def rank_and_world_size() -> tuple[int, int]:
    """Of this process, as torch.distributed knows them, else as torchrun sets them."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
