"""Compute in float32 with half-precision weights, without a float32 copy of the whole model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from chatmill.train.memory import check_memory

HALF_DTYPES = (torch.bfloat16, torch.float16)
CAST_VALUES = 1 << 20
"""Number of weight values that are cast at a time if the input is smaller than the weight."""


class HalfLinear(nn.Linear):
    """A linear layer that casts its half-precision weight to the dtype of its input when used."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == self.weight.dtype or torch.is_autocast_enabled(x.device.type):
            return super().forward(x)
        return _CastLinear.apply(x, self.weight, self.bias)


class HalfEmbedding(nn.Embedding):
    """An embedding with a half-precision weight and float32 output."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids).float()


class _CastLinear(torch.autograd.Function):
    """Computes x Wᵀ + b in the dtype of x. Saves the weight, but not its cast copy, for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # Save the input only if the weight is trained, because only the weight's gradient needs it.
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        return _cast_product(x, weight, None if bias is None else bias.to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad
        rows = grad.flatten(0, -2)
        return (
            grad @ weight.to(grad.dtype) if for_x else None,
            (rows.T @ x.flatten(0, -2)).to(weight.dtype) if for_weight else None,
            rows.sum(0) if for_bias else None,
        )


def _cast_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute x Wᵀ + b in the dtype of x. If the input is smaller than the weight, cast a large weight part by part to
    save memory.
    """
    if x.numel() >= weight.numel() or weight.numel() <= CAST_VALUES:
        return F.linear(x, weight.to(x.dtype), bias)
    parts = weight.split(max(1, CAST_VALUES // weight.shape[1]))
    product = torch.cat([F.linear(x, part.to(x.dtype)) for part in parts], dim=-1)
    return product if bias is None else product + bias


def use_half_weights(model: nn.Module, compute: torch.dtype, place: str) -> None:
    """Prepare a model to compute in `compute` precision if its half-precision weights have another dtype.

    The weights of linear layers and embeddings keep their dtype. Other half-precision weights, such as norm weights,
    become float32. Weights that already have `compute` precision do not change.
    """
    linear = {nn.Linear: HalfLinear, nn.Embedding: HalfEmbedding}
    classes = linear | {half: half for half in linear.values()}
    others: dict[int, Tensor] = {}
    layers = []
    for module in model.modules():
        own = {**module._parameters, **module._buffers}
        tensors = {name: tensor for name, tensor in own.items() if is_half(tensor) and tensor.dtype != compute}
        if type(module) in classes and "weight" in tensors:
            layers.append(module)
            del tensors["weight"]
        others |= {id(tensor): tensor for tensor in tensors.values()}
    check_memory(sum(2 * tensor.numel() for tensor in others.values()), place, what="the model in float32")
    for tensor in others.values():
        tensor.data = tensor.data.float()
    for module in layers:
        # Skip a weight that is tied to another kind of layer, because it was converted to float32 above.
        if is_half(module.weight):
            module.__class__ = classes[type(module)]


def is_half(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.dtype in HALF_DTYPES


@contextmanager
def widened(model: nn.Module, blocks: Iterable[nn.Module]) -> Iterator[None]:
    """Make the model compute in float32 inside the `with` block. The weights of a block are converted only while the
    block runs.
    """
    narrow: dict[nn.Parameter, Tensor] = {}

    def widen(parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            if is_half(parameter):
                narrow[parameter] = parameter.data
                parameter.data = parameter.data.float()

    def restore(parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter in narrow:
                parameter.data = narrow.pop(parameter)

    hooks = []
    inside = {parameter for block in blocks for parameter in block.parameters()}
    try:
        for block in blocks:
            hooks.append(block.register_forward_pre_hook(lambda each, _: widen(each.parameters())))
            hooks.append(block.register_forward_hook(lambda each, *_: restore(each.parameters())))
        widen(parameter for parameter in model.parameters() if parameter not in inside)
        yield
    finally:
        for hook in hooks:
            hook.remove()
        restore(list(narrow))
