"""4-bit linear layers for QLoRA base models: bitsandbytes NF4 with double quantization.

transformers quantizes a model layer by layer while loading it, on a GPU if one is available. Matrix products run in the
autocast dtype or the dtype of the input. Dequantized weights are not kept for the backward pass.
"""

from __future__ import annotations

from typing import Any

import bitsandbytes as bnb
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

BLOCK, SCALE_BLOCK = 64, 256
"""Number of weights per scale, and number of scales per second-level scale."""


def nf4_config() -> Any:
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)


def use_nf4(lm: nn.Module) -> int:
    """Turn the 4-bit layers of a model into `NF4Linear`; return their number."""
    layers = [module for module in lm.modules() if type(module) is bnb.nn.Linear4bit]
    for module in layers:
        module.__class__ = NF4Linear
    return len(layers)


def dequantize(lm: Any, dtype: torch.dtype | None = None) -> None:
    """Dequantize a 4-bit model in place, layer by layer, and move it to the CPU.

    `dtype` is the dtype of the dequantized weights; None restores the dtype that the weights had before quantization.
    """
    for name, module in list(lm.named_modules()):
        if isinstance(module, bnb.nn.Linear4bit):
            weight = unpacked(module).to("cpu", dtype or module.weight.quant_state.dtype)
            with torch.device("meta"):
                if module.source_cls is nn.Linear:
                    plain = nn.Linear(module.in_features, module.out_features, bias=False)
                else:
                    # The original layer is a transformers Conv1D, whose weight is transposed.
                    plain, weight = module.source_cls(module.out_features, module.in_features), weight.T.contiguous()
            plain.weight = nn.Parameter(weight, requires_grad=False)
            plain.bias = module.bias
            lm.set_submodule(name, plain)
    lm.hf_quantizer.remove_quantization_config(lm)
    lm.is_loaded_in_4bit = False
    lm.to("cpu")


class NF4Linear(bnb.nn.Linear4bit):
    """A frozen linear layer with a 4-bit weight."""

    def forward(self, x: Tensor) -> Tensor:
        device = x.device.type
        compute = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        y = _PackedProduct.apply(x.to(compute), *self.packed_parts())
        return y if self.bias is None else y + self.bias.to(compute)

    def packed_parts(self) -> tuple[Any, ...]:
        """Return the arguments of `unpack`: the packed weight, its scales, and its shape."""
        return _parts(self)


def _parts(layer: bnb.nn.Linear4bit) -> tuple[Any, ...]:
    state = layer.weight.quant_state
    scales = state.absmax, state.state2.absmax, state.state2.code, state.offset
    return layer.weight, *scales, (layer.out_features, layer.in_features)


def unpacked(layer: bnb.nn.Linear4bit) -> Tensor:
    """Return the dequantized weight of a 4-bit layer, in float32."""
    packed, *scales, shape = _parts(layer)
    return unpack(packed.data, *scales, shape=shape, dtype=torch.float32)


class _PackedProduct(torch.autograd.Function):
    """Computes x Wᵀ in the precision of x, and keeps only the packed weight for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, packed: Tensor, scales: Tensor, scale: Tensor, code: Tensor, offset: Tensor, shape: Any
    ) -> Tensor:
        ctx.save_for_backward(packed, scales, scale, code, offset)
        ctx.shape = shape
        return packed_product(x, packed, scales, scale, code, offset, shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight = unpack(*ctx.saved_tensors, shape=ctx.shape, dtype=grad.dtype)
        return grad @ weight, None, None, None, None, None, None


def packed_product(
    x: Tensor, packed: Tensor, scales: Tensor, scale: Tensor, code: Tensor, offset: Tensor, shape: Any
) -> Tensor:
    """Compute x Wᵀ with a packed W."""
    # With `unpack` and a matmul instead of one fused operator, torch.compile would keep the dequantized weight for the
    # backward pass.
    return torch.ops.bitsandbytes.gemm_4bit.default(
        x, packed, shape, scale, BLOCK, "nf4", absmax_8bit=scales, absmax_code=code, absmax_offset=offset
    )


def unpack(
    packed: Tensor, scales: Tensor, scale: Tensor, code: Tensor, offset: Tensor, *, shape: Any, dtype: torch.dtype
) -> Tensor:
    ops = torch.ops.bitsandbytes
    absmax = ops.dequantize_blockwise.default(scales, scale, code, SCALE_BLOCK, torch.float32) + offset
    return ops.dequantize_4bit.default(packed, absmax, BLOCK, "nf4", shape, dtype)
