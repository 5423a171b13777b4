"""The keys that `chatmill train` and `chatmill rollout train` share: optimizer, initial model, device and output."""

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
        "adamw: float32 weights and moments; adamw8bit, adamw_bf16: bfloat16 weights with stochastic rounding, 8-bit "
        "or bfloat16 moments; adafactor: float32 weights, factored second moment; muon: Muon for the weight matrices "
        "of the layers, AdamW for all other parameters",
    )
    max_iters: int | None = key(None, "optimizer steps on this dataset; null: one pass over it", optional(integer(1)))
    learning_rate: float = key(
        3e-4,
        "peak learning rate; for adafactor it is relative to the RMS of each weight: use about 30 times the value "
        "for adamw",
        number(0),
    )
    min_lr_ratio: float = key(0.1, "learning rate at the end of the schedule, as a share of the peak", SHARE)
    lr_schedule: Literal["cosine", "linear", "constant"] = key("cosine", "decay of the learning rate after warmup")
    warmup_iters: int | None = key(None, "warmup steps; null: warmup_pct of the run", optional(integer(0)))
    weight_decay: float = key(0.1, "weight decay of matrices; it is not applied to vectors", number(0))
    beta1: float = key(0.9, "AdamW beta1, the decay of the mean of gradients", BELOW_ONE)
    beta2: float = key(0.95, "AdamW beta2, the decay of the mean of squared gradients", BELOW_ONE)
    adam_eps: float = key(1e-8, "AdamW epsilon", number(0))
    grad_clip: float = key(1.0, "clip gradients to this norm; 0 disables clipping", number(0))


def _are_trackers(value: Any) -> bool:
    names = value if isinstance(value, list | tuple) else [value]
    return all(isinstance(name, str) and name in TRACKERS for name in names) and len(set(names)) == len(names)


TRACKERS = ("tensorboard", "wandb", "mlflow")
REPORT_TO = ValueCheck(f"a list of {', '.join(TRACKERS)}, each at most once, or one of them", _are_trackers)


@dataclass(frozen=True, kw_only=True)
class RunConfig(Config):
    """Config keys for the initial model, device, checkpoints and logs of a run."""

    init_from_model: str | None = key(
        None, "model folder to start from: one that chatmill wrote, or a Hugging Face model"
    )
    seed: int = key(1337, "seed for weight initialization, dropout and sampling", integer(0))
    device: Literal["auto", "cpu", "cuda"] = key("auto", "device; auto: a GPU if there is one")
    dtype: Literal["auto", "float32", "bfloat16"] = key(
        "auto", "compute precision; auto: bfloat16 on a GPU, float32 on a CPU"
    )
    save_dtype: Literal["auto", "float32", "bfloat16", "float16"] = key(
        "auto",
        "dtype of the weights in saved model folders; auto: the dtype of each weight in the initial model; "
        "adapters and new models keep the dtype they are trained in",
    )
    save_interval: int = key(
        500, "steps between checkpoints, in addition to the one at the end; 0: no checkpoints", integer(0)
    )
    keep_checkpoints: int = key(2, "number of most recent checkpoints to keep", integer(1))
    log_interval: int = key(10, "steps between progress lines if the output is not a terminal", integer(1))
    report_to: Sequence[str] | str = key((), "experiment trackers to report to: tensorboard, wandb, mlflow", REPORT_TO)
