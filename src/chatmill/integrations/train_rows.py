"""The rows of a run as a map-style dataset, for trainers that shard and batch by themselves.

    row number     0 1 2 3   4 5 6 7   8 9 …        batch_size 4
    step           0         1         2
    rank           0 0 1 1   0 0 1 1   …            2 ranks, 2 rows each, 1 accumulation step

A trainer that reads the numbers in order, a batch for each rank in turn, trains the rows of chatmill's own loop in each
step. Any other order is refused: a sampler that shuffles, or a second sharding, would train other rows.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from chatmill.errors import UsageError
from chatmill.integrations.columns import causal_lm_columns
from chatmill.load.batch_builder import BatchBuilder, ReadyBatch
from chatmill.load.config import LoadConfig
from chatmill.load.loader import EpisodeLoader
from chatmill.load.plan import LoadPlan, PlannedStep
from chatmill.remote.urls import Place


class TrainRows(Dataset[dict[str, Tensor]]):
    """All rows of `epochs` epochs, or of `steps` steps, in the order in which they are trained.

    Each row is a dict of the columns of `causal_lm_columns`. A `DataLoader` must read batches of equal size in order:
    no shuffling, and on several ranks batch b on rank b modulo their number, as Accelerate deals them.

    >>> job = chatmill.Job(sources=(chatmill.InputSource(("data/conversations.jsonl",)),))
    >>> _ = chatmill.prepare_dataset(job, Path("chat_sft"))
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
        split: str = "train",
    ) -> None:
        if (epochs is None) == (steps is None):
            raise UsageError("the length of the run is not clear; give either epochs or steps")
        self.loader = EpisodeLoader(dataset_dir, config, split=split, epochs=epochs, tensors=False)
        self.config = self.loader.config
        self.steps = len(self.loader) if steps is None else steps
        """Steps of the run."""
        self._next: int | None = None
        """The first row of the batch after the one that was read last."""
        self._in_order = True
        """Whether the last batch followed the one before it; else the next one must."""
        self._step: PlannedStep | None = None
        """The step that was read last."""

    def __len__(self) -> int:
        return self.steps * self.config.batch_size

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        """One row, in any order."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row}; the run has {len(self)} rows")
        return self._columns(row, 1)[0]

    def __getitems__(self, rows: Sequence[int]) -> list[dict[str, Tensor]]:
        """A batch of rows, as a `DataLoader` reads it; `UsageError` if it is not the next one of this rank."""
        first, count = int(rows[0]), len(rows)
        self._check(first, list(rows))
        return self._columns(first, count)

    def _columns(self, first: int, count: int) -> list[dict[str, Tensor]]:
        columns = causal_lm_columns(self.read(first, count).batch, pad_token_id=self._plan.pad_token_id)
        return [{name: column[row] for name, column in columns.items()} for row in range(count)]

    def read(self, first: int, count: int, *, digest: bool = False) -> ReadyBatch:
        """The batch of rows first to first + count, which are one of the equal parts of a step."""
        step, row = divmod(first, self.config.batch_size)
        builder = BatchBuilder(self._plan, row // count, count, digest)
        (batch,) = builder.batches(iter([self._planned(step)]))
        return batch

    @property
    def _plan(self) -> LoadPlan:
        return self.loader.plan(self.loader.split)

    def _planned(self, step: int) -> PlannedStep:
        last = self._step
        if last is not None and last.at.step == step:
            return last
        follows = last is not None and last.after.step == step
        self._step = self._plan.step(last.after if last is not None and follows else self._plan.cursor_at(step))
        return self._step

    def _check(self, first: int, rows: Sequence[int]) -> None:
        """Refuse a batch that is not the next of this rank."""
        count, (rank, world_size) = len(rows), rank_and_world_size()
        size, accumulation = self.config.batch_size, self.config.gradient_accumulation_steps
        if count * world_size * accumulation != size:
            per_rank, remainder = divmod(size, world_size * accumulation)
            right = (
                f"a multiple of {world_size * accumulation} as batch_size" if remainder else f"{per_rank} rows a batch"
            )
            raise UsageError(
                f"batch_size is {size}, and the trainer reads {count} rows on each of {world_size} ranks, "
                f"{accumulation} times a step; expected {right}"
            )
        is_of_rank = rows == list(range(first, first + count)) and first % (count * world_size) == rank * count
        # One jump is a run that starts or resumes; another one right after it is a second sharding.
        jumps = first != self._next
        if not is_of_rank or (jumps and not self._in_order):
            raise UsageError(
                f"rank {rank} of {world_size} reads rows {rows[0]} to {rows[-1]}, which are not its next rows of the "
                "run; the sampler must not shuffle, and nothing else may shard the data"
            )
        worker = get_worker_info()
        self._in_order = not jumps
        self._next = first + count * world_size * (1 if worker is None else worker.num_workers)


def rank_and_world_size() -> tuple[int, int]:
    """Of this process, as torch.distributed knows them, else as torchrun sets them."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
