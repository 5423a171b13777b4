"""Loss functions: their interface, and weighted cross entropy over trained tokens.

The head runs on one chunk of trained positions at a time, so the logits of a whole batch are never materialized. Losses
are weighted sums over tokens, which the training loop divides by the total weight of the global batch. The final loss
does not depend on how the batch is split over micro-batches and ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from chatmill.load.batch import IGNORE_INDEX

LOGIT_BYTES = 1 << 26
"""Maximum size in bytes of the logits computed at a time on a CPU, chosen to fit the CPU caches."""
GPU_LOGIT_BYTES = 5 << 28
"""Maximum size in bytes of the logits computed at a time on a GPU, chosen to keep the GPU busy."""
MULTIPLE = 128
"""The number of positions is padded to a multiple of this value, for efficient matrix products."""


@dataclass(frozen=True)
class TrainedPositions:
    """The trained positions of a batch, computed on the host, so that the host never waits for the device.

    The positions are padded to a multiple of MULTIPLE with positions of weight 0. A batch without trained tokens has
    only padding positions, so its loss and gradients are zero.
    """

    index: Tensor
    """int64[N]: row * length + column of each trained position."""
    ids: Tensor
    """int64[N]: the target token of each position."""
    weights: Tensor
    """float32[N]: the weight of each position; 0 for padding."""
    count: int
    """Number of trained positions, without padding."""
    weight: float
    """Sum of the weights of all trained positions."""

    @classmethod
    def of(cls, y: Tensor, weights: Tensor, *, multiple: int = MULTIPLE) -> TrainedPositions:
        """Select the trained positions from targets and weights (rows, length); y is -100 at untrained positions."""
        flat = y.cpu().numpy().ravel()
        trained = np.flatnonzero(flat != IGNORE_INDEX)
        count = len(trained)
        index = np.zeros(max(1, -(-count // multiple)) * multiple, dtype=np.int64)
        ids, weight = np.zeros_like(index), np.zeros(len(index), dtype=np.float32)
        index[:count], ids[:count] = trained, flat[trained]
        weight[:count] = weights.cpu().numpy().ravel()[trained]
        total = float(weight.sum(dtype=np.float64))
        return cls(torch.from_numpy(index), torch.from_numpy(ids), torch.from_numpy(weight), count, total)

    def to(self, device: torch.device | str) -> TrainedPositions:
        """Copy the tensors to a device."""
        index, ids, weights = (moved(part, device) for part in (self.index, self.ids, self.weights))
        return TrainedPositions(index, ids, weights, self.count, self.weight)


def moved(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Copy a tensor to a device without waiting for the device."""
    # Pin the memory, because a copy from unpinned memory would make the host wait for all queued GPU work.
    if torch.device(device).type == "cuda" and not tensor.is_cuda and not tensor.is_pinned():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class Losses(NamedTuple):
    """Losses at the trained positions of a batch."""

    total: Tensor
    """Σ weight · loss, a float32 scalar; the loop divides it by the weight of the global batch."""
    tokens: Tensor
    """float32[N]: the loss at each target position, without gradient."""


@dataclass(frozen=True)
class LMHead:
    """An output head, which computes logits from hidden states: cap(scale · (h Wᵀ + bias))."""

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    cap: float | None = None
    """Soft cap on the logits z: cap · tanh(z / cap)."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute the logits for hidden states, in float32."""
        bias = None if self.bias is None else self.bias.to(hidden.dtype)
        z = F.linear(hidden, self.weight.to(hidden.dtype), bias).float() * self.scale
        return z if self.cap is None else self.cap * torch.tanh(z / self.cap)


class LossFunction(Protocol):
    """Computes the losses at the trained positions from hidden states (rows, length, width).

    Examples are `weighted_loss` and `chatmill.rollout.RolloutLoss`. Pass a loss function to `train_model(loss=...)`.
    """

    def __call__(self, hidden: Tensor, head: LMHead, targets: TrainedPositions) -> Losses: ...


def trained_states(hidden: Tensor, targets: TrainedPositions) -> Tensor:
    """Return the hidden states (N, width) at the trained positions."""
    return hidden.reshape(-1, hidden.shape[-1]).index_select(0, targets.index)


