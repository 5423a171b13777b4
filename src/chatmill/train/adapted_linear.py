"""Linear layers that add the output of their LoRA adapter in place, in the forward and the backward pass.

peft computes the outputs of the frozen layer and of its adapter as two tensors and adds them. In the backward pass,
peft adds two gradients of the input in the same way. In wide feed-forward layers, these additional tensors determine
the peak memory use.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from chatmill.train.half_weights import HalfLinear

PEFT_LAYERS = ("Linear", "Linear4bit")
"""peft layer classes whose forward pass is replaced."""


def use_adapted_linear(module: nn.Module) -> None:
    """Replace the forward pass of a peft layer that has exactly one standard LoRA adapter."""
    peft_class: Any = type(module)
    adapters = getattr(module, "lora_A", {})
    if peft_class.__name__ not in PEFT_LAYERS or len(adapters) != 1 or module.lora_variant:
        return
    ((name, first),) = adapters.items()
    if type(first) is nn.Linear and module.lora_B[name].bias is None:
        module.__class__ = _adapted(peft_class)


@cache
def _adapted(peft_class: Any) -> Any:
    # Use one class for all layers of a peft class, so that torch.compile compiles its forward pass only once.
    class AdaptedLinear(peft_class):
        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if args or kwargs or self.disable_adapters or self.merged:
                return super().forward(x, *args, **kwargs)
            (name,) = self.active_adapters
            first, second, scale = self.lora_A[name], self.lora_B[name], self.scaling[name]
            dropout, frozen = self.lora_dropout[name], _frozen_weight(self.base_layer)
            if frozen is None or not isinstance(dropout, nn.Identity):
                result = self.base_layer(x)
                low_rank = first(dropout(self._cast_input_dtype(x, first.weight.dtype)))
                # Scale the low-rank tensor, which is smaller than the result.
                return result + second(low_rank * scale).to(result.dtype)
            compute = _compute_dtype(x)
            a, b = first.weight.to(compute), second.weight.to(compute)
            result = _AdaptedProduct.apply(x.to(compute), a, b, scale, *frozen)
            return result if self.base_layer.bias is None else result + self.base_layer.bias.to(compute)

    return AdaptedLinear


def _frozen_weight(layer: Any) -> tuple[Any, ...] | None:
    """Return the weight of a frozen linear layer, or the components of a 4-bit weight; None for other layers."""
    if any(parameter.requires_grad for parameter in layer.parameters()):
        return None
    if type(layer) in (nn.Linear, HalfLinear):
        return (layer.weight,)
    return layer.packed_parts() if hasattr(layer, "packed_parts") else None


def _compute_dtype(x: Tensor) -> torch.dtype:
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


class _AdaptedProduct(torch.autograd.Function):
    """Computes x Wᵀ + s · (x Aᵀ) Bᵀ and the gradients of x, A and B. W is frozen and may be a 4-bit weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, b: Tensor, scale: float, weight: Tensor, *packed: Any) -> Tensor:
        rows = x.flatten(0, -2)
        low_rank = (rows @ a.T) * scale
        ctx.scale, ctx.parts = scale, len(packed)
        if packed:
            *scales, ctx.shape = packed
            ctx.save_for_backward(rows, low_rank, a, b, weight, *scales)
            result = packed_sum(rows, weight, *scales, list(ctx.shape), low_rank, b.T)
        else:
            ctx.save_for_backward(rows, low_rank, a, b, weight)
            result = sum_of_products(rows, weight.to(x.dtype).T, low_rank, b.T)
        return result.unflatten(0, x.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, low_rank, a, b, weight, *scales = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        for_low_rank = (rows @ b) * ctx.scale
        for_a, for_b = for_low_rank.T @ x, rows.T @ low_rank
        for_x = None
        if ctx.needs_input_grad[0]:
            weight = _unpacked(weight, *scales, shape=ctx.shape, dtype=grad.dtype) if scales else weight.to(grad.dtype)
            for_x = sum_of_products(rows, weight, for_low_rank, a).unflatten(0, grad.shape[:-1])
        return for_x, for_a, for_b, *(None for _ in range(2 + ctx.parts))


def _unpacked(*packed: Tensor, shape: Any, dtype: torch.dtype) -> Tensor:
    from chatmill.train.quantized import unpack

    return unpack(*packed, shape=shape, dtype=dtype)


# torch.compile does not trace custom operators. Without custom operators, torch.compile would compute the two products
# as separate tensors.
@torch.library.custom_op("chatmill::sum_of_products", mutates_args=())
def sum_of_products(x: Tensor, weight: Tensor, low_rank: Tensor, factor: Tensor) -> Tensor:
    """Compute x · weight + low_rank · factor without a second tensor of the result's size."""
    return (x @ weight).addmm_(low_rank, factor)


@sum_of_products.register_fake
def _(x: Tensor, weight: Tensor, low_rank: Tensor, factor: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@torch.library.custom_op("chatmill::packed_sum", mutates_args=())
def packed_sum(
    x: Tensor,
    packed: Tensor,
    scales: Tensor,
    scale: Tensor,
    code: Tensor,
    offset: Tensor,
    shape: list[int],
    low_rank: Tensor,
    factor: Tensor,
) -> Tensor:
    """Compute x · Wᵀ + low_rank · factor with a 4-bit W."""
    from chatmill.train.quantized import packed_product

    return packed_product(x, packed, scales, scale, code, offset, shape).addmm_(low_rank, factor)


@packed_sum.register_fake
def _(x: Tensor, *args: Any) -> Tensor:
    return x.new_empty(x.shape[0], args[-1].shape[1])
