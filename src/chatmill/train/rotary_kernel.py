"""Triton kernels for RMSNorm and rotary embedding of queries and keys. One program processes all heads of a token.

The two halves of each head, which the rotary embedding mixes, are loaded as two tiles (heads, size / 2). Import this
module only on a machine with a GPU, because only CUDA builds of torch include triton.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

WARPS = 4
PROGRAMS = 6
"""Number of kernel programs per multiprocessor in the backward pass; each program sums the norm-weight gradients of its
tokens.
"""


def forward(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    heads: Sequence[int],
    eps: float,
) -> tuple[Tensor, Tensor]:
    rows, length, width = qkv.shape
    q, k = (qkv.new_empty(rows, length, count, cos.shape[-1]) for count in heads)
    norm = (qkv, qkv) if q_weight is None or k_weight is None else (q_weight, k_weight)
    _forward[(rows * length,)](
        qkv, *norm, cos, sin, q, k, *heads, eps, width, NORM=q_weight is not None, **_shape(q, k)
    )
    return q, k


def backward(
    grads: Sequence[Tensor],
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    q, k, v = grads
    tokens, n_q, n_kv, size = q.shape[0] * q.shape[1], q.shape[2], k.shape[2], q.shape[3]
    grad = torch.empty_like(qkv)
    programs = min(tokens, PROGRAMS * torch.cuda.get_device_properties(qkv.device).multi_processor_count)
    sums = torch.zeros(programs, 2, size, dtype=torch.float32, device=qkv.device)
    norm = (qkv, qkv) if q_weight is None or k_weight is None else (q_weight, k_weight)
    _backward[(programs,)](
        *(q, k, v, qkv, *norm, cos, sin, grad, sums, tokens, n_q, n_kv, eps, qkv.shape[-1]),
        ROUNDS=triton.cdiv(tokens, programs),
        NORM=q_weight is not None,
        VALUES=triton.next_power_of_2(n_kv * size),
        **_shape(q, k),
    )
    return grad, sums.sum(0)


def _shape(q: Tensor, k: Tensor) -> dict[str, int]:
    n_q, n_kv, size = q.shape[2], k.shape[2], q.shape[3]
    powers = {"HEADS": triton.next_power_of_2(n_q + n_kv), "HALF": triton.next_power_of_2(size // 2)}
    return {**powers, "SIZE": size, "num_warps": WARPS}


@triton.jit
def _forward(
    qkv, q_weight, k_weight, cos, sin, q, k, n_q, n_kv, eps, width,
    NORM: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head, place = tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None, :]
    paired = place < SIZE // 2
    of_q, of_k = (head < n_q) & paired, (head >= n_q) & (head < n_q + n_kv) & paired
    at = head * SIZE + place
    row = qkv + token * width
    a = tl.load(row + at, mask=of_q | of_k, other=0.0).to(tl.float32)
    b = tl.load(row + at + SIZE // 2, mask=of_q | of_k, other=0.0).to(tl.float32)
    c = tl.load(cos + token * SIZE + place, mask=paired, other=0.0)
    s = tl.load(sin + token * SIZE + SIZE // 2 + place, mask=paired, other=0.0)
    if NORM:
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / SIZE + eps)[:, None]
        a = a * scale * _weights(q_weight, k_weight, of_q, place, paired)
        b = b * scale * _weights(q_weight + SIZE // 2, k_weight + SIZE // 2, of_q, place, paired)
    x, y = a * c - b * s, b * c + a * s
    queries, keys = q + token * n_q * SIZE, k + (token * n_kv - n_q) * SIZE
    tl.store(queries + at, x, mask=of_q)
    tl.store(queries + at + SIZE // 2, y, mask=of_q)
    tl.store(keys + at, x, mask=of_k)
    tl.store(keys + at + SIZE // 2, y, mask=of_k)


@triton.jit
def _backward(
    dq, dk, dv, qkv, q_weight, k_weight, cos, sin, grad, sums, tokens, n_q, n_kv, eps, width,
    ROUNDS: tl.constexpr, NORM: tl.constexpr, HEADS: tl.constexpr, VALUES: tl.constexpr, SIZE: tl.constexpr,
    HALF: tl.constexpr,
):  # fmt: skip
    head, place = tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None, :]
    paired = place < SIZE // 2
    is_q, is_k = (head < n_q) & paired, (head >= n_q) & (head < n_q + n_kv) & paired
    at = head * SIZE + place
    value = tl.arange(0, VALUES)
    if NORM:
        weight_a = _weights(q_weight, k_weight, is_q, place, paired)
        weight_b = _weights(q_weight + SIZE // 2, k_weight + SIZE // 2, is_q, place, paired)
        sum_a, sum_b = tl.zeros([HEADS, HALF], tl.float32), tl.zeros([HEADS, HALF], tl.float32)
    for number in range(ROUNDS):
        token = (tl.program_id(0) + number * tl.num_programs(0)).to(tl.int64)
        there = token < tokens
        of_q, of_k = is_q & there, is_k & there
        queries, keys = dq + token * n_q * SIZE, dk + (token * n_kv - n_q) * SIZE
        x = tl.load(queries + at, mask=of_q, other=0.0).to(tl.float32)
        x += tl.load(keys + at, mask=of_k, other=0.0).to(tl.float32)
        y = tl.load(queries + at + SIZE // 2, mask=of_q, other=0.0).to(tl.float32)
        y += tl.load(keys + at + SIZE // 2, mask=of_k, other=0.0).to(tl.float32)
        c = tl.load(cos + token * SIZE + place, mask=paired & there, other=0.0)
        s = tl.load(sin + token * SIZE + SIZE // 2 + place, mask=paired & there, other=0.0)
        a_grad, b_grad = x * c + y * s, y * c - x * s
        row, out = qkv + token * width, grad + token * width
        if NORM:
            a = tl.load(row + at, mask=of_q | of_k, other=0.0).to(tl.float32)
            b = tl.load(row + at + SIZE // 2, mask=of_q | of_k, other=0.0).to(tl.float32)
            scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / SIZE + eps)[:, None]
            a, b = a * scale, b * scale
            sum_a += a_grad * a
            sum_b += b_grad * b
            a_grad, b_grad = a_grad * weight_a, b_grad * weight_b
            mean = ((tl.sum(a_grad * a, 1) + tl.sum(b_grad * b, 1)) / SIZE)[:, None]
            a_grad, b_grad = scale * (a_grad - a * mean), scale * (b_grad - b * mean)
        tl.store(out + at, a_grad, mask=of_q | of_k)
        tl.store(out + at + SIZE // 2, b_grad, mask=of_q | of_k)
        inside = (value < n_kv * SIZE) & there
        read = tl.load(dv + token * n_kv * SIZE + value, mask=inside, other=0.0)
        tl.store(out + (n_q + n_kv) * SIZE + value, read, mask=inside)
    if NORM:
        mine = sums + tl.program_id(0) * 2 * SIZE
        column = tl.arange(0, HALF)
        half = column < SIZE // 2
        tl.store(mine + column, tl.sum(tl.where(is_q, sum_a, 0.0), 0), mask=half)
        tl.store(mine + SIZE // 2 + column, tl.sum(tl.where(is_q, sum_b, 0.0), 0), mask=half)
        tl.store(mine + SIZE + column, tl.sum(tl.where(is_k, sum_a, 0.0), 0), mask=half)
        tl.store(mine + SIZE + SIZE // 2 + column, tl.sum(tl.where(is_k, sum_b, 0.0), 0), mask=half)


@triton.jit
def _weights(q_weight, k_weight, of_q, place, paired):
    q_part = tl.load(q_weight + place, mask=paired, other=0.0).to(tl.float32)
    k_part = tl.load(k_weight + place, mask=paired, other=0.0).to(tl.float32)
    return tl.where(of_q, q_part, k_part)
