"""Load batches of a dataset in an Accelerate training loop.

    loader = train_loader(accelerator, "chat_sft", config, steps=1000)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(causal_lm_loss(model, batch))
            optimizer.step()
            optimizer.zero_grad()

Each rank reads its own rows, so do not pass the loader to `accelerator.prepare`. `accelerator.save_state()` saves the
position in the data. `accelerator.load_state()` restores the position, even with a different number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator
from numpy.typing import NDArray

from chatmill.audit import Audit
from chatmill.errors import UsageError
from chatmill.integrations.columns import causal_lm_columns, flattened
from chatmill.integrations.step_loss import causal_lm_loss as causal_lm_loss
from chatmill.integrations.step_loss import weighted_loss as weighted_loss
from chatmill.load.config import LoadConfig
from chatmill.load.loader import EpisodeLoader
from chatmill.remote.urls import Place


def train_loader(
    accelerator: Accelerator,
    dataset_dir: str | Place,
    config: LoadConfig | Mapping[str, Any] | str | Path | None = None,
    *,
    epochs: int | None = None,
    steps: int | None = None,
    flatten: bool = False,
    audit_dir: str | Path | None = None,
) -> AcceleratorBatches:
    """Return the micro-batches of a run, on the accelerator's device.

    Pass either `epochs` or `steps`, the number of optimizer steps. `batch_size` in the config is the number of rows per
    optimizer step, over all ranks and accumulation steps. `flatten` concatenates the rows of a micro-batch, as
    FlashAttention requires for packed rows. With `audit_dir`, the run writes an audit log to this folder.

    >>> from accelerate import Accelerator
    >>> from chatmill.integrations.accelerate import train_loader
    >>> job = chatmill.Job(sources=(chatmill.InputSource(("data/conversations.jsonl",)),))
    >>> _ = chatmill.prepare_dataset(job, Path("chat_sft"))
    >>> config = {"batch_size": 4, "block_size": 64, "use_loss_mask": True}
    >>> loader = train_loader(Accelerator(cpu=True), "chat_sft", config, steps=10)
    >>> len(loader), [tuple(batch["input_ids"].shape) for batch in loader][:2]
    (10, [(4, 65), (4, 65)])
    """
    batches = AcceleratorBatches(
        accelerator, dataset_dir, config, epochs=epochs, steps=steps, flatten=flatten, audit_dir=audit_dir
    )
    accelerator.register_for_checkpointing(batches)
    return batches


class AcceleratorBatches:
    """The micro-batches of a run on one rank, in the format that Hugging Face models expect.

    A micro-batch is a dict with the columns from `causal_lm_columns`, and `step_weight`, the divisor of the loss.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        dataset_dir: str | Place,
        config: LoadConfig | Mapping[str, Any] | str | Path | None,
        *,
        epochs: int | None,
        steps: int | None,
        flatten: bool,
        audit_dir: str | Path | None,
    ) -> None:
        if (epochs is None) == (steps is None):
            raise UsageError("the length of the run is missing or ambiguous; pass either epochs or steps")
        parallel = accelerator.parallelism_config
        if parallel is not None and parallel.non_data_parallel_size > 1:
            raise UsageError(
                "the accelerator uses tensor, context or sequence parallelism, where several ranks share rows; "
                "use data parallelism only"
            )
        self._accelerator, self._flatten, self._audit_dir = accelerator, flatten, audit_dir
        self.accumulation = accelerator.gradient_accumulation_steps
        """Number of micro-batches per optimizer step."""
        self.loader = EpisodeLoader(
            dataset_dir,
            config,
            rank=accelerator.process_index,
            world_size=accelerator.num_processes,
            epochs=epochs,
            device=accelerator.device,
        )
        self._check_accumulation()
        self.steps = len(self.loader) if steps is None else steps
        """Number of optimizer steps in the run."""
        self._parts: list[dict[str, Any]] = []
        self._audit: Audit | None = None
        self._audit_state: Mapping[str, Any] | None = None
        """The audit state of the loaded checkpoint, or of the finished run."""
        self._closed = False

    def _check_accumulation(self) -> None:
        config, mine, ranks = self.loader.config, self.accumulation, self.loader.world_size
        if config.gradient_accumulation_steps not in (1, mine):
            raise UsageError(
                f"gradient_accumulation_steps is {config.gradient_accumulation_steps} in the config, but {mine} in the "
                "accelerator; expected the same value"
            )
        if self.loader.num_rows % mine:
            raise UsageError(
                f"batch_size {config.batch_size} cannot be split across {ranks} ranks with {mine} accumulation steps "
                f"each; expected a multiple of {ranks * mine}"
            )

    def __len__(self) -> int:
        """Return the number of micro-batches in the whole run, including micro-batches that were already read."""
        return self.steps * self.accumulation

    @property
    def step(self) -> int:
        """The index of the optimizer step to which the next micro-batch belongs."""
        return self.loader.cursor().step - bool(self._parts)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if self._closed:
            raise UsageError(
                f"the run ended after {self.step} of {self.steps} steps; loop only once, and pass train_loader the "
                "epochs or steps of the whole run"
            )
        while self._parts or self.loader.cursor().step < self.steps:
            if not self._parts:
                self._parts = self._next_step()
            yield self._parts.pop(0)
        self.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data and the state of the audit log, for `accelerator.save_state`."""
        if self._parts:
            done = self.accumulation - len(self._parts)
            raise UsageError(
                f"save_state was called after micro-batch {done} of {self.accumulation} of step {self.step}, whose "
                "gradients would be lost; call save_state when accelerator.sync_gradients is true"
            )
        audit = None if self._closed else self._open_audit()
        return {
            "loader": self.loader.state_dict(),
            "audit": self._audit_state if audit is None else audit.checkpoint(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved position, for `accelerator.load_state`."""
        if self._audit_dir is not None and state["audit"] is None:
            raise UsageError(
                f"audit_dir is {self._audit_dir}, but the run began without an audit log; remove audit_dir to resume"
            )
        self.loader.load_state_dict(state["loader"])
        self.close()
        self._parts, self._audit_state, self._closed = [], state["audit"], False

    def close(self) -> None:
        """Close the audit log and stop the prefetching thread; called automatically after the last micro-batch."""
        if self._audit is not None:
            self._audit_state = self._audit.checkpoint()
            self._audit.close()
        self._audit, self._closed = None, True
        self.loader.close()

    def _next_step(self) -> list[dict[str, Any]]:
        self._open_audit()
        batch = self.loader.get_batch()
        weight = batch.weights.sum()
        if self.loader.world_size > 1:
            dist.all_reduce(weight)
        # Accelerate averages gradients over all micro-batches of a step, so divide the total weight by their number.
        weight /= self.accumulation * self.loader.world_size
        padding = self.loader.plan(self.loader.split).pad_token_id
        parts = (causal_lm_columns(part, pad_token_id=padding) for part in batch.split(self.accumulation))
        return [{**(flattened(columns) if self._flatten else columns), "step_weight": weight} for columns in parts]

    def _open_audit(self) -> Audit | None:
        """Open the audit log when it is first needed, because a loaded checkpoint determines which log to continue."""
        if self._audit is None and self._audit_dir is not None:
            reduce = self._sum if self.loader.world_size > 1 else None
            self._audit = Audit(self._audit_dir, state=self._audit_state, reduce=reduce)
            self.loader.listen(self._audit)
        return self._audit

    def _sum(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        total = torch.from_numpy(values.copy()).to(self._accelerator.device)
        dist.all_reduce(total)
        return total.cpu().numpy()
