from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from trainer_fixtures import RATE, STEPS, VOCAB, open_model, write_dataset

from chatmill import EpisodeLoader
from chatmill.integrations.lightning import EpisodeDataModule, weighted_loss

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
# Lightning 2.6 causes this warning with torch 2.13.
warnings.filterwarnings("ignore", "`isinstance\\(treespec, LeafSpec\\)` is deprecated")

WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))
"""Number of ranks, read at import, because a trainer removes the variable from the environment when it ends."""


class SmallModel(nn.Module):
    """A model that predicts the next token from the current token alone, for tests that only check batches."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.table(input_ids)


class Recorder(LightningModule):
    def __init__(self, model: Path | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = SmallModel() if model is None else open_model(model)
        self.is_small = model is None
        self.batches: list[dict[str, np.ndarray]] = []
        self.losses: list[float] = []
        self.val_batches: list[dict[str, np.ndarray]] = []

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        if self.is_small:
            return self.model(batch["input_ids"])
        return self.model(batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits

    def training_step(self, batch: Mapping[str, Tensor]) -> Tensor:
        loss = weighted_loss(self(batch), batch)
        self.batches.append({name: column.numpy().copy() for name, column in batch.items()})
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Mapping[str, Tensor]) -> None:
        self.val_batches.append({name: column.numpy().copy() for name, column in batch.items()})
        loss = weighted_loss(self(batch), batch)
        self.log("val_loss", loss, batch_size=batch["weights"].sum(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=RATE, weight_decay=0.0)


def small_dataset(folder: Path, **settings: Any) -> Path:
    return write_dataset(folder, count=40, weights=(0.5, 1), **settings)


def steps_of_epochs(dataset: Path, config: Mapping[str, Any], epochs: int) -> list[int]:
    plan = EpisodeLoader(dataset, config).plan("train")
    return [plan.num_steps(epoch) for epoch in range(epochs)]


def make_trainer(
    *,
    checkpoints: Path | None = None,
    save_steps: int = 1,
    callbacks: tuple[Any, ...] = (),
    epochs: int | None = None,
    **settings: Any,
) -> Trainer:
    if checkpoints is not None:
        save = ModelCheckpoint(checkpoints, "{step}", every_n_train_steps=save_steps, save_top_k=-1)
        callbacks = (*callbacks, save)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(
        accelerator="cpu",
        devices=WORLD_SIZE,
        strategy="ddp" if WORLD_SIZE > 1 else "auto",
        max_epochs=epochs,
        enable_checkpointing=checkpoints is not None,
        num_sanity_val_steps=0,
        callbacks=list(callbacks),
        **quiet,
        **settings,
    )


def train(
    dataset: Path,
    config: Mapping[str, Any],
    *,
    model: Path | None = None,
    ckpt_path: Path | None = None,
    audit_dir: Path | None = None,
    limit_val_batches: int = 0,
    **settings: Any,
) -> dict[str, Any]:
    module = Recorder(model)
    data = EpisodeDataModule(dataset, config, audit_dir=audit_dir, audit_steps=3)
    accumulation = config.get("gradient_accumulation_steps", 1)
    trainer = make_trainer(accumulate_grad_batches=accumulation, limit_val_batches=limit_val_batches, **settings)
    trainer.fit(module, data, ckpt_path=ckpt_path)
    return {
        "batches": module.batches,
        "losses": module.losses,
        "step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "val_batches": module.val_batches,
        "table": module.model.table.weight.detach().numpy().copy() if model is None else None,
        "val_loss": float(trainer.callback_metrics.get("val_loss", 0)),
    }


def two_rank_runs(dataset: Path, config: Mapping[str, Any], model: Path, folder: Path) -> dict[str, dict[str, Any]]:
    """Train several times in the same processes, because starting processes is slow."""
    audited = {"model": model, "audit_dir": folder / "audit"}
    return {
        "whole": train(dataset, config, **audited, max_steps=50, checkpoints=folder, save_steps=STEPS + 1),
        "resumed": train(
            dataset,
            config,
            **audited,
            max_steps=45,
            checkpoints=folder / "resumed",
            save_steps=45,
            ckpt_path=folder / f"step={STEPS + 1}.ckpt",
        ),
        "validated": train(dataset, config, max_steps=1, limit_val_batches=1.0, val_check_interval=2),
    }
