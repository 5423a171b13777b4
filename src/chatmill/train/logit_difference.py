"""Compare the logits of two models on a fixed random input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from chatmill.train.hf import HFModel
from chatmill.train.model import eval_mode

ROWS, LENGTH = 4, 64
"""Number of rows in the fixed input, and number of tokens in each row."""


@dataclass(frozen=True)
class LogitDifference:
    """Maximum and mean absolute difference between the logits of two models, over all positions and token ids."""

    max: float
    mean: float
    same_top: float
    """Fraction of positions at which both models predict the same token."""

    @classmethod
    def of(cls, a: Tensor, b: Tensor) -> LogitDifference:
        far = (a - b).abs()
        same = (a.argmax(-1) == b.argmax(-1)).float()
        return cls(far.max().item(), far.mean().item(), same.mean().item())


def probe_logits(lm: Any) -> Tensor:
    """Return the logits of a transformers model on the fixed random input."""
    # Set `separates` to skip the architecture test, because the input has no packed rows.
    model = HFModel(lm, separates=True)
    x = torch.randint(model.vocab_size, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    x = x[:, : model.max_positions].to(model.device)
    positions = torch.arange(x.shape[1], device=x.device).expand_as(x)
    with eval_mode(model), torch.no_grad():
        return model.logits(x, positions, torch.zeros_like(x, dtype=torch.int32)).cpu()
