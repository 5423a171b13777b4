"""One optimizer step: the gradient of the mean loss over all trained tokens of the global batch, however it is cut.

What a step gives is read one step later, so that the host never waits for work that it has just handed out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from chatmill.load.batch import IGNORE_INDEX, Batch, segments_from_end
from chatmill.train.distributed import World, is_sharded, last_of, whole
from chatmill.train.loss import by_segment
from chatmill.train.model import CausalModel, Inputs


class StepCounts(NamedTuple):
    """What a global batch holds."""

    weight: float = 0.0
    """The sum of the weights of what is trained: what the loss is divided by."""
    trained: float = 0.0
    """Trained tokens."""
    tokens: float = 0.0
    """Tokens that are read, without padding."""
    untrained_rows: float = 0.0
    """Rows that hold something, of which nothing is trained."""
    cut_episodes: float = 0.0
    """Episodes that are longer than a row, and lose their beginning."""
    cut_tokens: float = 0.0
    stop: float = 0.0
    """Ranks that were asked to stop."""


class RowLoss(NamedTuple):
    """The mean loss of one conversation, and the weight of its trained tokens."""

    episode: int
    segment: int
    """Which conversation of the episode, counted back: -1 is the last."""
    loss: float
    weight: float


class StepResult(NamedTuple):
    """What a step came to."""

    loss: float
    """The weighted mean over the trained tokens of the global batch; 0 if there are none."""
    grad_norm: float
    rows: list[RowLoss] | None
    """Of this rank's rows, if they were asked for."""


class MicroBatch(NamedTuple):
    """What one forward pass reads, and whose it is."""

    inputs: Inputs
    episode_ids: Tensor


def parts_of(batch: Batch, count: int, device: torch.device) -> list[MicroBatch]:
    """A rank's rows of a batch in so many parts, on its device."""
    return [MicroBatch(Inputs.of(part, device), part.episode_ids) for part in batch.split(count)]


def counts_of(batch: Batch, parts: Sequence[MicroBatch]) -> StepCounts:
    """What a rank's rows of a batch hold; read on the host."""
    real = batch.episode_ids[:, 0] >= 0
    tokens = (batch.segments < _segments(batch.episode_ids)[:, None]).sum()
    return StepCounts(
        weight=math.fsum(part.inputs.targets.weight for part in parts),
        trained=sum(part.inputs.targets.count for part in parts),
        tokens=int(tokens),
        untrained_rows=int((real & (batch.y == IGNORE_INDEX).all(dim=1)).sum()),
    )


def _segments(episode_ids: Tensor) -> Tensor:
    """How many segments of each row are episodes; what is behind them is padding."""
    return (episode_ids >= 0).sum(dim=1)


class Pending:
    """What a step comes to, on its way from the device."""

    def __init__(self, device: torch.device, numbers: Tensor, rows: list[tuple[Tensor, Tensor, Tensor]] | None) -> None:
        self._numbers = _to_host(numbers)
        self._rows = None if rows is None else [(ids, _to_host(t), _to_host(w)) for ids, t, w in rows]
        self._done = None
        if device.type == "cuda":
            self._done = torch.cuda.Event()
            self._done.record()

    def read(self) -> StepResult:
        """Wait for it."""
        if self._done is not None:
            self._done.synchronize()
        loss, norm = self._numbers.tolist()
        if self._rows is None:
            return StepResult(loss, norm, None)
        found = []
        for ids, totals, weights in self._rows:
            trained = (ids >= 0) & (weights > 0)
            segments = torch.from_numpy(segments_from_end(ids.numpy()).copy())
            columns = ids[trained], segments[trained], totals[trained] / weights[trained], weights[trained]
            found += [RowLoss(*values) for values in zip(*(column.tolist() for column in columns), strict=True)]
        return StepResult(loss, norm, found)


def _to_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", non_blocking=True)


class Stepper:
    """A model with its optimizer, spread over a world."""

    def __init__(
        self, model: CausalModel, module: nn.Module, optimizer: torch.optim.Optimizer, world: World, *, grad_clip: float
    ) -> None:
        """`module` is called in place of the model and exchanges gradients; `grad_clip` 0 leaves them as they are."""
        self.model, self.module, self.optimizer, self.world = model, module, optimizer, world
        self._grad_clip = grad_clip
        self.is_whole = not any(is_sharded(parameter) for parameter in model.parameters())
        """Whether this rank holds the whole model."""
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def step(self, parts: Sequence[MicroBatch], *, weight: float, lr: float, rows: bool = False) -> Pending:
        """Change the weights by one step; `weight` is that of the global batch."""
        losses, by_row = self.gradients(parts, weight=weight, rows=rows)
        if self._grad_clip:
            norm = nn.utils.clip_grad_norm_(self._parameters, self._grad_clip)
        else:
            norm = nn.utils.get_total_norm([p.grad for p in self._parameters if p.grad is not None])
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return Pending(self.world.device, torch.stack([losses, whole(norm).float()]), by_row)

    def gradients(
        self, parts: Sequence[MicroBatch], *, weight: float, rows: bool = False
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor, Tensor]] | None]:
        """Leave the gradient of the global batch in the parameters; its mean loss, and sums by episode."""
        # Ranks average their gradients, and each has only its part of the sum.
        share = self.world.size / weight if weight else 0.0
        total: Any = 0.0
        by_row: list[tuple[Tensor, Tensor, Tensor]] | None = [] if rows else None
        for number, part in enumerate(parts):
            with last_of(self.module, number == len(parts) - 1):
                losses = self.module(*part.inputs)
                (losses.total * share).backward()
            total = total + losses.total.detach()
            if by_row is not None:
                count = part.episode_ids.shape[1]
                # One column more for padding, which has no episode.
                sums = by_segment(losses, part.inputs.targets, part.inputs.segments, count + 1)
                by_row.append((part.episode_ids, *(values[:, :count] for values in sums)))
        if self.world.size > 1:
            dist.all_reduce(total)
        return total / weight if weight else total, by_row


def seed_draws(*place: int) -> None:
    """Let what is drawn in a step be a function of (seed, step, rank) alone."""
    torch.manual_seed(int(np.random.SeedSequence(place).generate_state(1, np.uint64)[0] >> 1))


def make_optimizer(
    model: CausalModel, *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> torch.optim.AdamW:
    """Fused AdamW; matrices decay, vectors do not."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trained if parameter.ndim >= 2], "weight_decay": weight_decay},
        {"params": [parameter for parameter in trained if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    # A config may say 0 for 0.0, which AdamW does not take.
    rates = {"lr": float(lr), "betas": (float(betas[0]), float(betas[1])), "eps": float(eps)}
    return torch.optim.AdamW([group for group in groups if group["params"]], **rates, fused=True)
