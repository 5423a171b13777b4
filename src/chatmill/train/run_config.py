"""Config keys that `chatmill train` and `chatmill rollout train` share: optimizer, initial model, device and output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from chatmill.config import BELOW_ONE, SHARE, Config, ValueCheck, integer, key, number, optional


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Config):
    """Config keys for the optimizer and the learning-rate schedule."""

    optimizer: Literal["adamw", "adamw8bit", "adamw_bf16", "adafactor", "muon"] = key(
        "adamw",
        "adamw uses float32 weights and moments; adamw8bit and adamw_bf16 use bfloat16 weights with stochastic "
        "rounding, and 8-bit or bfloat16 moments; adafactor uses float32 weights and a factored second moment; muon "
        "uses Muon for the weight matrices of the layers and AdamW for all other parameters",
    )
    max_iters: int | None = key(
        None,
        "number of optimizer steps on this dataset; null trains for one pass over the dataset",
        optional(integer(1)),
    )
    learning_rate: float = key(
        3e-4,
        "peak learning rate; adafactor multiplies it by the RMS of each weight, so use about 30 times the value for "
        "adamw",
        number(0),
    )
    min_lr_ratio: float = key(
        0.1, "learning rate at the end of the schedule, as a fraction of the peak learning rate", SHARE
    )
    lr_schedule: Literal["cosine", "linear", "constant"] = key("cosine", "learning rate schedule after warmup")
    warmup_iters: int | None = key(
        None, "number of warmup steps; null uses warmup_pct of the run", optional(integer(0))
    )
    weight_decay: float = key(
        0.1, "weight decay for weight matrices; vectors, such as biases and norms, have no weight decay", number(0)
    )
    beta1: float = key(0.9, "AdamW beta1, the decay rate of the first moment", BELOW_ONE)
    beta2: float = key(0.95, "AdamW beta2, the decay rate of the second moment", BELOW_ONE)
    adam_eps: float = key(1e-8, "AdamW epsilon", number(0))
    grad_clip: float = key(1.0, "clip gradients to this norm; 0 disables clipping", number(0))


def _are_trackers(value: Any) -> bool:
    names = value if isinstance(value, list | tuple) else [value]
    return all(isinstance(name, str) and name in TRACKERS for name in names) and len(set(names)) == len(names)


TRACKERS = ("tensorboard", "wandb", "mlflow")
REPORT_TO = ValueCheck(f"one of {', '.join(TRACKERS)}, or a list of these names without duplicates", _are_trackers)


@dataclass(frozen=True, kw_only=True)
class RunConfig(Config):
    """Config keys for the initial model, device, checkpoints and logs of a run."""

    init_from_model: str | None = key(
        None, "model folder to start from, written by chatmill or by Hugging Face transformers"
    )
    seed: int = key(1337, "seed for weight initialization, dropout and sampling", integer(0))
    device: Literal["auto", "cpu", "cuda"] = key("auto", "device to train on; auto uses a GPU if one is available")
    dtype: Literal["auto", "float32", "bfloat16"] = key(
        "auto", "compute precision; auto uses bfloat16 on a GPU and float32 on a CPU"
    )
    save_dtype: Literal["auto", "float32", "bfloat16", "float16"] = key(
        "auto",
        "dtype of the weights in saved model folders; auto uses the dtype of each weight in the initial model, or "
        "the training dtype for adapters and new models",
    )
    save_interval: int = key(
        500,
        "number of steps between checkpoints, in addition to the checkpoint at the end; 0 disables checkpoints",
        integer(0),
    )
    keep_checkpoints: int = key(2, "number of most recent checkpoints to keep", integer(1))
    log_interval: int = key(10, "number of steps between progress lines if the output is not a terminal", integer(1))
    report_to: Sequence[str] | str = key(
        (), "experiment trackers to report to: tensorboard, wandb or mlflow, or several of them", REPORT_TO
    )
