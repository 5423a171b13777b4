"""Train on chatmill's batches with Lightning, through a `LightningDataModule`.

    data = EpisodeDataModule("chat_sft", {"batch_size": 8, "use_loss_mask": True})
    Trainer(max_epochs=3).fit(model, data)

Step n of the trainer has the same rows as step n of `chatmill train`, regardless of the trainer's epochs and limits.
Lightning's checkpoints store the position in the data.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch import LightningDataModule
from numpy.typing import NDArray
from torch import Tensor

from chatmill.audit import Audit
from chatmill.errors import UsageError, one_line
from chatmill.integrations.columns import causal_lm_columns, flattened
from chatmill.integrations.step_loss import causal_lm_loss as causal_lm_loss
from chatmill.integrations.step_loss import weighted_loss as weighted_loss
from chatmill.integrations.trained_steps import TrainedSteps
from chatmill.load.batch import Batch
from chatmill.load.config import LoadConfig
from chatmill.load.loader import EpisodeLoader
from chatmill.load.plan import LoadPlan
from chatmill.remote.urls import Place

AUDIT_STEPS = 100
"""Maximum number of steps per digest in the audit log."""


class WeightedBatch(NamedTuple):
    """A chatmill batch, and the weight by which to divide its loss."""

    batch: Batch
    step_weight: Tensor


class EpisodeDataModule(LightningDataModule):
    """A `LightningDataModule` that reads the batches of each rank from an `EpisodeLoader`.

    A batch is a dict of `step_weight` and the columns from `causal_lm_columns`, or a `WeightedBatch` if `columns` is
    false. `causal_lm_loss` divides the loss by `step_weight`. In training, `step_weight` is the sum of all loss weights
    in a step, divided by the number of micro-batches that all ranks process in the step. In validation, `step_weight`
    is the sum of the loss weights in the batch. `flatten` concatenates the rows of a batch into one row, as
    FlashAttention requires for packed rows.

    One trainer epoch is one epoch of the dataset. With `limit_train_batches`, each trainer epoch continues where the
    previous epoch stopped. With `audit_dir`, rank 0 writes an audit log to this folder.
    """

    def __init__(
        self,
        dataset_dir: str | Place,
        config: LoadConfig | Mapping[str, Any] | str | Path | None = None,
        *,
        columns: bool = True,
        flatten: bool = False,
        audit_dir: str | Path | None = None,
        audit_steps: int = AUDIT_STEPS,
    ) -> None:
        super().__init__()
        if flatten and not columns:
            raise UsageError("flatten requires columns; remove flatten or columns=False")
        self._dataset_dir, self._config, self._columns, self._flatten = dataset_dir, config, columns, flatten
        self._audit_dir, self._audit_steps = audit_dir, audit_steps
        self._loader: EpisodeLoader | None = None
        self._trained: TrainedSteps | None = None
        self._loaded: Mapping[str, Any] | None = None
        """State from the checkpoint to resume from."""
        self._audit_state: Mapping[str, Any] | None = None
        """State of the audit log at the end of the last `fit`."""

    @property
    def loader(self) -> EpisodeLoader:
        """The `EpisodeLoader` of this rank."""
        if self._loader is None:
            raise UsageError("an EpisodeDataModule has a loader only during Trainer.fit and Trainer.validate")
        return self._loader

    # Hooks that the trainer calls.

    def setup(self, stage: str) -> None:
        processes = dist.get_world_size() if dist.is_initialized() else 1
        if processes != self.trainer.world_size:
            raise UsageError(
                f"the trainer has {self.trainer.world_size} processes, but torch.distributed has {processes}; set "
                f"devices and num_nodes so that Trainer has {processes} processes"
            )
        # Only data parallel ranks read different rows; tensor parallel ranks read the same rows.
        ranks = self.trainer.distributed_sampler_kwargs or {"rank": 0, "num_replicas": 1}
        self._loader = EpisodeLoader(
            self._dataset_dir, self._config, rank=ranks["rank"], world_size=ranks["num_replicas"]
        )
        self._trained = self._loaded = None

    def train_dataloader(self) -> TrainBatches:
        self._check_trainer()
        order, trainer = self.plan.order, self.trainer
        has_end = trainer.max_steps != -1 or trainer.max_epochs == -1 or isinstance(trainer.limit_train_batches, int)
        if order.length is None and not has_end:
            raise UsageError(f"the order {order.name} has no epochs; pass max_steps to Trainer")
        if trainer.ckpt_path and self._loaded is None:
            raise UsageError(
                f"{trainer.ckpt_path}: does not contain the state of {type(self).__qualname__}; "
                "resume from another checkpoint"
            )
        if self._loaded is not None:
            self._check_loaded(self._loaded)
        if self._trained is None and self._audit_dir is not None:
            self._open_audit(self._audit_dir)
        self._check_epochs()
        return TrainBatches(self)

    def val_dataloader(self) -> ValBatches | list[Any]:
        return ValBatches(self) if "val" in self.loader.splits else []

    def state_dict(self) -> dict[str, Any]:
        """Return a state with the current position in the data; the state is the same on all ranks."""
        step, parts = divmod(self.trained_batches, self.accumulation)
        state = {**self._state_at(step), "gradient_accumulation_steps": self.accumulation, "batches": parts}
        if self._trained is not None:
            self._audit_state = self._audit_checkpoint(self._trained)
        if self._audit_dir is not None:
            state["audit"] = self._audit_state
        return json.loads(json.dumps(state))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._loaded = state_dict

    def teardown(self, stage: str) -> None:
        if self._trained is not None:
            self._audit_state = self._audit_checkpoint(self._trained)
            self._trained.audit.close()
            self._trained = None
        self.on_exception(None)

    def on_exception(self, exception: BaseException | None) -> None:
        if self._loader is not None:
            self._loader.close()

    # Position in the data.

    @property
    def plan(self) -> LoadPlan:
        return self.loader.plan("train")

    @property
    def accumulation(self) -> int:
        """Number of batches per optimizer step on this rank."""
        return self.loader.config.gradient_accumulation_steps

    @property
    def trained_batches(self) -> int:
        """Number of batches that the trainer has finished since the start of the run."""
        progress = self.trainer.fit_loop.epoch_loop.batch_progress.total
        # If a hook skips a batch, Lightning counts the batch as processed, but not as started.
        return min(progress.started, progress.processed)

    def num_batches(self) -> int | None:
        """Return the number of batches in the dataset's first epoch, or None if rows are sampled at random without
        epochs.
        """
        return None if self.plan.order.length is None else self.plan.num_steps(0) * self.accumulation

    def train_batches(self) -> Iterator[Any]:
        """Yield training batches indefinitely, starting at the trainer's current step."""
        loader, (step, parts) = self.loader, divmod(self.trained_batches, self.accumulation)
        if parts:
            raise UsageError(
                f"the checkpoint was saved after {parts} of {self.accumulation} batches of step {step}, and gradients "
                "were lost; resume from a checkpoint at the end of a step"
            )
        if self._trained is not None:
            self._trained.report(step)
        if loader.cursor().step != step:
            loader.load_state_dict(self._state_at(step))
            if self._trained is not None:
                self._trained.forget()
        while True:
            self._check_trainer()
            batch = loader.get_batch()
            weight = torch.tensor(float(batch.weights.sum()), device=self.trainer.strategy.root_device)
            weight = self.trainer.strategy.reduce(weight, reduce_op="mean") / self.accumulation
            for part in batch.split(self.accumulation):
                yield self.output(part, weight)
            if self._trained is not None:
                self._trained.report(self.trained_batches // self.accumulation)

    def output(self, batch: Batch, weight: Tensor) -> Any:
        """Return a batch in the form that `training_step` receives."""
        if not self._columns:
            return WeightedBatch(batch, weight)
        columns = causal_lm_columns(batch, pad_token_id=self.plan.pad_token_id)
        return {**(flattened(columns) if self._flatten else columns), "step_weight": weight}

    def _state_at(self, step: int) -> dict[str, Any]:
        return {**self.loader.state_dict(), "cursors": {"train": self.plan.cursor_at(step)._asdict()}}

    def _check_loaded(self, state: Mapping[str, Any]) -> None:
        """Load a saved state; raise `UsageError` if the state was saved with a different dataset or config."""
        self.loader.load_state_dict(state)
        if (saved := state.get("gradient_accumulation_steps")) != self.accumulation:
            raise UsageError(
                f"the checkpoint was saved with gradient_accumulation_steps {one_line(str(saved))}, but it is now "
                f"{self.accumulation}; use the saved value, because Lightning counts micro-batches"
            )

    def _check_trainer(self) -> None:
        """Raise `UsageError` for trainer settings that would change the batches of a step."""
        trainer, batches = self.trainer, self.trainer.num_training_batches
        if trainer.accumulate_grad_batches != self.accumulation:
            raise UsageError(
                f"accumulate_grad_batches is {trainer.accumulate_grad_batches}, but gradient_accumulation_steps is "
                f"{self.accumulation} in the config; set both to the same value"
            )
        if trainer.overfit_batches:
            raise UsageError("overfit_batches is set, but the data module cannot repeat batches; use a smaller dataset")
        if isinstance(batches, int) and batches % self.accumulation:
            raise UsageError(
                f"the trainer reads {batches} batches per epoch, not a multiple of {self.accumulation}; set "
                f"limit_train_batches to a multiple of {self.accumulation}"
            )

    def _check_epochs(self) -> None:
        """Raise `UsageError` if epochs have different numbers of steps, because Lightning assumes that all epochs are
        equally long.
        """
        trainer, windows = self.trainer, self.plan.num_windows()
        by_epochs = trainer.max_steps == -1 and not isinstance(trainer.limit_train_batches, int)
        # If the dataset fits in one packing window, all epochs have the same number of rows.
        if not by_epochs or self.loader.config.packing == "none" or windows is None or windows == 1:
            return
        first, epochs = self.plan.num_steps(0), range(1, trainer.max_epochs)
        if any(self.plan.num_steps(epoch) != first for epoch in epochs):
            total = first + sum(map(self.plan.num_steps, epochs))
            raise UsageError(
                f"the {trainer.max_epochs} epochs have {total} steps in total, but Lightning assumes {first} steps per "
                f"epoch; pass max_epochs=-1 and max_steps={total} to Trainer"
            )

    # Audit log.

    def _open_audit(self, folder: str | Path) -> None:
        """Start an audit log, or continue the audit log of the checkpoint or of the last `fit`."""
        step = self.trained_batches // self.accumulation
        state = None if self._loaded is None else self._loaded.get("audit")
        if self._loaded is None and step:
            state = self._audit_state
        if step and state is None:
            raise UsageError(f"audit_dir is {folder}, but the run began without an audit log; remove audit_dir")
        audit = Audit(folder, every=self._audit_steps, state=state, reduce=self._sum_over_ranks)
        self._trained = TrainedSteps(audit)
        self.loader.listen(self._trained)

    def _audit_checkpoint(self, trained: TrainedSteps) -> Mapping[str, Any]:
        trained.report(self.trained_batches // self.accumulation)
        return self.trainer.strategy.broadcast(trained.audit.checkpoint())

    def _sum_over_ranks(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        strategy = self.trainer.strategy
        return strategy.reduce(torch.from_numpy(values).to(strategy.root_device), reduce_op="sum").cpu().numpy()


class TrainBatches:
    """Yields training batches, starting at the trainer's current step; Lightning ends an epoch after `len(self)`
    batches.
    """

    def __init__(self, data: EpisodeDataModule) -> None:
        self._data = data
        self._num_batches = data.num_batches()

    def __iter__(self) -> Iterator[Any]:
        return self._data.train_batches()

    def __len__(self) -> int:
        if self._num_batches is None:
            raise TypeError("the length is unknown, because this order has no epochs")
        return self._num_batches

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state; Lightning treats a loader with this method as resumable."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Do nothing, because `EpisodeDataModule` restores the position in the data."""


class ValBatches:
    """Yields validation batches that together contain every row of the `val` split once."""

    def __init__(self, data: EpisodeDataModule) -> None:
        self._data = data

    def __iter__(self) -> Iterator[Any]:
        for batch in self._data.loader.one_pass("val"):
            yield self._data.output(batch, batch.weights.sum())

    @cached_property
    def _num_batches(self) -> int:
        loader = self._data.loader
        return LoadPlan(loader.sources_of("val"), loader.config, "val", in_stored_order=True).num_steps(0)

    def __len__(self) -> int:
        return self._num_batches
