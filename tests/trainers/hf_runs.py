from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, DistributedSampler
from trainer_fixtures import PACKED, RATE, open_model
from transformers import Trainer, TrainingArguments, logging

from chatmill.errors import ChatmillError
from chatmill.integrations import hf

logging.set_verbosity_error()
logging.disable_progress_bar()
COMMON: dict[str, Any] = {
    "learning_rate": RATE,
    "lr_scheduler_type": "constant",
    "optim": "adamw_torch",
    "max_grad_norm": 0.0,
    "weight_decay": 0.0,
    "logging_steps": 1,
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
    "seed": 0,
    "save_strategy": "no",
}


def make_trainer(rows: hf.TrainRows, model: Path, folder: Path, kind: str = "Trainer", **options: Any) -> Trainer:
    flatten = options.pop("flatten", False)
    if kind == "Trainer":
        args = TrainingArguments(str(folder), **{**COMMON, **hf.training_arguments(rows), **options})
        return Trainer(open_model(model), args, **hf.trainer_arguments(rows, flatten=flatten))
    import trl

    from chatmill.integrations import trl as ours

    trainers = {"SFTTrainer": trl.SFTTrainer, "WeightedSFTTrainer": ours.WeightedSFTTrainer}
    sft = {**COMMON, "bf16": False, **ours.sft_config(rows), **options}
    args = trl.SFTConfig(str(folder), **sft)
    return trainers[kind](open_model(model), args, **ours.trainer_arguments(rows, flatten=flatten))


def train(trainer: Trainer, *, resume: Path | None = None) -> tuple[list[float], list[dict[str, np.ndarray]]]:
    inputs: list[dict[str, np.ndarray]] = []
    training_step = trainer.training_step

    def recorded_step(model: Any, batch: Mapping[str, Any], *others: Any) -> torch.Tensor:
        inputs.append({name: value.numpy().copy() for name, value in batch.items() if torch.is_tensor(value)})
        return training_step(model, batch, *others)

    trainer.training_step = recorded_step
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], inputs


def on_a_rank(weighted: Path, plain: Path, model: Path, folder: Path) -> dict[str, Any]:
    two_steps = {**PACKED, "gradient_accumulation_steps": 2}
    rows = hf.TrainRows(weighted, two_steps, steps=50, audit_dir=folder / "audit")
    trainer = make_trainer(rows, model, folder / "run", save_strategy="steps", save_steps=30)
    # chatmill's own loop has 20 steps.
    trainer.add_callback(EvaluateAt(20))
    losses, inputs = train(trainer)
    evaluations = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]

    again = hf.TrainRows(weighted, two_steps, steps=50, audit_dir=folder / "audit")
    resumed = make_trainer(again, model, folder / "run", dataloader_num_workers=2)
    resumed_losses, resumed_inputs = train(resumed, resume=folder / "run" / "checkpoint-30")

    sft_rows = hf.TrainRows(weighted, PACKED, steps=20)
    sft_trainer = make_trainer(sft_rows, model, folder / "sft", "WeightedSFTTrainer")
    sft_losses, _ = train(sft_trainer)

    return {
        "losses": losses,
        "inputs": inputs,
        "evaluations": evaluations,
        "resumed_losses": resumed_losses,
        "resumed_inputs": resumed_inputs,
        "sft_losses": sft_losses,
        "sft_evaluation": sft_trainer.evaluate()["eval_loss"],
        "refusals": refusals(plain, model, folder, trainer),
    }


class EvaluateAt(hf.TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        control.should_evaluate = state.global_step == self.step


def refusals(plain: Path, model: Path, folder: Path, trainer: Trainer) -> dict[str, str]:
    config = {**PACKED, "batch_size": 8}

    def sharded_twice(count: int) -> None:
        rows = hf.TrainRows(plain, {**PACKED, "batch_size": 2 * count}, steps=20)
        loader = DataLoader(rows, count, sampler=DistributedSampler(rows, shuffle=False), collate_fn=hf.Collator())
        for _ in trainer.accelerator.prepare(loader):
            pass

    def other_batches() -> None:
        rows = hf.TrainRows(plain, config, steps=20)
        for _ in trainer.accelerator.prepare(DataLoader(rows, 8, collate_fn=hf.Collator())):
            pass

    def uneven() -> None:
        hf.training_arguments(hf.TrainRows(plain, {**PACKED, "batch_size": 5}, steps=20))

    ways = {
        "sharded twice": lambda: sharded_twice(4),
        "sharded twice, row by row": lambda: sharded_twice(1),
        "other batches": other_batches,
        "uneven": uneven,
    }
    return {name: refusal(way) for name, way in ways.items()}


def refusal(way: Any) -> str:
    try:
        way()
    except ChatmillError as error:
        return str(error)
    return "nothing was refused"
