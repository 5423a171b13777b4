"""The optimizers that a config can select, their state, and their memory use.

adamw        float32 weights and moments; fused
adamw8bit    bfloat16 weights with stochastic rounding, 8-bit moments
adamw_bf16   bfloat16 weights with stochastic rounding, bfloat16 moments
adafactor    float32 weights, factored second moment (row and column means)
muon         float32 weights; Muon for the weight matrices of the layers, AdamW for all other parameters
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from chatmill.errors import UsageError
from chatmill.train.low_precision import LowPrecisionAdamW
from chatmill.train.model import CausalModel, WeightPrecision, usable_precision
from chatmill.train.run_config import OptimizerConfig


class OptimizerBytes(NamedTuple):
    """Memory use per trained parameter, in bytes."""

    weight: int
    """Bytes of the weight; the gradient has the same size."""
    state: int

    @property
    def total(self) -> int:
        """Bytes of weight, gradient and optimizer state together."""
        return 2 * self.weight + self.state


OPTIMIZER_BYTES = {
    "adamw": OptimizerBytes(4, 8),
    "adamw8bit": OptimizerBytes(2, 2),
    "adamw_bf16": OptimizerBytes(2, 4),
    "adafactor": OptimizerBytes(4, 0),
    "muon": OptimizerBytes(4, 4),
}
"""Memory use of each optimizer. With muon, each parameter outside the weight matrices of the layers needs 8 bytes of
AdamW state.
"""
NOT_NEGATIVE = {"exp_avg_sq", "exp_avg_scale", "exp_avg_rms_scale", "row_var", "col_var", "variance"}
"""Names of the optimizer state tensors that are never negative: second moments and scales."""


def weights_of(settings: OptimizerConfig) -> WeightPrecision:
    """Return the precision of the weights that the configured optimizer trains."""
    return "bfloat16" if OPTIMIZER_BYTES[settings.optimizer].weight == 2 else "float32"


def check_optimizer(state: Mapping[str, Any], settings: OptimizerConfig, place: object) -> None:
    """Raise `UsageError` if a checkpoint was written with an optimizer other than the configured one."""
    before = state.get("config", {}).get("optimizer", "adamw")
    if before != settings.optimizer:
        raise UsageError(
            f"{place}: was written with optimizer {before}, but the config selects {settings.optimizer}; resume with "
            f"{before}, "
            f"or start a new run with --init_from_model {place}"
        )


def state_fault(kind: str, values: Tensor, *, steps: int) -> str | None:
    """Return why a tensor of the optimizer state is invalid after `steps` steps, or None if it is valid."""
    if not values.is_floating_point():
        return None
    if not bool(values.isfinite().all()):
        return "has values that are not finite"
    if kind == "step" and not (values.item().is_integer() and 1 <= values.item() <= steps):
        return f"is {values.item():g}, but the run has {steps} steps"
    if kind in NOT_NEGATIVE and bool((values < 0).any()):
        return "has negative values"
    return None


class OptimizerPair:
    """Two optimizers over disjoint parameters that step together and share one state dict."""

    def __init__(self, first: torch.optim.Optimizer, second: torch.optim.Optimizer) -> None:
        second.state = first.state
        self.state = first.state
        self.parts = first, second
        self.param_groups = [*first.param_groups, *second.param_groups]

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none)


AnyOptimizer: TypeAlias = torch.optim.Optimizer | OptimizerPair


def make_optimizer(model: CausalModel, settings: OptimizerConfig) -> AnyOptimizer:
    """Create the optimizer of a config for all trainable parameters. Weight decay applies only to matrices."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # AdamW rejects ints, and a config may contain 0 instead of 0.0.
    lr, eps, *betas = map(float, (settings.learning_rate, settings.adam_eps, settings.beta1, settings.beta2))
    adam: dict[str, Any] = {"lr": lr, "betas": tuple(betas), "eps": eps}
    name = settings.optimizer
    if name in ("adamw8bit", "adamw_bf16"):
        return LowPrecisionAdamW(_groups(trained, settings), **adam, eight_bit=name == "adamw8bit")
    if name == "adafactor":
        # Disable `foreach`, which would keep float32 copies of all gradients at once.
        return torch.optim.Adafactor(_groups(trained, settings), lr=lr, foreach=False)
    if name == "muon":
        inside = {id(weight) for block in model.blocks() for weight in block.parameters() if weight.ndim == 2}
        matrices = [weight for weight in trained if id(weight) in inside]
        others = [weight for weight in trained if id(weight) not in inside]
        if not hasattr(torch.optim, "Muon"):
            raise UsageError(
                f"optimizer is muon, which torch {torch.__version__} does not support; install torch 2.9 or later"
            )
        # Muon computes its matrix products in bfloat16; prevent torch's warning about that on older Arm processors.
        usable_precision(torch.bfloat16)
        # Scale Muon's updates to the RMS of AdamW updates, so that both optimizers use the same learning rate.
        muon = torch.optim.Muon(
            matrices, lr=lr, weight_decay=float(settings.weight_decay), adjust_lr_fn="match_rms_adamw"
        )
        if not others:
            return muon
        return OptimizerPair(muon, torch.optim.AdamW(_groups(others, settings), **adam, fused=True))
    return torch.optim.AdamW(_groups(trained, settings), **adam, fused=True)


def _groups(parameters: list[Any], settings: OptimizerConfig) -> list[dict[str, Any]]:
    groups = [
        {"params": [each for each in parameters if each.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [each for each in parameters if each.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def fresh_state(optimizer: AnyOptimizer, parameter: Tensor) -> dict[str, Tensor]:
    """Create the initial optimizer state of a parameter, with the tensors that a checkpoint must contain."""
    parts = optimizer.parts if isinstance(optimizer, OptimizerPair) else (optimizer,)
    owner = next(
        part for part in parts for group in part.param_groups if any(each is parameter for each in group["params"])
    )
    if isinstance(owner, LowPrecisionAdamW):
        return owner.fresh_state(parameter)
    if isinstance(owner, torch.optim.AdamW):
        moments = {kind: torch.zeros_like(parameter) for kind in ("exp_avg", "exp_avg_sq")}
        return {**moments, "step": torch.zeros((), device=parameter.device)}
    if isinstance(owner, torch.optim.Adafactor):
        step = torch.tensor(0.0)
        if parameter.ndim < 2:
            return {"step": step, "variance": torch.zeros_like(parameter)}
        row, column = parameter[..., :1], parameter[..., :1, :]
        return {"step": step, "row_var": torch.zeros_like(row), "col_var": torch.zeros_like(column)}
    return {"momentum_buffer": torch.zeros_like(parameter)}
