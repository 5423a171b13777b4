"""The loss of a step for trainers that average over ranks and micro-batches.

    loss of a step = Σ weight · cross entropy / Σ weight        over all its rows
                   = the mean of the losses of its micro-batches on all ranks

A batch has the column `step_weight`: Σ weight of the whole step, divided by the number of micro-batches that the
trainer averages. So a rank needs nothing of the others to compute its loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from chatmill.load.batch import IGNORE_INDEX


def weighted_loss(logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """Σ weight · cross entropy of a batch of columns, over its `step_weight`; a step that trains nothing has loss 0."""
    labels, weights = batch["labels"][:, 1:], batch["weights"][:, 1:]
    scores = logits[:, :-1].transpose(1, 2).float()
    entropy = F.cross_entropy(scores, labels, ignore_index=IGNORE_INDEX, reduction="none")
    weight = batch["step_weight"]
    return (entropy * weights).sum() / weight.where(weight > 0, 1)


def causal_lm_loss(model: nn.Module, batch: Mapping[str, Tensor], **inputs: Any) -> Tensor:
    """The same, of a causal language model of transformers; `inputs` are passed to it too."""
    # With a cache, transformers does not keep the conversations of a packed row apart.
    inputs = {"use_cache": False, **inputs}
    logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], **inputs).logits
    return weighted_loss(logits, batch)
