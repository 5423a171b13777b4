"""Distributed training: the ranks of a run, what they exchange, and models with DDP or FSDP.

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

from chatmill.errors import ChatmillError, DataError, UsageError, one_line, system_fault
from chatmill.train.model import CausalModel

T = TypeVar("T")
TIMEOUT = timedelta(minutes=30)
"""How long ranks wait for another one, such as rank 0 while it writes a checkpoint."""


class RankError(ChatmillError):
    """A fault that one rank meets alone, and reports itself; other faults are reported by rank 0."""


class LostRankError(RankError):
    """Another rank was killed, or its machine cannot be reached any more."""


@dataclass(frozen=True)
class World:
    """One of `size` ranks, and the device it computes on."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sums(self, values: Sequence[float]) -> list[float]:
        """Each value summed over all ranks, on every rank."""
        if self.size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor)
        return tensor.tolist()

    def add(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """An array of integers summed over all ranks, modulo 2^64."""
        tensor = torch.from_numpy(numbers.copy())
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor.numpy()

    def gather(self, value: Any) -> list[Any]:
        """The JSON values of all ranks, on every rank; sent as JSON because pickles of other ranks are not loaded."""
        if self.size == 1:
            return [value]
        sent = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = [int(total) for total in self.sums([len(sent) * (rank == self.rank) for rank in range(self.size)])]
        received = [torch.empty(max(sizes), dtype=torch.uint8) for _ in sizes]
        dist.all_gather(received, nn.functional.pad(sent, (0, max(sizes) - len(sent))))
        return [json.loads(bytes(data[:size].numpy())) for data, size in zip(received, sizes, strict=True)]

    def together(self, work: Callable[[], T]) -> T:
        """Call a function on every rank; an error on one rank is raised on all of them."""
        result, fault = None, None
        try:
            result = work()
        except ChatmillError as error:
            fault = error
        except OSError as error:
            fault = ChatmillError(system_fault(error))
        faults = [each for each in self.gather(None if fault is None else [str(fault), fault.exit_code]) if each]
        if fault is not None:
            raise fault
        if faults:
            text, code = faults[0]
            raise (UsageError if code == UsageError.exit_code else ChatmillError)(text)
        return result  # type: ignore[return-value]

    def alone(self, work: Callable[[], T]) -> T:
        """Call a function on this rank; an error names the rank, because the others do not meet it."""
        try:
            return work()
        except DataError as error:
            if self.size == 1:
                raise
            raise RankError(f"rank {self.rank}: {error}") from None

    def distribute(self, model: CausalModel, *, sharded: bool, compute: torch.dtype | None) -> nn.Module:
        """Move a model to the device; the module to call in its place, which averages gradients over all ranks."""
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
    # Layers are gathered in compute precision; embedding, head, the last norm and rotary angles stay float32.
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in model.blocks():
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))
    return model


@contextmanager
def gradient_sync(module: nn.Module, enabled: bool) -> Iterator[None]:
    """A backward pass whose gradients are exchanged between ranks only if `enabled`."""
    if hasattr(module, "set_requires_gradient_sync"):
        module.set_requires_gradient_sync(enabled)
        yield
    else:
        skip = isinstance(module, nn.parallel.DistributedDataParallel) and not enabled
        with module.no_sync() if skip else nullcontext():
            yield


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor, without importing that class, which takes seconds."""
    return hasattr(tensor, "device_mesh")


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a tensor."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """A tensor gathered from all ranks, which all call this."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def rows_of(tensor: Tensor) -> tuple[int, int]:
    """Which rows of a tensor are on this rank: shards are equal ranges of rows, the last ones shorter."""
    if not is_sharded(tensor):
        return 0, len(tensor) if tensor.ndim else 1
    mesh = tensor.device_mesh
    size = -(-len(tensor) // mesh.size())
    start = min(mesh.get_local_rank() * size, len(tensor))
    stop = min(start + size, len(tensor))
    assert stop - start == len(tensor.to_local())
    return start, stop


@contextmanager
def init_world(device: str) -> Iterator[World]:
    """The process group that torchrun started, or a world of one rank."""
    chosen = torch.device("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else torch.device(device)
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise UsageError("device is cuda, and torch finds no GPU; expected cpu or auto")
    if dist.is_initialized():
        # Whoever created the group destroys it.
        with _lost_ranks(dist.get_rank()):
            yield World(dist.get_rank(), dist.get_world_size(), _local_gpu(chosen))
        return
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        yield World(0, 1, chosen)
        return
    chosen = _local_gpu(chosen)
    with _lost_ranks(os.environ["RANK"]):
        dist.init_process_group("cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo", timeout=TIMEOUT)
        try:
            yield World(dist.get_rank(), dist.get_world_size(), chosen)
        finally:
            dist.destroy_process_group()


@contextmanager
def _lost_ranks(rank: int | str) -> Iterator[None]:
    """Report the loss of another rank in one line. The system closes the connections of a process that is killed."""
    try:
        yield
    except RuntimeError as error:
        # gloo has no error class of its own; its messages begin with the file that raised them.
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        lines = str(error).splitlines() or [type(error).__name__]
        why = one_line(lines[0].rpartition(".cc:")[2].partition("] ")[2].partition(". ")[0] or lines[0], 200)
        raise LostRankError(f"rank {rank}: another rank is lost ({why}); go on with --resume auto") from None


def _local_gpu(device: torch.device) -> torch.device:
    """The GPU of this rank, among those of its machine."""
    if device.type != "cuda":
        return device
    gpu = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(gpu)
    return gpu
