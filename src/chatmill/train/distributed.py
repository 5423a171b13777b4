"""The ranks of a run: who we are, what is agreed on, and how a model is spread over them.

Numbers that the host needs go over gloo, beside the GPUs' own traffic, so that no GPU is waited for.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from chatmill.errors import ChatmillError, UsageError
from chatmill.train.model import CausalModel

T = TypeVar("T")
PATIENCE = timedelta(minutes=30)
"""How long ranks wait for one that writes a checkpoint."""


@dataclass(frozen=True)
class World:
    """One of `size` ranks, and the device it computes on."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    # What ranks tell each other.

    def sums(self, values: Sequence[float]) -> list[float]:
        """Each value added up over all ranks, on each of them."""
        if self.size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor)
        return tensor.tolist()

    def add(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """The same for an array of whole numbers, modulo 2^64."""
        tensor = torch.from_numpy(numbers.copy())
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor.numpy()

    def gather(self, value: Any) -> list[Any]:
        """What every rank gives, as JSON holds it, on each of them."""
        if self.size == 1:
            return [value]
        raw = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(raw)]))
        most = max(int(size) for size in sizes)
        parts = [torch.zeros(most, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(parts, torch.nn.functional.pad(raw, (0, most - len(raw))))
        return [json.loads(bytes(part[: int(size)].numpy())) for part, size in zip(parts, sizes, strict=True)]

    def together(self, work: Callable[[], T]) -> T:
        """Do something on every rank; if it fails on one, it fails on all with what that one says."""
        result, fault = None, None
        try:
            result = work()
        except ChatmillError as error:
            fault = error
        except OSError as error:
            fault = ChatmillError(f"{error.filename or 'input or output'}: {error.strerror or error}")
        said = [found for found in self.gather(None if fault is None else [str(fault), fault.exit_code]) if found]
        if fault is not None:
            raise fault
        if said:
            raise (UsageError if said[0][1] == UsageError.exit_code else ChatmillError)(said[0][0])
        return result  # type: ignore[return-value]

    # Models.

    def spread(self, model: CausalModel, *, sharded: bool, compute: torch.dtype | None) -> nn.Module:
        """Put a model on the device; what is given is called in its place, and averages gradients over all ranks."""
        if sharded and dist.is_initialized():
            return _shard(model, self, compute)
        model.to(self.device)
        if self.size == 1:
            return model
        ids = [self.device] if self.device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)


def _shard(model: CausalModel, world: World, compute: torch.dtype | None) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(world.device.type, (world.size,))
    # Layers are sent in the precision they compute in; embedding, head and the last norm stay float32. Angles too.
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in model.blocks():
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))
    return model


@contextmanager
def last_of(module: nn.Module, is_last: bool) -> Iterator[None]:
    """A backward pass whose gradients are exchanged only if it is the last one of its step."""
    if hasattr(module, "set_requires_gradient_sync"):
        module.set_requires_gradient_sync(is_last)
        yield
    else:
        silent = isinstance(module, nn.parallel.DistributedDataParallel) and not is_last
        with module.no_sync() if silent else nullcontext():
            yield


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor; asked without importing them, which takes seconds."""
    return hasattr(tensor, "device_mesh")


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that lies on this rank."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """A tensor with the parts of all ranks, which all call this."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def rows_of(tensor: Tensor) -> tuple[int, int]:
    """Which rows of a tensor lie on this rank: shards are even runs of rows, the last ones shorter."""
    if not is_sharded(tensor):
        return 0, len(tensor) if tensor.ndim else 1
    mesh = tensor.device_mesh
    size = -(-len(tensor) // mesh.size())
    start = min(mesh.get_local_rank() * size, len(tensor))
    stop = min(start + size, len(tensor))
    assert stop - start == len(tensor.to_local())
    return start, stop


@contextmanager
def joined(device: str) -> Iterator[World]:
    """The world that torchrun started, or a world of one."""
    chosen = torch.device("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else torch.device(device)
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise UsageError("device is cuda, and torch finds no GPU; expected cpu or auto")
    if dist.is_initialized():
        # Whoever made the group ends it.
        yield World(dist.get_rank(), dist.get_world_size(), _own(chosen))
        return
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        yield World(0, 1, chosen)
        return
    chosen = _own(chosen)
    dist.init_process_group("cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo", timeout=PATIENCE)
    try:
        yield World(dist.get_rank(), dist.get_world_size(), chosen)
    finally:
        dist.destroy_process_group()


def _own(device: torch.device) -> torch.device:
    """The GPU of this rank, among those of its machine."""
    if device.type != "cuda":
        return device
    own = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(own)
    return own
