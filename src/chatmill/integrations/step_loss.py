"""Compute the loss of a step in trainers that average the losses of ranks and micro-batches.

    loss of a step = Σ weight · cross entropy / Σ weight        over all rows of the step
                   = the mean of the losses of its micro-batches on all ranks

The column `step_weight` contains the sum of the weights in the step, divided by the number of micro-batches on all
ranks. `step_weight` has the shape () or (rows, 1).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from chatmill.errors import UsageError
from chatmill.load.batch import IGNORE_INDEX

MODEL_INPUTS = ("input_ids", "position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""Columns for the model; the other columns are for the loss."""


def weighted_loss(logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """Return Σ weight · cross entropy / `step_weight` of a batch, or 0 if the step has no trained tokens."""
    labels, weights, total = batch["labels"][:, 1:], batch["weights"][:, 1:], batch["step_weight"]
    trained = labels != IGNORE_INDEX
    # To save memory, convert only the needed logits to float32.
    entropy = F.cross_entropy(logits[:, :-1][trained].float(), labels[trained], reduction="none")
    shares = weights / total.where(total > 0, 1)
    return (entropy * shares[trained]).sum()


def causal_lm_loss(model: nn.Module, batch: Mapping[str, Tensor], **inputs: Any) -> Tensor:
    """Run a transformers causal language model on a batch and return its `weighted_loss`."""
    if "flash" in _attention(model) and "cu_seq_lens_q" not in batch:
        raise UsageError(
            "with several rows per batch, FlashAttention cannot separate the conversations in packed rows; "
            "make the batches with flatten=True, or with chatmill.integrations.columns.flattened"
        )
    # Disable the KV cache, which would let the conversations of a packed row attend to each other.
    arguments = {name: batch[name] for name in MODEL_INPUTS if name in batch}
    return weighted_loss(model(**{"use_cache": False, **arguments, **inputs}).logits, batch)


def _attention(model: Any) -> str:
    """Return the attention implementation of a model that may be wrapped in DDP."""
    while hasattr(model, "module"):
        model = model.module
    return str(getattr(getattr(model, "config", None), "_attn_implementation", None) or "")
