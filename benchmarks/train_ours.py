"""Run the chatmill configurations of benchmarks/train.py with `train_model`, as a user would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from train_data import Trial
from train_models import own_gpt, qwen3, trained_precision

from chatmill.train.config import LoraSizes
from chatmill.train.loop import train_model
from chatmill.train.model import CausalModel
from chatmill.train.result import StepRecord


def run(trial: Trial, folder: Path, measured_from: Any) -> dict[str, Any]:
    """Train, and return the measurements of the timed steps. `measured_from` is called after the model is created."""
    line = trial.line
    config = trial.config(**settings(trial))
    model = make_model(trial)
    if (made := trained_precision(model)) != line.precision.weights:
        raise RuntimeError(f"the trained weights are {made}; expected {line.precision.weights}")
    measured_from()
    steps: list[StepRecord] = []
    train_model(
        config,
        model_name=line.name,
        dataset_dir=trial.data,
        out_dir=folder,
        model=model,
        watch=steps.append,
        quiet=True,
    )
    timed = steps[trial.warmup :]
    seconds = sum(step.seconds for step in timed)
    return {
        "seconds": seconds,
        "steps": len(timed),
        "tokens": sum(step.tokens for step in timed),
        "trained": sum(step.trained for step in timed),
        "wait": sum(step.data_wait for step in timed) / seconds,
        "losses": [step.loss for step in steps],
    }


def settings(trial: Trial) -> dict[str, Any]:
    """Return the config keys of the run. Optimizer and precision are set only if they differ from the defaults."""
    line = trial.line
    named: dict[str, Any] = {
        "optimizer": line.optimizer if line.optimizer != "adamw" else None,
        "fp8": line.fp8 or None,
        "activation_checkpointing": line.checkpointing or None,
        "activation_offload": line.offload or None,
    }
    return {
        **trial.shape,
        "max_positions": trial.block_size,
        "max_iters": trial.warmup + trial.steps,
        # Training on random tokens could diverge without a long warm-up.
        "warmup_iters": 100,
        "eval_interval": 0,
        "save_interval": 0,
        "audit_dir": None,
        "device": trial.device,
        **{name: value for name, value in named.items() if value is not None},
    }


def make_model(trial: Trial) -> CausalModel:
    """Return the model on its device. If adapters are trained, the base model has the dtype `precision.base`."""
    line, device = trial.line, trial.device
    weights = line.precision.base or line.precision.weights
    if line.own:
        return own_gpt(trial.shape, weights=weights, block_size=trial.block_size, device=device)
    from chatmill.train.hf import HFModel

    compute = torch.bfloat16 if device == "cuda" else None
    lm = qwen3(trial.shape, weights=weights, block_size=trial.block_size, device=device)
    if weights == "nf4":
        from chatmill.train.quantized import use_nf4

        use_nf4(lm)
    # Qwen3 is known to separate packed conversations, so HFModel need not test whether it does.
    model = HFModel(lm, compute=compute, separates=True)
    return model.with_lora(LoraSizes(r=16), Path()) if line.precision.base else model
