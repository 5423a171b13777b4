"""Distributed training: the ranks of a run, the communication between them, and models wrapped with DDP or FSDP.

Values that the host needs are exchanged over gloo, so that the host never waits for the GPU.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from chatmill.errors import ChatmillError, DataError, UsageError, system_fault
from chatmill.train.lost_ranks import RankError
from chatmill.train.model import CausalModel

T = TypeVar("T")
Values: TypeAlias = Callable[[], Iterator[tuple[Tensor, Any]]]
"""Yields pairs of a parameter on the meta device and its values, which can be sliced by rows.

The values of a parameter are valid only until the next parameter is requested.
"""


@dataclass(frozen=True)
class World:
    """The rank and device of this process, and the number of ranks."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sums(self, values: Sequence[float]) -> list[float]:
        """Sum each value over all ranks; every rank gets the result."""
        if self.size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor)
        return tensor.tolist()

    def add(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Sum an array of integers over all ranks, modulo 2^64."""
        tensor = torch.from_numpy(numbers.copy())
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor.numpy()

    def gather(self, value: Any) -> list[Any]:
        """Return a list with the JSON value of every rank, on all ranks, without using pickle."""
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
        """Call a function that can fail on some ranks but not on others. With several ranks, a `DataError` is raised as
        a `RankError` that names the rank.
        """
        try:
            return work()
        except DataError as error:
            if self.size == 1:
                raise
            raise RankError(f"rank {self.rank}: {error}") from None

    def distribute(
        self, model: CausalModel, *, sharded: bool, compute: torch.dtype | None, values: Values | None = None
    ) -> nn.Module:
        """Move a model to the device; return a wrapped module that averages gradients over all ranks.

        A sharded model may have parameters on the meta device; `values` yields their values.
        """
        if sharded and dist.is_initialized():
            return _shard(model, self, compute, values)
        model.to(self.device)
        if self.size == 1:
            return model
        ids = [self.device] if self.device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)


def _shard(model: CausalModel, world: World, compute: torch.dtype | None, values: Values | None) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    _check_dtypes(model)
    mesh = init_device_mesh(world.device.type, (world.size,))
    # FSDP gathers layers in compute precision; the embedding, head, last norm and rotary angles stay in float32.
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False)
    own = ((module, name, each) for module in model.modules() for name, each in module._parameters.items())
    places = {id(each): (module, name) for module, name, each in own if each is not None}
    for block in model.blocks():
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))
    if values is not None:
        world.together(lambda: _fill(model, places, values, world.device))
    return model


@torch.no_grad()
def _fill(model: nn.Module, places: Mapping[int, tuple[nn.Module, str]], values: Values, device: torch.device) -> None:
    """Allocate this rank's rows of all sharded parameters, and set their values.

    FSDP replaces each parameter, so `places` maps the `id()` of the original parameter to its module and name.
    """
    model._apply(lambda each: torch.empty_like(each, device=device) if each.device.type == "meta" else each)
    for parameter, rows in values():
        module, name = places[id(parameter)]
        shard = getattr(module, name)
        start, stop = rows_of(shard)
        if start < stop:
            local(shard).copy_(rows[start:stop])


def _check_dtypes(model: CausalModel) -> None:
    """Raise `UsageError` if the trained weights of a layer differ in dtype, because FSDP shards them together."""
    for block in model.blocks():
        dtypes = {str(p.dtype).removeprefix("torch.") for p in block.parameters() if p.requires_grad}
        if len(dtypes) > 1:
            raise UsageError(
                f"parallel is fsdp, and the weights of a layer are {' and '.join(sorted(dtypes))}, which FSDP cannot "
                "shard together; set dtype to bfloat16 or optimizer to adamw, or use ddp"
            )


@contextmanager
def gradient_sync(module: nn.Module, enabled: bool) -> Iterator[None]:
    """Synchronize gradients between ranks in a backward pass only if `enabled` is true."""
    if hasattr(module, "set_requires_gradient_sync"):
        module.set_requires_gradient_sync(enabled)
        yield
    else:
        skip = isinstance(module, nn.parallel.DistributedDataParallel) and not enabled
        with module.no_sync() if skip else nullcontext():
            yield


def is_sharded(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor, without importing `DTensor`, because the import takes seconds."""
    return hasattr(tensor, "device_mesh")


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Gather a tensor from all ranks; all ranks must call this function."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def rows_of(tensor: Tensor) -> tuple[int, int]:
    """Return the range of a tensor's rows on this rank. All shards have the same number of rows, except that the shards
    of the last ranks can be smaller or empty.
    """
    if not is_sharded(tensor):
        return 0, len(tensor) if tensor.ndim else 1
    mesh = tensor.device_mesh
    size = -(-len(tensor) // mesh.size())
    start = min(mesh.get_local_rank() * size, len(tensor))
    stop = min(start + size, len(tensor))
    assert stop - start == len(tensor.to_local())
    return start, stop
