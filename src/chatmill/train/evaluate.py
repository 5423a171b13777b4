"""Evaluation: the exact loss over the trained tokens of a split, each counted once."""

from __future__ import annotations

import math
from itertools import islice
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from chatmill.load.loader import EpisodeLoader
from chatmill.train.distributed import World
from chatmill.train.model import Inputs, eval_mode


class Evaluation(NamedTuple):
    """The loss of a model on a split."""

    loss: float | None
    """The weighted mean over trained tokens; None if there are none."""
    trained: int
    """Trained tokens that it is over."""

    @property
    def perplexity(self) -> float | None:
        return None if self.loss is None else math.exp(min(self.loss, 700))

    def __str__(self) -> str:
        if self.loss is None:
            return "val has no trained tokens"
        return f"val loss {self.loss:.4f}, perplexity {self.perplexity:.4g} over {self.trained:,} trained tokens"


def evaluate(
    module: nn.Module, loader: EpisodeLoader, world: World, *, split: str = "val", batches: int | None = None
) -> Evaluation:
    """The loss of a split in the order of its files, or of its first batches; moves no cursor. All ranks call this."""
    total = torch.zeros((), dtype=torch.float64, device=world.device)
    weight, trained = 0.0, 0
    with eval_mode(module), torch.no_grad():
        for batch in islice(loader.one_pass(split), batches):
            for part in batch.split(loader.config.gradient_accumulation_steps):
                inputs = Inputs.of(part, world.device)
                total += module(*inputs).total
                weight += inputs.targets.weight
                trained += inputs.targets.count
    if world.size > 1:
        dist.all_reduce(total)
    weights, counts = world.sums([weight, trained])
    return Evaluation(float(total) / weights if weights else None, int(counts))
