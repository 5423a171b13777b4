"""FlashAttention 4 over a joint QKV projection, as one autograd function.

`flash_backward` returns partial gradients of keys and values. The kernel that computes the gradient of the projection
adds up these partial gradients, so their sum is never stored as a separate tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from chatmill.train.flash import Bounds, flash, flash_backward
from chatmill.train.rotary import rotated, split_backward


def flash_heads(
    qkv: Tensor,
    weights: tuple[Tensor, Tensor] | None,
    cos: Tensor,
    sin: Tensor,
    heads: list[int],
    eps: float,
    bounds: Bounds,
) -> Tensor:
    """Return the attention output, of shape (rows, length, heads, size), for the projected queries, keys and values in
    `qkv`.
    """
    return _FlashHeads.apply(qkv, *(weights or (None, None)), cos, sin, heads, eps, *bounds)


class _FlashHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        heads: list[int],
        eps: float,
        at: Tensor,
        longest: int,
    ) -> Tensor:
        size = cos.shape[-1]
        q, k = rotated(qkv, q_weight, k_weight, cos, sin, heads[:2], eps)
        v = qkv.unflatten(-1, (-1, size))[:, :, -heads[2] :]
        out, lse = flash(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), at, longest, size**-0.5)
        ctx.save_for_backward(qkv, q_weight, k_weight, cos, sin, q, k, out, lse, at)
        ctx.eps, ctx.longest, ctx.value_heads = eps, longest, heads[2]
        return out.view(q.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *split, q, k, out, lse, at = ctx.saved_tensors
        qkv, size = split[0], q.shape[-1]
        v = qkv.unflatten(-1, (-1, size))[:, :, -ctx.value_heads :]
        flat = (part.flatten(0, 1) for part in (grad, q, k, v))
        dq, dk, dv = flash_backward(*flat, out, lse, at, ctx.longest, size**-0.5)
        grads = [part.unflatten(-3, qkv.shape[:2]) for part in (dq, dk, dv)]
        return *split_backward(grads, split, ctx.eps), *[None] * 6
