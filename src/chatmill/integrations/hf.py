"""Train on chatmill's data with `transformers.Trainer`.

    rows = hf.TrainRows("chat_sft", {"batch_size": 8, "block_size": 512, "use_loss_mask": True}, epochs=1)
    args = TrainingArguments("run", learning_rate=1e-4, **hf.training_arguments(rows))
    trainer = Trainer(model, args, **hf.trainer_arguments(rows))

Each rank trains on the same rows as in `chatmill train`. The loss is also the same: Σ weight · cross entropy / Σ weight
over the global batch. For TRL's `SFTTrainer`, see `chatmill.integrations.trl`.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from chatmill.audit import Audit
from chatmill.errors import UsageError
from chatmill.integrations.columns import flattened, split_labels
from chatmill.integrations.train_rows import EvalRows, ModelInputs, TrainRows
from chatmill.load.batch import IGNORE_INDEX
from chatmill.load.plan import Cursor

__all__ = [
    "Collator",
    "EvalRows",
    "RunCallback",
    "TrainRows",
    "trainer_arguments",
    "training_arguments",
    "weighted_loss",
]

STATE = "chatmill_state.json"
"""The file in a checkpoint that stores the position in the data."""
UNCHANGED = {
    "label_smoothing_factor": 0,
    "ignore_data_skip": False,
    "auto_find_batch_size": False,
    # With a KV cache, transformers lets the conversations of a packed row attend to each other.
    "use_cache": False,
}
"""Required values of `TrainingArguments`; other values would change the rows or the loss."""


def training_arguments(rows: TrainRows) -> dict[str, Any]:
    """Return arguments for `TrainingArguments` that make a trainer read the rows once, in order.

    Call this on every rank, because the batch size per device depends on the number of ranks.
    """
    return {
        "per_device_train_batch_size": rows.rows_per_batch,
        "per_device_eval_batch_size": rows.rows_per_batch,
        "gradient_accumulation_steps": rows.config.gradient_accumulation_steps,
        "train_sampling_strategy": "sequential",
        "num_train_epochs": 1,
        "average_tokens_across_devices": True,
        "remove_unused_columns": False,
    }


def trainer_arguments(rows: TrainRows, *, flatten: bool = False) -> dict[str, Any]:
    """Return arguments for `Trainer`: the rows, the loss, a collator, a callback, and the val split if there is one.

    Pass `flatten=True` if the model uses FlashAttention; see `Collator`.
    """
    rows.weights_in_labels = True
    evaluates = "val" in rows.loader.splits
    return {
        "train_dataset": rows,
        "eval_dataset": EvalRows(rows) if evaluates else None,
        "data_collator": Collator(flatten=flatten),
        "compute_loss_func": weighted_loss,
        "callbacks": [RunCallback(rows, flatten=flatten)],
    }


class Collator:
    """Stacks rows into a batch.

    `flatten` concatenates all rows into one, as FlashAttention requires. `cu_seq_lens_q`, `cu_seq_lens_k`,
    `max_length_q` and `max_length_k` then mark the boundaries of conversations.

    >>> import torch
    >>> from chatmill.integrations.hf import Collator
    >>> row = {"input_ids": torch.tensor([5, 6, 7]), "position_ids": torch.tensor([0, 1, 0])}
    >>> Collator()([row, row])["input_ids"].tolist()
    [[5, 6, 7], [5, 6, 7]]
    >>> flat = Collator(flatten=True)([row, row])
    >>> flat["input_ids"].tolist(), flat["cu_seq_lens_q"].tolist(), flat["max_length_q"]
    ([[5, 6, 7, 5, 6, 7]], [0, 2, 3, 5, 6], 2)
    """

    def __init__(self, *, flatten: bool = False) -> None:
        self.flatten = flatten

    def __call__(self, rows: Sequence[ModelInputs]) -> dict[str, Any]:
        batch: dict[str, Any] = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        return flattened(batch) if self.flatten else batch


def weighted_loss(outputs: Mapping[str, Tensor], labels: Tensor, num_items_in_batch: Tensor | None = None) -> Tensor:
    """Return Σ weight · cross entropy / number of labels, with weights encoded by `weighted_labels`."""
    ids, weights = split_labels(labels[:, 1:])
    trained = ids != IGNORE_INDEX
    # To save memory, convert only the needed logits to float32.
    losses = F.cross_entropy(outputs["logits"][:, :-1][trained].float(), ids[trained], reduction="none")
    count = trained.sum() if num_items_in_batch is None else torch.as_tensor(num_items_in_batch)
    return (losses * weights[trained]).sum() / count.to(losses.device).clamp(min=1)


class RunCallback(TrainerCallback):
    """A `Trainer` callback that rejects arguments that would change the rows, saves the position in the data, and
    writes the audit log.

    Checkpoints store the position in `chatmill_state.json`. A resumed run must use the same dataset and the same order
    of rows.
    """

    def __init__(self, rows: TrainRows, *, flatten: bool = False, expected: Mapping[str, Any] | None = None) -> None:
        """`flatten` must have the same value as for `Collator`. `expected` contains the required training arguments, by
        default `training_arguments(rows)`.
        """
        self.rows = rows
        self._flatten = flatten
        self._expected = expected
        self._at = Cursor()
        """Position of the next step in the data."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **others: Any
    ) -> None:
        expected = {**(self._expected or training_arguments(self.rows)), **UNCHANGED}
        faults = [
            f"{name} is {getattr(args, name)!r}; expected {value!r}"
            for name, value in expected.items()
            if getattr(args, name) != value
        ]
        # A wrong argument may also change max_steps, so check max_steps last.
        if state.max_steps > self.rows.steps and not faults:
            faults.append(f"max_steps is {state.max_steps}, but the dataset has {self.rows.steps} steps")
        attention = getattr(getattr(model, "config", None), "_attn_implementation", None) or ""
        if "flash" in attention and not self._flatten:
            faults.append(f"{attention} lets conversations in a packed row attend to each other; expected flatten=True")
        if faults:
            raise UsageError(f"the trainer's arguments would change the rows or the loss: {'; '.join(faults)}")
        self._at = self.rows.plan.cursor_at(state.global_step)
        saved = self._resume(_checkpoint(args, state)) if state.global_step else None
        if self.rows.audit_dir is not None:
            self._open_audit(args, saved)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        if (audit := self.rows.open_audit) is None:
            return
        plan = self.rows.plan
        step = plan.step(self._at)
        digest, counts = self.rows.digests(step.at.step)
        if step.begins_epoch:
            audit.epoch_started(plan, step.at.epoch)
        audit.delivered(plan, step, digest.view(np.uint64), None if plan.config.mix is None else counts)
        if step.ends_epoch:
            audit.epoch_completed(plan, step.at.epoch, step)
        self._at = step.after

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        open_audit = self.rows.open_audit
        audit = None if open_audit is None else open_audit.checkpoint()
        if args.should_save:
            loader, cursor = self.rows.loader, self.rows.plan.cursor_at(state.global_step)
            place = {**loader.state_dict(), "cursors": {loader.split: cursor._asdict()}}
            text = json.dumps({"loader": place, "audit": audit}, indent=1)
            (_checkpoint(args, state) / STATE).write_text(text + "\n", "utf-8")

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the audit log. The trainer closes the log at the end of a run, but not after an exception."""
        if (audit := self.rows.open_audit) is not None:
            self.rows.open_audit = None
            audit.close()

    def _resume(self, checkpoint: Path) -> Mapping[str, Any] | None:
        """Return the content of `chatmill_state.json`; if the file does not exist, warn and return None."""
        path = checkpoint / STATE
        try:
            saved = json.loads(path.read_text("utf-8"))
            loader = saved["loader"]
        except FileNotFoundError:
            fault = f"{path}: the file does not exist, so chatmill cannot check the position in the data"
            if self.rows.audit_dir is not None:
                raise UsageError(f"{fault}; resume from a checkpoint in output_dir, or start a new run") from None
            warnings.warn(f"{fault}; the run resumes at the trainer's step", stacklevel=2)
            return None
        except (OSError, ValueError, KeyError, TypeError):
            raise UsageError(f"{path}: cannot be read; resume from another checkpoint") from None
        try:
            self.rows.loader.load_state_dict(loader)
        except UsageError as error:
            raise UsageError(f"{path}: {error}") from None
        if (at := self.rows.loader.cursor()) != self._at:
            raise UsageError(
                f"{path}: is at step {at.step}, but the trainer is at step {self._at.step}; the checkpoint was changed"
            )
        return saved

    def _open_audit(self, args: TrainingArguments, saved: Mapping[str, Any] | None) -> None:
        self.close()
        rank, world_size = self.rows.rank_and_world_size
        state = None if saved is None else saved["audit"]
        if saved is not None and state is None:
            raise UsageError("the resumed run has no audit log; remove audit_dir, or start a new run")

        def reduce(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
            tensor = torch.from_numpy(numbers.copy()).to(args.device)
            dist.all_reduce(tensor)
            return tensor.cpu().numpy()

        assert self.rows.audit_dir is not None
        self.rows.open_audit = audit = Audit(
            self.rows.audit_dir, state=state, reduce=reduce if world_size > 1 else None
        )
        self.rows.loader.rank, self.rows.loader.world_size = rank, world_size
        audit.loaded(self.rows.loader)


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"
