"""Train linear layers with float8 matrix products, using torchao, on GPUs that support float8.

Each matrix product scales its operands by their largest absolute value and rounds them to float8, in the forward and
the backward pass. The output of a layer has the dtype of the hidden states. Parameters keep their names and dtypes, and
the output head is not converted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from chatmill.errors import UsageError
from chatmill.train.model import CausalModel
from chatmill.train.quiet import quiet_logs

MULTIPLE = 16
"""Every dimension of a float8 matrix product must be a multiple of this number."""
CAPABILITY = (8, 9)
"""Lowest CUDA compute capability that supports float8 matrix products."""
RECIPE = "tensorwise"
"""torchao's fastest recipe: one scale per tensor."""


def check_float8(device: torch.device, *, block_size: int) -> None:
    """Raise `UsageError` if the device does not support float8 matrix products or `block_size` is not a multiple of
    16.
    """
    where = "a CPU"
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        where = f"{torch.cuda.get_device_name(device)} (compute capability {'.'.join(map(str, capability))})"
    if device.type != "cuda" or capability < CAPABILITY:
        raise UsageError(
            f"fp8 is true, and the device is {where}; float8 requires a GPU of compute capability "
            f"{'.'.join(map(str, CAPABILITY))} or higher (Ada, Hopper, Blackwell); set fp8 to false"
        )
    if block_size % MULTIPLE:
        raise UsageError(f"fp8 is true and block_size is {block_size}; float8 requires a multiple of {MULTIPLE}")
    _torchao()


def use_float8(model: CausalModel, *, emulate: bool = False) -> None:
    """Replace the linear layers of all transformer blocks with float8 layers that have the same weights.

    With `emulate`, values are rounded to float8 but multiplied in the precision of the input. Emulation works on any
    device.
    """
    float8 = _torchao()
    blocks = model.blocks()
    if not getattr(model, "separates", True):
        raise UsageError(
            "fp8 is true, and this architecture cannot separate packed conversations, so row lengths vary; float8 "
            "requires rows of a fixed length; set fp8 to false"
        )
    for name, module in blocks[0].named_modules():
        if isinstance(module, nn.Linear) and (module.in_features % MULTIPLE or module.out_features % MULTIPLE):
            raise UsageError(
                f"fp8 is true, and layer {name} is {module.in_features} × {module.out_features}; "
                f"float8 requires multiples of {MULTIPLE}; set fp8 to false"
            )
    if emulate:
        config = float8.Float8LinearConfig(emulate=True)
    else:
        config = float8.Float8LinearConfig.from_recipe_name(RECIPE)
    for block in blocks:
        with quiet_logs():
            float8.convert_to_float8_training(block, config=config)


def _torchao() -> Any:
    try:
        with quiet_logs():
            import torchao.float8
    except ImportError:
        raise UsageError("fp8 is true, which requires torchao; pip install 'chatmill[lowbit]'") from None
    return torchao.float8
