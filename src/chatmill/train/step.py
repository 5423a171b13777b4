"""One optimizer step on the mean loss over all trained tokens in the global batch.

The step does not depend on how the batch is split over ranks and micro-batches. The host reads the result of a step one
step later, so it never waits for work that it has just launched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from chatmill.errors import ChatmillError
from chatmill.load.batch import IGNORE_INDEX, Batch, segments_from_end
from chatmill.train.distributed import World, gradient_sync, is_sharded, whole
from chatmill.train.loss import by_segment
from chatmill.train.low_precision import LowPrecisionAdamW
from chatmill.train.model import CausalModel, Inputs
from chatmill.train.optimizers import make_optimizer
from chatmill.train.run_config import OptimizerConfig

ROUNDING = 1 << 31
"""Used instead of the rank in the seed for stochastic rounding, which must be the same on all ranks."""


class NotFiniteError(ChatmillError):
    """Raised if a loss or gradient norm is NaN or infinite, which stops the run."""


class StepCounts(NamedTuple):
    """Token, row and rank counts for a global batch."""

    weight: float = 0.0
    """Sum of the weights of the trained tokens, by which the loss is divided."""
    trained: float = 0.0
    """Number of trained tokens."""
    tokens: float = 0.0
    """Number of tokens, excluding padding."""
    untrained_rows: float = 0.0
    """Number of nonempty rows without trained tokens."""
    cut_episodes: float = 0.0
    """Number of episodes that are truncated at the start because they are longer than a row."""
    cut_tokens: float = 0.0
    answer_cut: float = 0.0
    """Number of truncated episodes that lose part of an answer."""
    stop: float = 0.0
    """Number of ranks that received a stop request."""
    unknown_ids: float = 0.0
    """Number of ranks whose rows contain a token id outside the vocabulary."""
    damaged: float = 0.0
    """Number of ranks that found a changed data file."""
    checking: float = 0.0
    """Number of ranks that are still checking data files."""


class RowLoss(NamedTuple):
    """The mean loss of one conversation, and the total weight of its trained tokens."""

    episode: int
    segment: int
    """Index of the conversation in the episode, counted from the end: -1 is the last conversation."""
    loss: float
    weight: float


RowSums = list[tuple[Tensor, Tensor, Tensor]]
"""For each micro-batch: the episode ids, and the sums Σ weight · loss and Σ weight for each conversation."""


class StepResult(NamedTuple):
    """Loss and gradient norm of a step."""

    loss: float
    """Weighted mean loss over the trained tokens of the global batch; 0 if the batch has no trained tokens."""
    grad_norm: float
    sums: RowSums | None
    """The losses of this rank's conversations, if requested."""

    def rows(self) -> list[RowLoss]:
        """Return the losses of this rank's conversations that have trained tokens."""
        losses = []
        for ids, totals, weights in self.sums or ():
            trained = (ids >= 0) & (weights > 0)
            segments = torch.from_numpy(segments_from_end(ids.numpy()).copy())
            columns = ids[trained], segments[trained], totals[trained] / weights[trained], weights[trained]
            losses += [RowLoss(*values) for values in zip(*(column.tolist() for column in columns), strict=True)]
        return losses

    def check_finite(self, step: int, saved: Path | None, advice: Callable[[], str]) -> None:
        """Raise `NotFiniteError` with advice if the loss or the gradient norm is NaN or infinite."""
        if math.isfinite(self.loss) and math.isfinite(self.grad_norm):
            return
        norm = f"the gradient norm is {self.grad_norm}"
        restart = f"resume from {saved}" if saved else "start the run again, because no checkpoint was written"
        raise NotFiniteError(
            f"step {step}: {norm if math.isfinite(self.loss) else f'the loss is {self.loss}'}; {advice()}, "
            f"and {restart}"
        )


class MicroBatch(NamedTuple):
    """The input of one forward pass, and the ids of its episodes."""

    inputs: Inputs
    episode_ids: Tensor


def micro_batches(batch: Batch, count: int, device: torch.device) -> list[MicroBatch]:
    """Split one rank's part of a batch into `count` micro-batches on the rank's device."""
    return [MicroBatch(Inputs.of(part, device), part.episode_ids) for part in batch.split(count)]


def count_batch(batch: Batch, parts: Sequence[MicroBatch]) -> StepCounts:
    """Count tokens and untrained rows in one rank's part of a batch, on the host."""
    real = batch.episode_ids[:, 0] >= 0
    # Segments after the last episode of a row are padding.
    tokens = (batch.segments < (batch.episode_ids >= 0).sum(dim=1)[:, None]).sum()
    return StepCounts(
        weight=math.fsum(part.inputs.targets.weight for part in parts),
        trained=sum(part.inputs.targets.count for part in parts),
        tokens=int(tokens),
        untrained_rows=int((real & (batch.y == IGNORE_INDEX).all(dim=1)).sum()),
    )


