from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cpu_device  # noqa: F401  (before torchtitan)
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.config.configs import DebugConfig
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.llama3 import Llama3Model, _build_llama3_layers, model_registry
from torchtitan.trainer import Trainer
from trainer_fixtures import RATE, STEPS, VOCAB

from chatmill.integrations.torchtitan import EpisodeDataLoader

logging.getLogger().setLevel(logging.ERROR)


class NoTokenizer(BaseTokenizer):
    """A placeholder for the tokenizer that torchtitan expects; chatmill's rows are already tokenized."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *args: Any, **_: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *args: Any, **_: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        return VOCAB


def small_llama() -> Llama3Model.Config:
    init = {"weight": lambda weight: torch.nn.init.normal_(weight, std=0.02)}
    ones = {"weight": torch.nn.init.ones_}
    return Llama3Model.Config(
        dim=32,
        vocab_size=VOCAB,
        tok_embeddings=Embedding.Config(num_embeddings=VOCAB, embedding_dim=32, param_init=init),
        norm=RMSNorm.Config(normalized_shape=32, param_init=ones),
        lm_head=Linear.Config(in_features=32, out_features=VOCAB, param_init=init),
        layers=_build_llama3_layers(
            n_layers=2,
            dim=32,
            n_heads=4,
            n_kv_heads=2,
            hidden_dim=64,
            rope=ComplexRoPE.Config(dim=8, max_seq_len=256, theta=10000),
            attn_backend="flex",
        ),
    )


def trainer_config(
    dataset: Path, load: Mapping[str, Any], *, steps: int, folder: Path, **settings: Any
) -> Trainer.Config:
    spec = model_registry("debugmodel")
    spec.model = small_llama()
    titan = {"local_batch_size": load["batch_size"], "global_batch_size": -1, **settings.pop("training", {})}
    return Trainer.Config(
        model_spec=spec,
        dump_folder=str(folder),
        tokenizer=NoTokenizer.Config(),
        loss=CrossEntropyLoss.Config(),
        optimizer=default_adamw(lr=RATE, weight_decay=0.0),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=0, decay_ratio=0.0),
        training=TrainingConfig(
            seq_len=load["block_size"],
            steps=steps,
            max_norm=1e9,
            mixed_precision_param="float32",
            disable_cuda_graphs=True,
            **titan,
        ),
        dataloader=EpisodeDataLoader.Config(dataset_path=str(dataset), load=dict(load), **settings.pop("data", {})),
        metrics=MetricsProcessor.Config(log_freq=1),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        activation_checkpoint=None,
        debug=DebugConfig(seed=0),
        checkpoint=CheckpointManager.Config(
            enable="interval" in settings,
            interval=settings.pop("interval", 500),
            last_save_model_only=False,
            load_step=settings.pop("load_step", -1),
        ),
        **settings,
    )


def whole(weight: torch.Tensor) -> torch.Tensor:
    return weight.full_tensor().clone() if isinstance(weight, DTensor) else weight.clone()


class Recorder(Trainer):
    def __init__(self, config: Trainer.Config) -> None:
        super().__init__(config)
        for module in self.model_parts[0].modules():
            if isinstance(module, FSDPModule):
                # Gloo, the backend for ranks on CPUs, can sum gradients but not average them.
                module.set_force_sum_reduction_for_comms(True)
        self.batches: list[dict[str, np.ndarray]] = []
        self.losses: list[float] = []
        self.metrics_processor.log = lambda step, loss, *_, **__: self.losses.append(loss)
        self.weights = {name: whole(weight) for name, weight in self.model_parts[0].state_dict().items()}

    def forward_backward_step(self, *, input_dict: Any, labels: Any, **others: Any) -> torch.Tensor:
        arrays = {**input_dict, "labels": labels}
        self.batches.append({name: value.numpy().copy() for name, value in arrays.items()})
        return super().forward_backward_step(input_dict=input_dict, labels=labels, **others)


def train(dataset: Path, load: Mapping[str, Any], **settings: Any) -> dict[str, Any]:
    trainer = Recorder(trainer_config(dataset, load, **settings))
    trainer.train()
    trainer.dataloader.close()
    trainer.close()
    return {
        "batches": trainer.batches,
        "losses": trainer.losses,
        "step": trainer.step,
        "weights": trainer.weights,
    }


def two_rank_runs(dataset: Path, load: Mapping[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Train for 50 steps, then resume from step 21. Both runs use the same processes, because starting processes is
    slow.
    """
    settings = {
        "folder": folder,
        "training": {"local_batch_size": 1, "global_batch_size": load["batch_size"]},
        "data": {"audit_dir": str(folder / "audit"), "audit_steps": 4},
        "interval": STEPS + 1,
    }
    whole = train(dataset, load, steps=50, **settings)
    resumed = train(dataset, load, steps=45, load_step=STEPS + 1, **settings)
    dist.destroy_process_group()
    return [whole, resumed]
