"""The loss of a step for trainers that average over ranks and micro-batches.

    loss of a step = Σ weight · cross entropy / Σ weight        over all its rows
                   = the mean of the losses of its micro-batches on all ranks

A batch has the column `step_weight`, a scalar or (rows, 1): Σ weight of the whole step, divided by the number of
micro-batches that the trainer averages over. Each rank can thus compute its loss without communication.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from chatmill.errors import UsageError
from chatmill.load.batch import IGNORE_INDEX

MODEL_INPUTS = ("input_ids", "position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""Columns that a model takes; the rest are for the loss."""


def weighted_loss(logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """Return Σ weight · cross entropy of a batch, divided by its `step_weight`; 0 for a step without trained tokens."""
    labels, weights, total = batch["labels"][:, 1:], batch["weights"][:, 1:], batch["step_weight"]
    trained = labels != IGNORE_INDEX
    # Only the logits of trained positions are converted to float32.
    entropy = F.cross_entropy(logits[:, :-1][trained].float(), labels[trained], reduction="none")
    shares = weights / total.where(total > 0, 1)
    return (entropy * shares[trained]).sum()


def causal_lm_loss(model: nn.Module, batch: Mapping[str, Tensor], **inputs: Any) -> Tensor:
    """Return the `weighted_loss` of a causal language model from transformers; `inputs` are passed on to the model."""
    if "flash" in _attention(model) and "cu_seq_lens_q" not in batch:
        raise UsageError(
            "FlashAttention does not keep the conversations of packed rows apart in a batch of several rows; "
            "make the batches with flatten=True, or with chatmill.integrations.columns.flattened"
        )
    # A KV cache would also let the conversations of a packed row attend to each other.
    arguments = {name: batch[name] for name in MODEL_INPUTS if name in batch}
    return weighted_loss(model(**{"use_cache": False, **arguments, **inputs}).logits, batch)


def _attention(model: Any) -> str:
    """Return the attention implementation of a model, inside DDP or a similar wrapper; empty if unknown."""
    while hasattr(model, "module"):
        model = model.module
    return str(getattr(getattr(model, "config", None), "_attn_implementation", None) or "")
