"""Turn GPU and host out-of-memory errors into a one-line error that suggests which settings to change."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from chatmill.train.config import TrainConfig
from chatmill.train.distributed import World
from chatmill.train.lost_ranks import RankError
from chatmill.train.optimizers import OPTIMIZER_BYTES

HOST_MEMORY_ERRORS = ("DefaultCPUAllocator", "Storage size calculation overflowed")
"""Parts of torch's messages when the host is out of memory. torch has no error class for these errors."""


SMALLEST = "adamw8bit"
"""The optimizer with the smallest memory footprint."""


class OutOfMemoryError(RankError):
    """Raised if a GPU or the host is out of memory, possibly on a single rank only."""


@contextmanager
def memory_errors(config: TrainConfig, world: World) -> Iterator[None]:
    """Convert out-of-memory errors from torch and Python to `OutOfMemoryError`."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise _out_of_memory(config, world, on_gpu=True) from None
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not any(part in str(error) for part in HOST_MEMORY_ERRORS):
            raise
        raise _out_of_memory(config, world, on_gpu=False) from None


def _out_of_memory(config: TrainConfig, world: World, *, on_gpu: bool) -> OutOfMemoryError:
    rank = f"rank {world.rank}: " if world.size > 1 else ""
    rows = config.batch_size // world.size // config.gradient_accumulation_steps
    load = f"with {rows} rows of {config.block_size} tokens at a time"
    if not on_gpu:
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
        return OutOfMemoryError(
            f"{rank}the host is out of memory (it has {size:.1f} GiB) {load}; "
            "lower batch_size, block_size or max_positions, or use a smaller model"
        )
    taken = ""
    if world.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(world.device)
        taken = f" ({(total - free) / 2**30:.1f} of {total / 2**30:.1f} GiB are in use)"
    lower = "set activation_checkpointing"
    if config.activation_offload:
        lower = "lower batch_size or block_size"
    elif config.activation_checkpointing:
        lower = "set activation_offload"
    return OutOfMemoryError(
        f"{rank}the GPU is out of memory{taken} {load}; "
        f"raise gradient_accumulation_steps from {config.gradient_accumulation_steps}, or {lower}{_smaller(config)}"
    )


def _smaller(config: TrainConfig) -> str:
    """Suggest the optimizer with the lowest memory use if the run fine-tunes all weights with another optimizer."""
    if config.lora is not None or config.optimizer == SMALLEST:
        return ""
    mine, other = OPTIMIZER_BYTES[config.optimizer], OPTIMIZER_BYTES[SMALLEST]
    return f", or set optimizer to {SMALLEST} ({other.total} bytes per parameter instead of {mine.total})"