def by_segment(losses: Losses, targets: TrainedPositions, segments: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return Σ weight · loss and Σ weight for each segment, as tensors of shape (rows, count). `count` is the number of
    segments per row. The loss of a segment is (Σ weight · loss) / Σ weight.
    """
    place = targets.index
    cell = place // segments.shape[1] * count + segments.flatten()[place]
    sums = (values.new_zeros(len(segments) * count) for values in (losses.tokens, targets.weights))
    parts = (losses.tokens * targets.weights, targets.weights)
    total, weight = (out.index_add(0, cell, part).view(-1, count) for out, part in zip(sums, parts, strict=True))
    return total, weight


def weighted_loss(hidden: Tensor, head: LMHead, targets: TrainedPositions) -> Losses:
    """Compute Σ weight · cross entropy over the targets from hidden states (rows, length, width)."""
    picked = trained_states(hidden, targets)
    if torch.is_grad_enabled():
        return Losses(*_LinearCrossEntropy.apply(picked, head.weight, head.bias, head, targets))
    return _chunked_loss(picked, head, targets, needed=(False, False, False))[0]


class _LinearCrossEntropy(torch.autograd.Function):
    """Output head and cross entropy as one autograd function, which computes the gradients in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, head: LMHead, targets: TrainedPositions
    ) -> tuple[Tensor, Tensor]:
        losses, gradients = _chunked_loss(hidden, head, targets, needed=ctx.needs_input_grad[:3])
        ctx.save_for_backward(*gradients)
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in (hidden, weight, bias)]
        ctx.mark_non_differentiable(losses.tokens)
        return losses.total, losses.tokens

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        # Write the gradient directly in the dtype of the parameter: a float32 copy of a bfloat16 gradient would take
        # twice the memory of the gradient.
        scaled = (
            None if saved is None else torch.mul(saved, grad, out=torch.empty_like(saved, dtype=dtype))
            for saved, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return (*scaled, None, None)


def _chunked_loss(
    hidden: Tensor, head: LMHead, targets: TrainedPositions, *, needed: tuple[bool, bool, bool]
) -> tuple[Losses, tuple[Tensor | None, Tensor | None, Tensor | None]]:
    """Compute the losses at the trained positions and the gradients of their weighted sum.

    `needed` contains three flags: whether to compute the gradients of the hidden states, the weight and the bias. The
    logits of each chunk are overwritten with their gradients.
    """
    matrix = head.weight.to(hidden.dtype)
    bias = None if head.bias is None else head.bias.to(hidden.dtype)
    tokens = torch.empty_like(targets.weights)
    grad_hidden, grad_weight, grad_bias = (
        torch.zeros_like(tensor, dtype=torch.float32) if need and tensor is not None else None
        for tensor, need in zip((hidden, head.weight, head.bias), needed, strict=True)
    )
    entropy_in_place = _gpu_entropy() if hidden.is_cuda else entropy
    for start, stop in _chunks(len(tokens), matrix):
        h = hidden[start:stop]
        logits = h @ matrix.T if bias is None else torch.addmm(bias, h, matrix.T)
        ids, weights = targets.ids[start:stop], targets.weights[start:stop]
        tokens[start:stop] = entropy_in_place(logits, ids, weights, head.scale, head.cap)
        # `entropy` has overwritten `logits` with the gradient of the chunk's logits.
        if grad_hidden is not None:
            grad_hidden[start:stop] = logits @ matrix
        if grad_weight is not None:
            _add_product(grad_weight, logits.T, h)
        if grad_bias is not None:
            grad_bias += logits.sum(0, dtype=torch.float32)
    return Losses((tokens * targets.weights).sum(), tokens), (grad_hidden, grad_weight, grad_bias)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add the matrix product `a @ b` to `total`, a float32 tensor. On an NVIDIA GPU, the product is not rounded to the
    dtype of `a` and `b`.
    """
    if a.is_cuda and torch.version.hip is None and a.dtype != torch.float32:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total += a @ b


def _chunks(count: int, matrix: Tensor) -> list[tuple[int, int]]:
    """Split `count` positions into ranges of about equal size, so that the logits of a range do not exceed the size
    limit.
    """
    limit = GPU_LOGIT_BYTES if matrix.is_cuda else LOGIT_BYTES
    most = max(1, limit // (matrix.element_size() * matrix.shape[0] * MULTIPLE)) * MULTIPLE
    number = -(-count // most)
    size = -(-count // (number * MULTIPLE)) * MULTIPLE
    return [(start, min(start + size, count)) for start in range(0, count, size)]


def entropy(logits: Tensor, ids: Tensor, weights: Tensor, scale: float, cap: float | None) -> Tensor:
    """Return the cross entropy of each row of logits; overwrite the logits with the gradient of Σ weight · loss."""
    z = logits.float() * scale
    if cap is not None:
        z = cap * torch.tanh(z / cap)
    lse = torch.logsumexp(z, dim=1, keepdim=True)
    wanted = (torch.arange(z.shape[1], device=z.device) == ids[:, None]).float()
    grad = (torch.exp(z - lse) - wanted) * (weights * scale)[:, None]
    if cap is not None:
        grad = grad * (1 - (z / cap) ** 2)
    losses = lse.squeeze(1) - z.gather(1, ids[:, None]).squeeze(1)
    logits.copy_(grad)
    return losses


def _gpu_entropy() -> Callable[..., Tensor]:
    from chatmill.train.entropy_kernel import entropy_in_place

    return entropy_in_place
