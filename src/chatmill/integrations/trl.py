"""Train on chatmill's data with TRL's `SFTTrainer`.

    rows = trl.TrainRows("chat_sft", {"batch_size": 8, "block_size": 512, "use_loss_mask": True}, epochs=1)
    args = SFTConfig("run", learning_rate=1e-4, **trl.sft_config(rows))
    trainer = trl.WeightedSFTTrainer(model, args, **trl.trainer_arguments(rows))

If all weights in the data are 1, `SFTTrainer` can be used with the same arguments.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow
from datasets import Dataset
from torch import Tensor
from trl import SFTTrainer

from chatmill.errors import UsageError
from chatmill.integrations import hf
from chatmill.integrations.columns import split_labels
from chatmill.integrations.hf import Collator, RunCallback
from chatmill.integrations.train_rows import EvalRows, ModelInputs, TrainRows

__all__ = ["SFTRows", "TrainRows", "WeightedSFTTrainer", "sft_config", "trainer_arguments"]


def sft_config(rows: TrainRows) -> dict[str, Any]:
    """Return arguments for `SFTConfig` that make the trainer read the rows once, in order and unchanged."""
    return {
        **hf.training_arguments(rows),
        "dataset_kwargs": {"skip_prepare_dataset": True},
        "max_length": None,
        "packing": False,
        "padding_free": False,
        "loss_type": "nll",
    }


def trainer_arguments(rows: TrainRows, *, flatten: bool = False) -> dict[str, Any]:
    """Return arguments for the trainer: the rows, a collator, a callback, and the val split if there is one.

    Pass `flatten=True` if the model uses FlashAttention; see `hf.Collator`.
    """
    return {
        "train_dataset": SFTRows(rows),
        "eval_dataset": SFTRows(EvalRows(rows)) if "val" in rows.loader.splits else None,
        "data_collator": Collator(flatten=flatten),
        "callbacks": [RunCallback(rows, flatten=flatten, expected=sft_config(rows))],
    }


class SFTRows(Dataset):
    """The rows of `TrainRows` or `EvalRows` as a `datasets.Dataset`, which `SFTTrainer` requires."""

    def __init__(self, rows: TrainRows | EvalRows) -> None:
        super().__init__(pyarrow.table({"row": pyarrow.array([], pyarrow.int64())}))
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[ModelInputs]:
        return map(self.rows.__getitem__, range(len(self.rows)))

    def __getitem__(self, row: int) -> ModelInputs:
        return self.rows[row]

    def __getitems__(self, rows: Sequence[int]) -> list[ModelInputs]:
        return self.rows.__getitems__(rows)

    def set_epoch(self, epoch: int) -> None:
        """Raise `UsageError` if a training run starts a second epoch."""
        if isinstance(self.rows, TrainRows):
            self.rows.set_epoch(epoch)


class WeightedSFTTrainer(SFTTrainer):
    """An `SFTTrainer` whose training and evaluation loss is Σ weight · cross entropy / Σ weight over the global batch.

    The weights are encoded in the labels of `SFTRows`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        dataset = kwargs.get("train_dataset")
        if not isinstance(dataset, SFTRows) or not isinstance(dataset.rows, TrainRows):
            raise UsageError("WeightedSFTTrainer trains only on SFTRows; pass **trl.trainer_arguments(rows)")
        dataset.rows.weights_in_labels = True
        super().__init__(*args, **kwargs)

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | None = None,
    ) -> Any:
        labels, weights = split_labels(inputs["labels"])
        inputs = {**inputs, "labels": labels}
        if num_items_in_batch is None:
            # In evaluation, SFTTrainer would divide by the number of labels on this rank only.
            num_items_in_batch = self._get_num_items_in_batch([inputs], self.args.device)

        def weighted_model(**model_inputs: Any) -> Any:
            outputs = model(**model_inputs)
            if "log_probs" in outputs:
                outputs["log_probs"] = outputs["log_probs"] * weights[:, 1:]
            return outputs

        return super().compute_loss(weighted_model, inputs, return_outputs, num_items_in_batch)
