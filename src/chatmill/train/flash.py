"""FlashAttention 4 for packed rows on Hopper GPUs; install it with `pip install 'chatmill[flash]'`.

The kernels receive the boundaries of all conversations, so tokens attend only within their own conversation. Layers
compiled with torch.compile can call `flash_attend`, because the kernels are wrapped in custom torch operators.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple
from warnings import warn

import torch
import torch.nn.functional as F
from torch import Tensor, are_deterministic_algorithms_enabled

from chatmill.train.loss import moved

PACKAGE = "flash-attn-4"
HOPPER = 9
"""Major compute capability of the GPUs on which the gradients were compared with those of plain attention."""
HEAD_SIZES = (32, 64, 96, 128)
"""Head sizes with correct gradients; in flash-attn-4 4.0.0b36, the gradients for sizes 8, 16, 48 and 80 are wrong."""
MAX_PARTS = 4
"""If at most this many query heads share a key head, the backward kernel is called once per query head. On an H200,
with heads of size 128, this is faster than a single call for 2 and 4 query heads, and slower for 7 and 8.
"""
FEWEST = 128
"""Minimum padded number of boundaries. The list of boundaries is padded to this length, or to a larger power of two,
because each new length recompiles the layers.
"""


class Bounds(NamedTuple):
    """The boundaries of conversations in the flattened tokens of a batch."""

    at: Tensor
    """int32: the index of the first token of each conversation, padded with the total number of tokens."""
    longest: int
    """Upper bound on the number of tokens in a conversation."""


def remember_bounds(segments: Tensor, host: Tensor) -> None:
    """Attach the segment boundaries to the tensor `segments` on the GPU. `host` is the same tensor on the CPU.

    Without attached boundaries, `bounds_of` would have to wait for the GPU before it can read the number of segments.
    """
    segments._chatmill_bounds = moved(_bounds(host), segments.device)


def bounds_of(segments: Tensor) -> Bounds:
    """Return the boundaries in a tensor of segment ids of shape (rows, length); the tokens of a segment must be
    contiguous.
    """
    at = getattr(segments, "_chatmill_bounds", None)
    return Bounds(_bounds(segments) if at is None else at, segments.shape[1])


def _bounds(segments: Tensor) -> Tensor:
    starts = segment_begins(segments).flatten().nonzero().squeeze(1).to(torch.int32)
    size = max(FEWEST, 1 << len(starts).bit_length())
    return F.pad(starts, (0, size + 1 - len(starts)), value=segments.numel())


def segment_begins(segments: Tensor) -> Tensor:
    """Return, for each token, whether it is the first token of its segment."""
    begins = torch.ones_like(segments, dtype=torch.bool)
    begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return begins


def is_usable(device: torch.device, head_size: int, dtype: torch.dtype | None) -> bool:
    """Whether FlashAttention 4 is installed, and supports this GPU, head size and precision."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != HOPPER:
        return False
    fits = dtype in (torch.bfloat16, torch.float16) and head_size in HEAD_SIZES
    return fits and _kernels() is not None


@cache
def _kernels() -> Any:
    try:
        installed = version(PACKAGE)
    except PackageNotFoundError:
        return None
    try:
        module = import_module("flash_attn.cute.interface")
        return module._flash_attn_fwd, module._flash_attn_bwd
    except (ImportError, AttributeError) as error:
        warn(f"{PACKAGE} {installed} cannot be used ({error}); using FlexAttention instead", stacklevel=2)
        return None


def flash_attend(q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, scale: float | None = None) -> Tensor:
    """Compute causal attention within conversations. The tensors have the shape (rows, length, heads, size); keys and
    values may have fewer heads than queries. Scores are multiplied by `scale`, by default 1 / √size.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out = _Flash.apply(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), *bounds, scale)
    return out.view(q.shape)


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, at: Tensor, longest: int, scale: float) -> Tensor:
        out, lse = flash(q, k, v, at, longest, scale)
        ctx.save_for_backward(q, k, v, out, lse, at)
        ctx.longest, ctx.scale = longest, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, at = ctx.saved_tensors
        dq, dk, dv = flash_backward(grad, q, k, v, out, lse, at, ctx.longest, ctx.scale)
        dk, dv = (part[0] if len(part) == 1 else part.sum(0) for part in (dk, dv))
        return dq, dk, dv, None, None, None


@torch.library.custom_op("chatmill::flash", mutates_args=())
def flash(q: Tensor, k: Tensor, v: Tensor, at: Tensor, longest: int, scale: float) -> tuple[Tensor, Tensor]:
    """Return the attention output of shape (tokens, heads, size), and the log-sum-exp of the scores of shape (heads,
    tokens).
    """
    forward, _ = _kernels()
    out, lse, *_ = forward(q, k, v, **_packed(at, longest, scale), return_lse=True)
    return out, lse


@flash.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, at: Tensor, longest: int, scale: float) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


@torch.library.custom_op("chatmill::flash_backward", mutates_args=())
def flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, at: Tensor, longest: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient of the queries, and partial gradients of keys and values of shape (parts, tokens, heads,
    size).

    The caller must sum the partial gradients over the first dimension. If query heads share a key head, the kernel adds
    up their gradients in float32 and converts the sums. If only a few query heads share a key head, it is faster to
    call the kernel separately for each of these query heads.
    """
    _, backward = _kernels()
    parts = _parts(q, k)
    dq, grad = q.new_empty(q.shape), grad.contiguous()
    dk, dv = (part.new_empty(parts, *part.shape) for part in (k, v))
    options = {**_packed(at, longest, scale), "deterministic": are_deterministic_algorithms_enabled()}
    for one in range(parts):
        each = slice(one, None, parts)
        given = q[:, each], k, v, out[:, each], grad[:, each], lse[each]
        backward(*given, **options, dq=dq[:, each], dk=dk[one], dv=dv[one])
    return dq, dk, dv


@flash_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, at: Tensor, longest: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    parts = _parts(q, k)
    return q.new_empty(q.shape), k.new_empty(parts, *k.shape), v.new_empty(parts, *v.shape)


def _parts(q: Tensor, k: Tensor) -> int:
    shared_by = q.shape[1] // k.shape[1]
    return shared_by if shared_by <= MAX_PARTS else 1


def _packed(at: Tensor, longest: int, scale: float) -> dict[str, Any]:
    lengths = {"max_seqlen_q": longest, "max_seqlen_k": longest}
    return {"cu_seqlens_q": at, "cu_seqlens_k": at, **lengths, "softmax_scale": scale, "causal": True}
