"""Triton kernels for RMSNorm and rotary embedding of queries and keys.

Each kernel program processes a few heads of a few tokens. The two halves of each head, which the rotary embedding
mixes, are loaded as two tiles of shape (tokens x heads, head size / 2). A tile contains only query heads, only key
heads or only value heads. Import this module only on a machine with a GPU, because only CUDA builds of torch include
triton.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

WARPS = 4
MAX_GROUP = 8
"""Maximum number of heads per program."""
TOKENS = 2
"""Number of tokens that a program processes at a time."""
PROGRAMS = 8
"""Number of kernel programs per multiprocessor and group in the backward pass; each program sums the norm-weight
gradients of its tokens.
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
    n_q, n_kv = heads
    q, k = (qkv.new_empty(rows, length, count, cos.shape[-1]) for count in heads)
    norm = (qkv, qkv) if q_weight is None or k_weight is None else (q_weight, k_weight)
    shape = _shape(q, k)
    _forward[(triton.cdiv(rows * length, TOKENS), (n_q + n_kv) // shape["GROUP"])](
        *(qkv, *norm, cos, sin, q, k, rows * length, n_q, n_kv, eps, width),
        NORM=q_weight is not None,
        TOKENS=TOKENS,
        **shape,
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
    parts, tokens, n_q, n_kv, size = len(k), q.shape[0] * q.shape[1], q.shape[2], k.shape[-2], q.shape[3]
    grad = torch.empty_like(qkv)
    shape = _shape(q, k)
    of_q, of_k = n_q // shape["GROUP"], n_kv // shape["GROUP"]
    most = PROGRAMS * torch.cuda.get_device_properties(qkv.device).multi_processor_count
    programs = min(triton.cdiv(tokens, TOKENS), most)
    sums = torch.empty(of_q + of_k, programs, size, dtype=torch.float32, device=qkv.device)
    norm = (qkv, qkv) if q_weight is None or k_weight is None else (q_weight, k_weight)
    _backward[(programs, of_q + 2 * of_k)](
        *(q, k, v, qkv, *norm, cos, sin, grad, sums, tokens, n_q, n_kv, eps, qkv.shape[-1]),
        ROUNDS=triton.cdiv(tokens, programs * TOKENS),
        PARTS=parts,
        NORM=q_weight is not None,
        TOKENS=TOKENS,
        **shape,
    )
    totals = sums.new_empty(2, size)
    for some, total in zip((sums[:of_q], sums[of_q:]), totals, strict=True):
        torch.sum(some, (0, 1), out=total)
    return grad, totals


def _shape(q: Tensor, k: Tensor) -> dict[str, int]:
    n_q, n_kv, size = q.shape[-2], k.shape[-2], q.shape[-1]
    # The largest power of two that divides both numbers of heads.
    group = min(n_q & -n_q, n_kv & -n_kv, MAX_GROUP)
    return {"GROUP": group, "SIZE": size, "HALF": triton.next_power_of_2(size // 2), "num_warps": WARPS}


@triton.jit
def _forward(
    qkv, q_weight, k_weight, cos, sin, q, k, tokens, n_q, n_kv, eps, width,
    NORM: tl.constexpr, TOKENS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1) * GROUP
    if head < n_q:
        out, weight, step = q + head * SIZE, q_weight, n_q * SIZE
    else:
        out, weight, step = k + (head - n_q) * SIZE, k_weight, n_kv * SIZE
    row, place = tl.arange(0, TOKENS * GROUP)[:, None], tl.arange(0, HALF)[None, :]
    token = tl.program_id(0).to(tl.int64) * TOKENS + row // GROUP
    there = (token < tokens) & (place < SIZE // 2)
    within = (row % GROUP) * SIZE + place
    source = qkv + token * width + head * SIZE + within
    a = tl.load(source, mask=there, other=0.0).to(tl.float32)
    b = tl.load(source + SIZE // 2, mask=there, other=0.0).to(tl.float32)
    c = tl.load(cos + token * SIZE + place, mask=there, other=0.0)
    s = tl.load(sin + token * SIZE + SIZE // 2 + place, mask=there, other=0.0)
    if NORM:
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / SIZE + eps)[:, None]
        a = a * scale * _half(weight, place, SIZE)
        b = b * scale * _half(weight + SIZE // 2, place, SIZE)
    to = out + token * step + within
    tl.store(to, a * c - b * s, mask=there)
    tl.store(to + SIZE // 2, b * c + a * s, mask=there)


@triton.jit
def _backward(
    dq, dk, dv, qkv, q_weight, k_weight, cos, sin, grad, sums, tokens, n_q, n_kv, eps, width,
    ROUNDS: tl.constexpr, PARTS: tl.constexpr, NORM: tl.constexpr, TOKENS: tl.constexpr, GROUP: tl.constexpr,
    SIZE: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1) * GROUP
    if head < n_q:
        source, weight, step = dq + head * SIZE, q_weight, n_q * SIZE
    elif head < n_q + n_kv:
        source, weight, step = dk + (head - n_q) * SIZE, k_weight, n_kv * SIZE
    else:
        source, weight, step = dv + (head - n_q - n_kv) * SIZE, k_weight, n_kv * SIZE
    row, place = tl.arange(0, TOKENS * GROUP)[:, None], tl.arange(0, HALF)[None, :]
    within, paired = (row % GROUP) * SIZE + place, place < SIZE // 2
    if head < n_q + n_kv:
        if NORM:
            weight_a, weight_b = _half(weight, place, SIZE), _half(weight + SIZE // 2, place, SIZE)
            sum_a = tl.zeros([TOKENS * GROUP, HALF], tl.float32)
            sum_b = tl.zeros([TOKENS * GROUP, HALF], tl.float32)
        for number in range(ROUNDS):
            token = (tl.program_id(0) + number * tl.num_programs(0)).to(tl.int64) * TOKENS + row // GROUP
            there = (token < tokens) & paired
            x = tl.load(source + token * step + within, mask=there, other=0.0).to(tl.float32)
            y = tl.load(source + token * step + within + SIZE // 2, mask=there, other=0.0).to(tl.float32)
            for part in tl.static_range(1, PARTS):
                # Only the gradients of keys come in parts.
                more, also = there & (head >= n_q), source + (token + part * tokens) * step + within
                x += tl.load(also, mask=more, other=0.0).to(tl.float32)
                y += tl.load(also + SIZE // 2, mask=more, other=0.0).to(tl.float32)
            c = tl.load(cos + token * SIZE + place, mask=there, other=0.0)
            s = tl.load(sin + token * SIZE + SIZE // 2 + place, mask=there, other=0.0)
            a_grad, b_grad = x * c + y * s, y * c - x * s
            at = token * width + head * SIZE + within
            if NORM:
                a = tl.load(qkv + at, mask=there, other=0.0).to(tl.float32)
                b = tl.load(qkv + at + SIZE // 2, mask=there, other=0.0).to(tl.float32)
                scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / SIZE + eps)[:, None]
                a, b = a * scale, b * scale
                sum_a += a_grad * a
                sum_b += b_grad * b
                a_grad, b_grad = a_grad * weight_a, b_grad * weight_b
                mean = ((tl.sum(a_grad * a, 1) + tl.sum(b_grad * b, 1)) / SIZE)[:, None]
                a_grad, b_grad = scale * (a_grad - a * mean), scale * (b_grad - b * mean)
            tl.store(grad + at, a_grad, mask=there)
            tl.store(grad + at + SIZE // 2, b_grad, mask=there)
        if NORM:
            mine = sums + (tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)) * SIZE
            column = tl.arange(0, HALF)
            tl.store(mine + column, tl.sum(sum_a, 0), mask=column < SIZE // 2)
            tl.store(mine + SIZE // 2 + column, tl.sum(sum_b, 0), mask=column < SIZE // 2)
    else:
        # The gradients of values need no rotation.
        for number in range(ROUNDS):
            token = (tl.program_id(0) + number * tl.num_programs(0)).to(tl.int64) * TOKENS + row // GROUP
            there = (token < tokens) & paired
            at = token * width + head * SIZE + within
            for half in tl.static_range(2):
                own = source + within + half * (SIZE // 2)
                total = tl.load(own + token * step, mask=there, other=0.0).to(tl.float32)
                for part in tl.static_range(1, PARTS):
                    total += tl.load(own + (token + part * tokens) * step, mask=there, other=0.0).to(tl.float32)
                tl.store(grad + at + half * (SIZE // 2), total, mask=there)


@triton.jit
def _half(weight, place, SIZE: tl.constexpr):
    return tl.load(weight + place, mask=place < SIZE // 2, other=0.0).to(tl.float32)
