"""AdamW for bfloat16 weights with stochastic rounding, and bfloat16 or 8-bit moments.

The optimizer computes each update in float32 and rounds it once. A weight between two bfloat16 numbers is rounded to
one of them at random, with probabilities that preserve its expected value. Stochastic rounding therefore does not
lose small updates.

8-bit moments are indices into a lookup table, with one scale per block of a row (Dettmers et al., arXiv 2110.02861). An
8-bit second moment is stored as its square root, which has the same range as the gradients and does not underflow.

On a GPU, the update is compiled to one kernel per parameter, without a float32 copy of the parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from chatmill.train.distributed import local

BLOCK = 256
"""Maximum number of values per scale; all values with the same scale belong to one row of the parameter."""
SMALLEST_BLOCK = 32
FEWEST = 4096
"""Parameters with fewer values than this have bfloat16 moments."""
CHUNK = 1 << 20
"""Number of values per chunk in an update that is not compiled."""
DECADES = 7
"""The 8-bit codes cover magnitudes from 1 down to 10^-7."""
TINY = 1e-30


class LowPrecisionAdamW(torch.optim.Optimizer):
    """AdamW for bfloat16 weights; float32 weights are not rounded.

    Stochastic rounding uses torch's default generator, so ranks with replicated weights must use the same seed.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float = 0.0,
        eight_bit: bool,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.eight_bit = eight_bit

    def fresh_state(self, parameter: Tensor) -> dict[str, Tensor]:
        step = torch.tensor(0.0)
        size = _block_size(parameter) if self.eight_bit else 0
        if not size:
            moments = (_zeros(parameter, torch.bfloat16) for _ in range(2))
            return {"step": step, **dict(zip(("exp_avg", "exp_avg_sq"), moments, strict=True))}
        codes = (_zeros(parameter, torch.uint8) for _ in range(2))
        # Slice the parameter, so that the scales are sharded by rows like the parameter.
        like = parameter.detach()[..., : parameter.shape[-1] // size]
        scales = (_zeros(like, torch.float32) for _ in range(2))
        kinds = "exp_avg", "exp_avg_rms", "exp_avg_scale", "exp_avg_rms_scale"
        return {"step": step, **dict(zip(kinds, (*codes, *scales), strict=True))}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Take one optimizer step; the learning rate of a parameter group must be a float."""
        for group in self.param_groups:
            numbers: dict[float, Tensor] = {}
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state.update(self.fresh_state(parameter))
                state["step"] += 1
                count = float(state["step"])
                if count not in numbers:
                    numbers[count] = _numbers(group, count, local(parameter).device)
                _update(parameter, state, numbers[count], compiled=parameter.device.type == "cuda")


def _zeros(like: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros_like(like, dtype=dtype, memory_format=torch.contiguous_format)


def _block_size(parameter: Tensor) -> int:
    """Return the number of values that share a scale, or 0 if the moments of this parameter are bfloat16."""
    size = math.gcd(parameter.shape[-1], BLOCK) if parameter.ndim >= 2 else 0
    return size if size >= SMALLEST_BLOCK and parameter.numel() >= FEWEST else 0


def _numbers(group: dict[str, Any], count: float, device: torch.device) -> Tensor:
    """Return the scalars of an AdamW step as a tensor, because torch.compile treats Python floats as constants."""
    lr, (beta1, beta2) = group["lr"], group["betas"]
    corrected = lr / (1 - beta1**count), 1 / math.sqrt(1 - beta2**count)
    numbers = torch.tensor([1 - lr * group["weight_decay"], beta1, beta2, *corrected, group["eps"]])
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers


def _update(parameter: Tensor, state: dict[str, Tensor], numbers: Tensor, *, compiled: bool) -> None:
    weight, moments = local(parameter.detach()), [local(tensor) for kind, tensor in state.items() if kind != "step"]
    if not weight.numel():
        return
    shape: tuple[int, ...] = (-1,)
    update: Callable[..., None] = _update_bf16
    tables: tuple[Tensor, ...] = ()
    if len(moments) > 2:
        shape, update, tables = (-1, _block_size(parameter)), _update_8bit, _tables(weight.device)
        moments[2:] = [scale.view(-1, 1) for scale in moments[2:]]
    flat = weight.contiguous()
    tensors = [flat.view(shape), local(parameter.grad).reshape(shape)]
    tensors += [moment.view(shape) for moment in moments[:2]] + moments[2:]
    if compiled:
        # Mark the block size as static, because only the number of blocks varies. Raise the recompile limit, because
        # torch's default is too low for the number of different block counts.
        for tensor in tensors if len(shape) > 1 else ():
            torch._dynamo.mark_static(tensor, 1)
        with torch._dynamo.config.patch(recompile_limit=64):
            _compiled(update)(*tensors, numbers, *tables)
    else:
        rows = max(1, CHUNK // math.prod(tensors[0].shape[1:]))
        for start in range(0, len(tensors[0]), rows):
            update(*(tensor[start : start + rows] for tensor in tensors), numbers, *tables)
    if not weight.is_contiguous():
        weight.copy_(flat)


@cache
def _compiled(update: Callable[..., None]) -> Callable[..., None]:
    return torch.compile(update, fullgraph=True)


def _update_bf16(weight: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, numbers: Tensor) -> None:
    bits = _random_bits(weight)
    new, mean, square = _adamw(weight, grad, exp_avg.float(), exp_avg_sq.float(), numbers)
    exp_avg.copy_(mean)
    # With beta2 near 1, the second moment often changes by less than half a unit in the last place per step. Round
    # the second moment stochastically, because rounding to nearest would undo such small changes.
    exp_avg_sq.copy_(_rounded(square, bits >> 14))
    weight.copy_(new if weight.dtype == torch.float32 else _rounded(new, bits))


def _update_8bit(
    weight: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_rms: Tensor,
    exp_avg_scale: Tensor,
    exp_avg_rms_scale: Tensor,
    numbers: Tensor,
    signed: Tensor,
    signed_edges: Tensor,
    unsigned: Tensor,
    unsigned_edges: Tensor,
) -> None:
    bits = _random_bits(weight)
    mean = signed[exp_avg.int()] * exp_avg_scale
    root = unsigned[exp_avg_rms.int()] * exp_avg_rms_scale
    new, mean, square = _adamw(weight, grad, mean, root * root, numbers)
    root = square.sqrt()
    for values, codes, scale, edges in (
        (mean, exp_avg, exp_avg_scale, signed_edges),
        (root, exp_avg_rms, exp_avg_rms_scale, unsigned_edges),
    ):
        largest = values.abs().amax(-1, keepdim=True).clamp(min=TINY)
        codes.copy_(_codes(values / largest, edges))
        scale.copy_(largest)
    weight.copy_(new if weight.dtype == torch.float32 else _rounded(new, bits))


def _adamw(
    weight: Tensor, grad: Tensor, mean: Tensor, square: Tensor, numbers: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the new weight and moments after one AdamW step, in float32."""
    kept, beta1, beta2, lr, root_scale, eps = numbers.unbind()
    g = grad.float()
    mean = mean + (g - mean) * (1 - beta1)
    square = square + (g * g - square) * (1 - beta2)
    return weight.float() * kept - lr * mean / (square.sqrt() * root_scale + eps), mean, square


def _random_bits(like: Tensor) -> Tensor:
    return torch.randint(0, 1 << 30, like.shape, dtype=torch.int32, device=like.device)


def _rounded(values: Tensor, bits: Tensor) -> Tensor:
    """Round float32 values stochastically to bfloat16, with the lowest 16 bits of `bits` as random numbers."""
    # bfloat16 is the upper half of a float32, so a carry out of the lower half rounds away from zero.
    rounded = ((values.view(torch.int32) + (bits & 0xFFFF)) & -0x10000).view(torch.float32)
    # Keep NaN: adding random bits to the NaN that GPUs produce would overflow to -0.
    return torch.where(values.isnan(), values, rounded).bfloat16()


def _codes(values: Tensor, edges: Tensor) -> Tensor:
    """Return the 8-bit code of each value: the index of the last edge at or below the value."""
    if not torch.compiler.is_compiling():
        return torch.bucketize(values, edges[1:], out_int32=True, right=True).to(torch.uint8)
    # Use a binary search with table lookups, which torch.compile fuses into the kernel.
    codes = torch.zeros_like(values, dtype=torch.int32)
    for bit in (128, 64, 32, 16, 8, 4, 2, 1):
        codes = codes + torch.where(values >= edges[codes + bit], bit, 0)
    return codes.to(torch.uint8)


@cache
def _tables(device: torch.device) -> tuple[Tensor, ...]:
    """Return the values of all 8-bit codes and the edges between these values, for signed and unsigned moments."""
    tables = []
    for is_signed in (True, False):
        levels = code_levels(is_signed=is_signed)
        edges = torch.cat([levels[:1], (levels[1:] + levels[:-1]) / 2])
        if not is_signed:
            # Do not round small values to zero, because the update divides by the square root of the second moment.
            edges[1] = TINY
        tables += [levels.to(device), edges.to(device)]
    return tuple(tables)


def code_levels(*, is_signed: bool) -> Tensor:
    """Return the values of the 256 8-bit codes as float32, in ascending order; the largest value is 1.

    Each decade has twice as many values as the decade below, as in the dynamic data type of arXiv 1511.04561.
    """
    positive = []
    for decade in range(DECADES):
        edges = torch.linspace(0.1, 1, 2**decade * (1 if is_signed else 2) + 1, dtype=torch.float64)
        positive.append((edges[1:] + edges[:-1]) / 2 * 10.0 ** (decade - DECADES + 1))
    levels = torch.cat([*positive, torch.tensor([0.0, 1.0], dtype=torch.float64)])
    if is_signed:
        levels = torch.cat([levels, *(-values for values in positive)])
    return levels.sort().values.float()
