"""Write a sharded model as a folder of Hugging Face shards, without gathering the whole model on any rank.

    model-00001-of-00003.safetensors     whole tensors are assigned to files, in order
    model-00002-of-00003.safetensors     file i is written by rank i modulo the number of ranks
    model-00003-of-00003.safetensors     all ranks send their rows of a tensor to the rank that writes it
    model.safetensors.index.json

In each round, every rank receives the rows of one tensor from the other ranks and then writes the whole tensor. A small
model is written as a single file, model.safetensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from chatmill.errors import ChatmillError
from chatmill.store import files
from chatmill.train.distributed import World, is_sharded, local, rows_of
from chatmill.train.model import CausalModel, SavedPart
from chatmill.train.model_files import INDEX, WEIGHTS
from chatmill.train.sharded_tensors import TensorEntry, write_tensors
from chatmill.train.weight_dtypes import check_float16, saved_dtype

SHARD_BYTES = 4 << 30
"""Maximum size of a weight file in bytes, unless a single tensor is larger."""


@dataclass(frozen=True)
class WeightFile:
    """A weight file, and the groups of weights that it contains."""

    name: str
    parts: tuple[SavedPart, ...]


def can_save_in_shards(model: CausalModel) -> bool:
    """Return whether a model is sharded over ranks and all of its weights are saved, not only adapters."""
    parameters = list(model.parameters())
    return all(each.requires_grad for each in parameters) and any(map(is_sharded, parameters))


def save_in_shards(
    folder: Path, model: CausalModel, world: World, *, save_dtype: str
) -> dict[str, tuple[int, str]] | None:
    """Write a model into an existing folder; return the files that this rank wrote, with sizes and hashes. All ranks
    must call this function.

    Return None without writing weights if the model does not support `save_parts`. The written files are not synced to
    disk.
    """
    state = model.state_dict(keep_vars=True)
    dtypes = {name: saved_dtype(model, name, tensor, save_dtype) for name, tensor in state.items()}
    world.together(lambda: _check_float16(state, dtypes))
    # Create only one meta tensor for tied weights.
    on_meta: dict[int, Tensor] = {}
    for name, tensor in state.items():
        on_meta.setdefault(id(tensor), torch.empty(tensor.shape, dtype=dtypes[name], device="meta"))
    like = {name: on_meta[id(tensor)] for name, tensor in state.items()}
    parts = world.together(lambda: _parts(model, folder, like) if world.is_first else None)
    listed = world.gather(None if parts is None else [list(part) for part in parts])[0]
    if listed is None:
        return None
    parts = [SavedPart(tuple(weights), tuple(saved), converted) for weights, saved, converted in listed]
    weight_files = _assign(parts, like)
    queues = [[part for file in weight_files[rank :: world.size] for part in file.parts] for rank in range(world.size)]
    arriving = _exchange(queues, state, dtypes, world)

    def write() -> dict[str, tuple[int, str]]:
        try:
            return dict(_write(folder, weight_files[world.rank :: world.size], arriving, model, like))
        finally:
            # Keep sending rows after an error, because the other ranks wait for them.
            for _ in arriving:
                pass

    written = world.together(write)
    if len(weight_files) > 1:
        world.together(lambda: _write_index(folder, weight_files, model, like) if world.is_first else None)
    return written


def _parts(model: CausalModel, folder: Path, like: Mapping[str, Tensor]) -> list[SavedPart] | None:
    try:
        return model.save_parts(folder, like)
    except (ChatmillError, OSError):
        raise
    except Exception:
        # Some versions of transformers cannot save a model with parameters on the meta device.
        return None


def _check_float16(state: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype]) -> None:
    for name, tensor in state.items():
        if dtypes[name] == torch.float16 and tensor.dtype != torch.float16:
            check_float16({name: local(tensor.detach()).to(torch.float16)})


def _assign(parts: Sequence[SavedPart], like: Mapping[str, Tensor]) -> list[WeightFile]:
    groups: list[list[SavedPart]] = [[]]
    size = 0
    for part in parts:
        more = sum(like[name].nbytes for name in part.weights)
        if groups[-1] and size + more > SHARD_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(part)
        size += more
    if len(groups) == 1:
        return [WeightFile(WEIGHTS, tuple(groups[0]))]
    stem, suffix = Path(WEIGHTS).stem, Path(WEIGHTS).suffix
    names = (f"{stem}-{number:05d}-of-{len(groups):05d}{suffix}" for number in range(1, len(groups) + 1))
    return [WeightFile(name, tuple(group)) for name, group in zip(names, groups, strict=True)]


def _exchange(
    queues: Sequence[Sequence[SavedPart]], state: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype], world: World
) -> Iterator[dict[str, Tensor]]:
    """Yield the full weights that this rank writes, one group at a time. Every rank sends its rows of each weight to
    the rank that writes the weight.
    """
    for turns in zip_longest(*queues):
        mine: dict[str, Tensor] = {}
        for owner, part in enumerate(turns):
            for name in () if part is None else part.weights:
                _gather(name, state[name].detach(), dtypes[name], owner, world, mine)
        if turns[world.rank] is not None:
            yield mine


def _gather(name: str, tensor: Tensor, dtype: torch.dtype, owner: int, world: World, mine: dict[str, Tensor]) -> None:
    """Send this rank's rows of a tensor to the rank `owner`, which stores the full tensor in `mine`."""
    rows = local(tensor).to(dtype).cpu().contiguous()
    if world.rank != owner:
        if is_sharded(tensor) and rows.numel():
            dist.send(rows.view(torch.uint8), dst=owner)
        return
    if not is_sharded(tensor):
        mine[name] = rows
        return
    whole = mine[name] = torch.empty(tensor.shape, dtype=dtype)
    start, stop = rows_of(tensor)
    whole[start:stop] = rows
    size = -(-len(tensor) // world.size)
    for rank in range(world.size):
        received = whole[rank * size : (rank + 1) * size]
        if rank != owner and received.numel():
            dist.recv(received.view(torch.uint8), src=rank)


def _write(
    folder: Path,
    mine: Sequence[WeightFile],
    arriving: Iterator[dict[str, Tensor]],
    model: CausalModel,
    like: Mapping[str, Tensor],
) -> Iterator[tuple[str, tuple[int, str]]]:
    for file in mine:
        on_meta = [model.saved_tensors(part, {name: like[name] for name in part.weights}) for part in file.parts]
        entries = [
            TensorEntry(name, tuple(tensor.shape), tensor.dtype) for group in on_meta for name, tensor in group.items()
        ]
        values = _saved(file, arriving, model)
        yield file.name, astuple(write_tensors(folder / file.name, entries, values, metadata={"format": "pt"}))


def _saved(file: WeightFile, arriving: Iterator[dict[str, Tensor]], model: CausalModel) -> Iterator[Tensor]:
    """Yield the tensors of a file, without keeping references to tensors that were already yielded."""
    for part in file.parts:
        tensors = model.saved_tensors(part, next(arriving))
        while tensors:
            yield tensors.pop(next(iter(tensors)))


def _write_index(
    folder: Path, weight_files: Sequence[WeightFile], model: CausalModel, like: Mapping[str, Tensor]
) -> None:
    weights = {name: like[name] for file in weight_files for part in file.parts for name in part.weights}
    index: dict[str, Any] = {
        "metadata": {
            "total_parameters": model.num_parameters,
            "total_size": sum(tensor.nbytes for tensor in weights.values()),
        },
        "weight_map": {name: file.name for file in weight_files for part in file.parts for name in part.saved},
    }
    with files.create(folder / INDEX) as file:
        file.write((json.dumps(index, indent=2, sort_keys=True) + "\n").encode())
