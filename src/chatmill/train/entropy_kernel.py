"""Cross entropy on a GPU, with one kernel program per row of logits.

A program reads its row twice, the second time from cache, and writes it once. Import this module only on a machine with
a GPU, because only CUDA builds of torch include triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 4096, 8


def entropy_in_place(logits: Tensor, ids: Tensor, weights: Tensor, scale: float, cap: float | None) -> Tensor:
    """Compute the same results as `loss.entropy`, for contiguous logits on a GPU."""
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    launch, capped = _rows[(len(logits),)], cap is not None
    numbers = logits.shape[1], scale, cap or 1.0
    launch(logits, ids, weights, losses, *numbers, CAPPED=capped, BLOCK=BLOCK, num_warps=WARPS)
    return losses


@triton.jit
def _bent(raw, scale, cap, CAPPED: tl.constexpr):
    z = raw.to(tl.float32) * scale
    if CAPPED:
        # Compute tanh with exp, because not every version of triton has tanh.
        z = cap * (1 - 2 / (tl.exp(2 * z / cap) + 1))
    return z


@triton.jit
def _rows(logits, ids, weights, losses, size, scale, cap, CAPPED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * size
    wanted = tl.load(ids + row)
    weight = tl.load(weights + row) * scale
    # Read the target logit before it is overwritten; the reductions below synchronize the threads.
    target = _bent(tl.load(logits + wanted), scale, cap, CAPPED)
    most, total = -float("inf"), 0.0
    for start in range(0, size, BLOCK):
        place = start + tl.arange(0, BLOCK)
        z = _bent(tl.load(logits + place, mask=place < size, other=0.0), scale, cap, CAPPED)
        z = tl.where(place < size, z, -float("inf"))
        higher = tl.maximum(most, tl.max(z))
        total = total * tl.exp(most - higher) + tl.sum(tl.exp(z - higher))
        most = higher
    lse = most + tl.log(total)
    tl.store(losses + row, lse - target)
    for start in range(0, size, BLOCK):
        place = start + tl.arange(0, BLOCK)
        z = _bent(tl.load(logits + place, mask=place < size, other=0.0), scale, cap, CAPPED)
        grad = tl.exp(z - lse) - tl.where(place == wanted, 1.0, 0.0)
        if CAPPED:
            grad *= 1 - (z / cap) * (z / cap)
        tl.store(logits + place, grad * weight, mask=place < size)
