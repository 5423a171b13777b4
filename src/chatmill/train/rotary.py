"""Rotary position embeddings, and a fused GPU kernel that splits a joint QKV projection into rotated heads.

`split_heads` reads the projection once in the forward and once in the backward pass. Separate operations would read or
write the projection seven times. Layers compiled with torch.compile can call `split_heads`, because its kernels are
custom torch operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def rotations(positions: Tensor, size: int, theta: float) -> tuple[Tensor, Tensor]:
    """Return the cosines and signed sines of the rotary embedding, of shape (rows, length, 1, size), for these
    positions.
    """
    rates = theta ** (-torch.arange(0, size, 2, dtype=torch.float32, device=positions.device) / size)
    angles = positions[:, :, None, None].float() * rates
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding to the pairs (i, i + size / 2) of each head."""
    h = heads.float()
    return (h * cos + h.roll(h.shape[-1] // 2, dims=-1) * sin).to(heads.dtype)


def split_heads(
    qkv: Tensor, weights: tuple[Tensor, Tensor] | None, cos: Tensor, sin: Tensor, heads: list[int], eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Split a joint QKV projection of shape (rows, length, width) into queries, keys and values of shape (rows, length,
    heads, size).

    If norm weights are given in `weights`, queries and keys are normalized before they are rotated. `heads` contains
    the numbers of query, key and value heads. The tensors must be on a GPU.
    """
    q, k, v = _SplitHeads.apply(qkv, *(weights or (None, None)), cos, sin, heads, eps)
    return q, k, v


class _SplitHeads(torch.autograd.Function):
    """The autograd function of `split_heads`. The backward pass writes the gradients of queries, keys and values
    directly into the gradient of the projection.
    """

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
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(qkv, q_weight, k_weight, cos, sin)
        ctx.eps = eps
        q, k = rotated(qkv, q_weight, k_weight, cos, sin, heads[:2], eps)
        return q, k, qkv.unflatten(-1, (-1, cos.shape[-1]))[:, :, -heads[2] :]

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        return *split_backward([dq, dk[None], dv[None]], ctx.saved_tensors, ctx.eps), None, None, None, None


def split_backward(
    grads: list[Tensor], saved: Sequence[Tensor], eps: float
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of the QKV projection and of both norm weights; see `rotated_backward`."""
    qkv, q_weight, k_weight, cos, sin = saved
    grad, sums = rotated_backward(grads, qkv, q_weight, k_weight, cos, sin, eps)
    of_q, of_k = (
        None if weight is None else total.to(weight.dtype)
        for weight, total in zip((q_weight, k_weight), sums, strict=True)
    )
    return grad, of_q, of_k


# torch.compile calls custom operators without tracing into their kernels.


@torch.library.custom_op("chatmill::rotated", mutates_args=())
def rotated(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    heads: list[int],
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Return normalized and rotated queries and keys of shape (rows, length, heads, size). `heads` contains the numbers
    of query and key heads.
    """
    from chatmill.train.rotary_kernel import forward

    return forward(qkv.contiguous(), q_weight, k_weight, cos.contiguous(), sin.contiguous(), heads, eps)


@rotated.register_fake
def _(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    heads: list[int],
    eps: float,
) -> tuple[Tensor, Tensor]:
    rows, length, _ = qkv.shape
    q, k = (qkv.new_empty(rows, length, count, cos.shape[-1]) for count in heads)
    return q, k


@torch.library.custom_op("chatmill::rotated_backward", mutates_args=())
def rotated_backward(
    grads: list[Tensor],
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Compute the gradient of the QKV projection, and the gradients of both norm weights as a (2, size) tensor.

    The gradients of keys and values have the shape (parts, rows, length, heads, size) and are summed over `parts`.
    """
    from chatmill.train.rotary_kernel import backward

    parts = [grad.contiguous() for grad in grads]
    return backward(parts, qkv.contiguous(), q_weight, k_weight, cos.contiguous(), sin.contiguous(), eps)


@rotated_backward.register_fake
def _(
    grads: list[Tensor],
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(qkv), cos.new_empty(2, cos.shape[-1])
