from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from chatmill.load.batch import Batch
from chatmill.train import GPT, GPTSizes
from chatmill.train.model import CausalModel, Inputs

# Models this small are slower with more threads, and tests run in parallel.
torch.set_num_threads(1)

VOCAB = 61
SIZES = GPTSizes(
    vocab_size=VOCAB, n_layer=2, n_embd=32, n_head=4, n_kv_head=2, n_ffn=48, max_positions=64, qk_norm=True
)


def small_gpt(sizes: GPTSizes = SIZES, *, seed: int = 0, compute: torch.dtype | None = None) -> GPT:
    """Return a small GPT with weights that are large enough for its logits to differ clearly."""
    torch.manual_seed(seed)
    model = GPT(sizes, compute=compute)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6) if parameter.ndim > 1 else parameter.add_(torch.randn_like(parameter) / 4)
    return model


def conversation(length: int, *, seed: int) -> tuple[list[int], list[float]]:
    rng = np.random.default_rng(seed)
    weights = np.where(rng.random(length) < 0.33, 0, rng.choice([0.5, 1.0, 2.0], length))
    return rng.integers(1, VOCAB, length).tolist(), weights.tolist()


def packed(rows: list[list[tuple[list[int], list[float]]]], length: int) -> Batch:
    shape = len(rows), length
    x, y = np.zeros(shape, dtype=np.int64), np.full(shape, -100)
    weights = np.zeros(shape, dtype=np.float32)
    positions, segments = np.zeros(shape, dtype=np.int32), np.zeros(shape, dtype=np.int32)
    for row, conversations in enumerate(rows):
        at = 0
        for segment, (ids, weight) in enumerate(conversations):
            for place, token in enumerate(ids):
                x[row, at + place], positions[row, at + place], segments[row, at + place] = token, place, segment
                if place + 1 < len(ids) and weight[place + 1] > 0:
                    y[row, at + place], weights[row, at + place] = ids[place + 1], weight[place + 1]
            at += len(ids)
        positions[row, at:] = np.arange(length - at)
        segments[row, at:] = len(conversations)
    tensors = (torch.from_numpy(part) for part in (x, y, y != -100, weights, positions, segments))
    most = max(map(len, rows), default=0)
    episodes = [list(range(len(row))) + [-1] * (most - len(row)) for row in rows]
    return Batch(*tensors, episode_ids=torch.tensor(episodes))


def inputs(batch: Batch) -> Inputs:
    return Inputs.of(batch, "cpu")


def plain_loss(model: CausalModel, batch: Batch) -> tuple[Tensor, float]:
    """Return Σ weight · loss and Σ weight, from full logits and torch's cross entropy."""
    logits = model.logits(batch.x, batch.positions, batch.segments)
    losses = F.cross_entropy(logits.flatten(0, 1), batch.y.flatten(), reduction="none", ignore_index=-100)
    return (losses * batch.weights.flatten()).sum(), float(batch.weights.sum())


def gradients(model: CausalModel, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


def save_qwen(folder: Path, **changes: Any) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoModelForCausalLM, Qwen3Config
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen3Config(**{**sizes, **heads, "tie_word_embeddings": True, **changes})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder
