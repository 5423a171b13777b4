"""A map-style dataset of all rows of a run, for trainers that shard and batch the rows themselves.

    row            0 1 2 3 4 5 6 7   8 9 …        batch_size 8
    step           0                 1
    rank           0 0 1 1 0 0 1 1   0 0 …        2 ranks, 2 rows per batch, 2 accumulation steps
    row of step    0 1 4 5 2 3 6 7   0 1 …        each rank has the same rows as with an EpisodeLoader

If a trainer reads the rows in order and assigns batches to ranks in turn, each step has the same rows as in
`chatmill train`. `TrainRows` raises an error if rows are read in any other order.
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
from chatmill.load.digests import sha256_rows
from chatmill.load.loader import EpisodeLoader
from chatmill.load.plan import LoadPlan, PlannedStep
from chatmill.remote.urls import Place
from chatmill.rows import Index

ModelInputs = dict[str, Tensor]
"""The `input_ids`, `labels` and `position_ids` of a row."""


class TrainRows(Dataset[ModelInputs]):
    """A map-style dataset of all rows of `epochs` epochs or `steps` steps, in training order.

    Each row is a dict of `input_ids`, `labels` and `position_ids`; positions restart at 0 in each conversation. A
    `DataLoader` must read batches of equal size in order, without shuffling. Rank b % world_size must read batch b, as
    with Accelerate.

    Rows with token weights other than 1 are rejected unless `weights_in_labels` is true. If `weights_in_labels` is
    true, `columns.weighted_labels` encodes the weights in the labels, and `hf.weighted_loss` decodes them. The weights
    of each step are scaled so that their sum equals the number of labels in the step, because trainers divide the loss
    by this number.

    With `audit_dir`, `hf.RunCallback` writes an audit log to this folder.

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
            raise UsageError("the length of the run is missing or ambiguous; pass either epochs or steps")
        self.loader = EpisodeLoader(dataset_dir, config, epochs=epochs, tensors=False)
        self.config = self.loader.config
        self.steps = len(self.loader) if steps is None else steps
        """Number of steps in the run."""
        self.weights_in_labels = weights_in_labels
        self.audit_dir = audit_dir
        self.open_audit: Audit | None = None
        """The audit log of the run that trains on these rows."""
        self._digests: Tensor | None = None
        if audit_dir is not None:
            batches = self.steps * self.config.gradient_accumulation_steps
            # Worker processes store the digests, so the memory is shared.
            self._digests = torch.zeros((batches, 3 + len(self.loader.sources)), dtype=torch.int64).share_memory_()
        self._no_counts = np.zeros(len(self.loader.sources), dtype=np.int64)
        self._world: tuple[int, int] | None = None
        """In a worker process, the rank and world size of the parent process."""
        self._next: int | None = None
        """First row of the batch that is expected next."""
        self._start: int | None = None
        """First row of the run's first batch; None once the second batch was read."""
        self._step: PlannedStep | None = None
        """The last step that was read."""
        self._scale = (-1, 1.0)
        """The last step, and the factor by which its loss weights are multiplied."""

    def __len__(self) -> int:
        return self.steps * self.config.batch_size

    def __getitem__(self, row: int) -> ModelInputs:
        """Return one row; single rows may be read in any order."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} does not exist; the run has {len(self)} rows")
        count = self.rows_per_batch
        return self._inputs(self.read(row - row % count))[row % count]

    def __getitems__(self, rows: Sequence[int]) -> list[ModelInputs]:
        """Return a batch of rows for a `DataLoader`; the rows must be the next batch of this rank."""
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
        return {**vars(self), "_world": self.rank_and_world_size, "_step": None, "open_audit": None}

    def set_epoch(self, epoch: int) -> None:
        """Raise `UsageError` for a second epoch, because the dataset contains the whole run; Accelerate calls this
        method.
        """
        if epoch:
            raise UsageError(
                f"the trainer begins epoch {epoch + 1}, but the dataset contains the whole run of {self.steps} steps; "
                "set num_train_epochs to 1, and pass TrainRows more epochs or steps"
            )

    @property
    def rank_and_world_size(self) -> tuple[int, int]:
        return self._world or rank_and_world_size()

    @property
    def rows_per_batch(self) -> int:
        """Number of rows per micro-batch on one rank."""
        world_size, accumulation = self.rank_and_world_size[1], self.config.gradient_accumulation_steps
        rows, remainder = divmod(self.config.batch_size, world_size * accumulation)
        if remainder:
            raise UsageError(
                f"batch_size {self.config.batch_size} cannot be split across {world_size} ranks with {accumulation} "
                f"accumulation steps each; expected a multiple of {world_size * accumulation}"
            )
        return rows

    @property
    def plan(self) -> LoadPlan:
        return self.loader.plan(self.loader.split)

    def read(self, first: int, *, digest: bool = False) -> ReadyBatch:
        """Return the batch whose first row is `first`."""
        count, accumulation = self.rows_per_batch, self.config.gradient_accumulation_steps
        step, row = divmod(first, self.config.batch_size)
        micro_batch, rank = divmod(row // count, self.rank_and_world_size[1])
        digests = sha256_rows if digest else None
        builder = BatchBuilder(self.plan, rank * accumulation + micro_batch, count, digests)
        (batch,) = builder.batches(iter([self._planned(step)]))
        return batch

    def digests(self, step: int) -> tuple[Index, Index]:
        """Return the digest of a step's rows on this rank, and how much data each source contributed."""
        assert self._digests is not None
        accumulation = self.config.gradient_accumulation_steps
        read = self._digests[step * accumulation : (step + 1) * accumulation].numpy()
        if not read[:, 0].all():
            raise UsageError(
                f"step {step}: the trainer did not read the rows from this dataset; pass this dataset to the trainer"
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
        first, count, (rank, world_size) = int(rows[0]), len(rows), self.rank_and_world_size
        if count != self.rows_per_batch:
            raise UsageError(
                f"the trainer reads batches of {count} rows on {world_size} ranks; expected {self.rows_per_batch} for "
                f"batch_size {self.config.batch_size} and {self.config.gradient_accumulation_steps} accumulation steps"
            )
        worker = get_worker_info()
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        stride = count * world_size
        is_of_rank = rows == list(range(first, first + count)) and first % stride == rank * count
        # A resumed run may start at any step, so accept any first batch. If the second batch does not follow the first,
        # the rows are sharded twice.
        follows = first == self._next
        starts = (first - number * stride) % self.config.batch_size == rank * count and self._start in (None, first)
        if not is_of_rank or not (follows or starts):
            raise UsageError(
                f"rank {rank} of {world_size} reads rows {rows[0]} to {rows[-1]}, which are not its next rows in the "
                "run; use a sampler that does not shuffle, and shard the data only once"
            )
        self._start = None if follows else first
        self._next = first + stride * workers


class EvalRows(Dataset[ModelInputs]):
    """A map-style dataset of all rows of the `val` split, followed by empty rows that complete the last batch.

    With `weights_in_labels`, weights are scaled so that the trainer's mean over batches equals the val loss of
    `chatmill train`.
    """

    def __init__(self, rows: TrainRows) -> None:
        self.rows = rows
        self.steps = self.plan.num_steps(0)
        self._scales: tuple[int, list[float]] | None = None
        """Number of rows per batch over all ranks, and the factor for the loss weights of each batch."""

    def __len__(self) -> int:
        return self.steps * self.rows.config.batch_size

    def __getitem__(self, row: int) -> ModelInputs:
        """Return one row; single rows may be read in any order."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} does not exist; val has {len(self)} rows")
        count = self.rows.rows_per_batch
        return self._read(row - row % count)[row % count]

    def __getitems__(self, rows: Sequence[int]) -> list[ModelInputs]:
        """Return a batch of rows for a `DataLoader`; the rows must be a batch of this rank."""
        first, count, (rank, world_size) = int(rows[0]), self.rows.rows_per_batch, self.rows.rank_and_world_size
        if list(rows) != list(range(first, first + count)) or first % (count * world_size) != rank * count:
            raise UsageError(
                f"rank {rank} of {world_size} evaluates {len(rows)} rows, starting at row {first}; expected batches of "
                f"{count} rows in order, on each rank in turn"
            )
        return self._read(first)

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes to pickle, without the cached `plan`."""
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
        """Return the factor for the loss weights of the batch that starts at row `first`; `size` is its size over all
        ranks.
        """
        if self._scales is None or self._scales[0] != size:
            sums = [trained_weights(self.plan, step, size) for step in self.plan.one_epoch()]
            trained, weights = (np.concatenate(parts) for parts in zip(*sums, strict=True))
            if not weights.sum():
                raise UsageError(f"{self.rows.loader.dataset_dir}: val has no trained tokens; remove eval_dataset")
            # The trainer divides each batch's loss by its number of labels, and averages over batches.
            self._scales = size, (trained * len(trained) / weights.sum()).tolist()
        return self._scales[1][first // size]


def model_inputs(batch: Batch, plan: LoadPlan, scale: float, *, weights_in_labels: bool) -> list[ModelInputs]:
    """Return a dict of model inputs for each row of a batch, with the loss weights multiplied by `scale`."""
    columns = causal_lm_columns(batch, pad_token_id=plan.pad_token_id)
    weights = (columns.pop("weights").double() * scale).float()
    if not weights_in_labels and ((weights != 1) & (columns["labels"] >= 0)).any():
        raise UsageError(
            f"{plan.split}: trained tokens have different weights, which plain labels cannot express; pass "
            "**hf.trainer_arguments(rows) to Trainer, or train with trl.WeightedSFTTrainer"
        )
    columns["labels"] = weighted_labels(columns["labels"], weights)
    return [{name: column[row] for name, column in columns.items()} for row in range(len(batch.x))]


def rank_and_world_size() -> tuple[int, int]:
    """Return the rank and world size of this process, from torch.distributed or torchrun's environment variables."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
