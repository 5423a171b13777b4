"""Functions that the torchdata tests run on each rank with `trainer_fixtures.ranks`."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from trainer_fixtures import PACKED, RATE, STEPS, open_model

from chatmill.integrations.step_loss import causal_lm_loss
from chatmill.integrations.torchdata import stateful_loader


def arrays(batch: Any) -> dict[str, Any]:
    columns = batch if isinstance(batch, dict) else batch._asdict()
    return {name: column.numpy() for name, column in columns.items()}


def batches(dataset: Path, *, steps: int, workers: int) -> list[dict[str, Any]]:
    return [arrays(batch) for batch in islice(stateful_loader(dataset, PACKED, num_workers=workers), steps)]


def losses(dataset: Path, model: Path) -> list[float]:
    opened = open_model(model).train()
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    module = torch.nn.parallel.DistributedDataParallel(opened) if world_size > 1 else opened
    optimizer = torch.optim.AdamW(opened.parameters(), lr=RATE, weight_decay=0.0)
    values = []
    for batch in islice(stateful_loader(dataset, PACKED, hf_columns=True, num_workers=2), STEPS):
        weight = batch["weights"].sum() / world_size
        if world_size > 1:
            dist.all_reduce(weight)
        loss = causal_lm_loss(module, {**batch, "step_weight": weight})
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach() / world_size
        if world_size > 1:
            dist.all_reduce(total)
        values.append(float(total))
    return values


def on_two_ranks(dataset: Path, model: Path) -> dict[str, Any]:
    # The first loader reads its rank from torchrun's variables, and the later loaders from torch.distributed.
    before = batches(dataset, steps=50, workers=0)
    dist.init_process_group("gloo")
    return {0: before, 2: batches(dataset, steps=50, workers=2), "losses": losses(dataset, model)}