def unknown_id(batch: Batch, vocab_size: int) -> str | None:
    """Describe the first out-of-vocabulary token id in a batch. Return None if all ids are valid."""
    x, y = torch.as_tensor(batch.x), torch.as_tensor(batch.y)
    if int(x.max()) < vocab_size and int(x.min()) >= 0 and int(y.max()) < vocab_size:
        return None
    wrong = (x >= vocab_size) | (x < 0) | (y >= vocab_size)
    row, column = wrong.nonzero()[0].tolist()
    segment = int(batch.segments[row, column])
    episodes = batch.episode_ids[row].tolist()
    place = f"episode {episodes[segment]}" if segment < len(episodes) and episodes[segment] >= 0 else "the padding"
    token = max(int(x[row, column]), int(y[row, column]))
    return f"{place} has the token id {token}; the model's vocabulary size is {vocab_size:,}"


class Pending:
    """The result of a step while it is being copied from the device."""

    def __init__(self, device: torch.device, numbers: Tensor, rows: RowSums | None) -> None:
        self._numbers = _to_host(numbers)
        self._rows = None if rows is None else [(ids, _to_host(t), _to_host(w)) for ids, t, w in rows]
        self._done = None
        if device.type == "cuda":
            self._done = torch.cuda.Event()
            self._done.record()

    def read(self) -> StepResult:
        if self._done is not None:
            self._done.synchronize()
        loss, norm = self._numbers.tolist()
        return StepResult(loss, norm, self._rows)


def _to_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", non_blocking=True)


class Stepper:
    """Takes optimizer steps with a model that is replicated or sharded over all ranks."""

    def __init__(self, model: CausalModel, module: nn.Module, world: World, settings: OptimizerConfig) -> None:
        """`module` wraps the model and averages gradients over ranks. The optimizer state is empty at first."""
        self.model, self.module, self.world = model, module, world
        self.optimizer = make_optimizer(model, settings)
        self._grad_clip = settings.grad_clip
        self._rounds = isinstance(self.optimizer, LowPrecisionAdamW)
        self.is_whole = not any(is_sharded(parameter) for parameter in model.parameters())
        """Whether every rank has the whole model; false if the model is sharded."""
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def step(
        self, parts: Sequence[MicroBatch], *, weight: float, lr: float, key: Sequence[int] = (0,), rows: bool = False
    ) -> Pending:
        """Take one optimizer step; `weight` is the sum of the token weights in the global batch.

        `key` seeds stochastic rounding. The key consists of the run's seed and the step, and must be the same on all
        ranks.
        """
        losses, by_row = self.gradients(parts, weight=weight, rows=rows)
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        norm = total_norm(gradients)
        if self._grad_clip:
            nn.utils.clip_grads_with_norm_(self._parameters, self._grad_clip, norm)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        if self._rounds:
            seed_step(*key, ROUNDING)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return Pending(self.world.device, torch.stack([losses, whole(norm).float()]), by_row)

    def gradients(
        self, parts: Sequence[MicroBatch], *, weight: float, rows: bool = False
    ) -> tuple[Tensor, RowSums | None]:
        """Compute the gradients for the global batch; return the mean loss and, if `rows` is true, the loss sums of
        each conversation.
        """
        # Multiply the loss by the world size, because gradients are averaged over ranks but should be summed.
        scale = self.world.size / weight if weight else 0.0
        total: Any = 0.0
        by_row: RowSums | None = [] if rows else None
        for number, part in enumerate(parts):
            with gradient_sync(self.module, number == len(parts) - 1):
                losses = self.module(*part.inputs)
                (losses.total * scale).backward()
            total = total + losses.total.detach()
            if by_row is not None:
                count = part.episode_ids.shape[1]
                # Add a column for padding, which has no episode.
                sums = by_segment(losses, part.inputs.targets, part.inputs.segments, count + 1)
                by_row.append((part.episode_ids, *(values[:, :count] for values in sums)))
        if self.world.size > 1:
            dist.all_reduce(total)
        return total / weight if weight else total, by_row


def seed_step(*key: int) -> None:
    """Seed torch's generators with (seed, step, rank), so that dropout depends only on these numbers."""
    torch.manual_seed(int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> 1))


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the global gradient norm in float32. A bfloat16 norm would have fewer than three significant digits."""
    if all(gradient.dtype == torch.float32 for gradient in gradients):
        return nn.utils.get_total_norm(gradients)
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
    return torch.linalg.vector_norm(torch.stack(norms))


@dataclass(frozen=True)
class LRSchedule:
    """Learning rate schedule: linear warmup to `peak`, then decay to `floor` at step `total`.

      peak      /‾‾\\__
               /      ‾\\__ floor
    step      0  warmup   total
    """

    peak: float
    floor: float
    warmup: int
    total: int
    shape: str
    """The shape of the decay: "cosine", "linear" or "constant"."""

    @classmethod
    def of(cls, settings: OptimizerConfig, *, warmup: int, total: int) -> Self:
        peak = settings.learning_rate
        return cls(peak, peak * settings.min_lr_ratio, warmup, total, settings.lr_schedule)

    def __call__(self, step: int) -> float:
        """Return the learning rate at `step` (0-based)."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        if self.shape == "constant":
            return self.peak
        progress = min(1.0, (step - self.warmup) / max(1, self.total - self.warmup))
        factor = 1 - progress if self.shape == "linear" else (1 + math.cos(math.pi * progress)) / 2
        return self.floor + (self.peak - self.floor) * factor
