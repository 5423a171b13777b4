"""The process group of a run, initialized from the variables that torchrun sets."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from chatmill.errors import ChatmillError, UsageError, one_line
from chatmill.train.distributed import World
from chatmill.train.launcher import place_in_world
from chatmill.train.lost_ranks import LostRankError, RankWatch

TIMEOUT = timedelta(minutes=30)
"""Time limit for ranks that wait for another running rank, such as rank 0 while it writes a checkpoint."""


@contextmanager
def init_world(device: str) -> Iterator[World]:
    """Join the process group of torchrun or another launcher; without a launcher, create a world of one rank."""
    chosen = torch.device("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else torch.device(device)
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise UsageError("device is cuda, but torch finds no GPU; expected cpu or auto")
    if dist.is_initialized():
        # Do not destroy the existing process group, because the caller created it.
        with lost_rank_errors(str(dist.get_rank()), lambda: None):
            yield World(dist.get_rank(), dist.get_world_size(), _local_gpu(chosen))
        return
    place = place_in_world()
    if place is None:
        yield World(0, 1, chosen)
        return
    rank, size = place
    chosen = _local_gpu(chosen)
    with join_group("cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo", rank, size, timeout=TIMEOUT):
        yield World(rank, size, chosen)


has_joined = False
"""Whether this process has joined a process group of several ranks."""


@contextmanager
def join_group(backend: str, rank: int, size: int, *, timeout: timedelta) -> Iterator[None]:
    """Join a process group of all ranks. If one rank fails or is unreachable, the other ranks exit within seconds."""
    global has_joined
    has_joined = has_joined or size > 1
    watch: RankWatch | None = None
    try:
        with lost_rank_errors(str(rank), lambda: watch):
            store, _, _ = next(dist.rendezvous("env://", rank, size, timeout=timeout))
            store.set_timeout(timeout)
            if size > 1:
                watch = RankWatch(dist.PrefixStore("chatmill", store), rank, size)
            group_store = dist.PrefixStore("default_pg", store)
            dist.init_process_group(backend, store=group_store, rank=rank, world_size=size, timeout=timeout)
            try:
                yield
            finally:
                dist.destroy_process_group()
    except BaseException as error:
        if watch is not None:
            watch.close(error)
        raise
    if watch is not None:
        watch.close(None)


@contextmanager
def lost_rank_errors(rank: str, watch: Callable[[], RankWatch | None]) -> Iterator[None]:
    """Replace an error caused by a lost rank with a one-line error."""
    try:
        yield
    except ChatmillError:
        raise
    except Exception as error:
        # gloo has no error class, but its messages contain the name of a gloo source file.
        is_collective = isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))
        watching = watch()
        if watching is not None and (is_collective or watching.has_fault) and (lost := watching.explain()):
            raise lost from None
        if not is_collective:
            raise
        lines = str(error).splitlines() or [type(error).__name__]
        why = one_line(lines[0].rpartition(".cc:")[2].partition("] ")[2].partition(". ")[0] or lines[0], 200)
        raise LostRankError(f"rank {rank}: another rank is lost ({why}); continue with --resume auto") from None


def _local_gpu(device: torch.device) -> torch.device:
    """Select this rank's GPU on its node; return other devices unchanged."""
    if device.type != "cuda":
        return device
    index, count = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    if index >= count:
        # With srun --gpus-per-task, each process sees only its own GPU, which has index 0.
        index = 0 if count == 1 else index
    if index >= count:
        raise UsageError(
            f"LOCAL_RANK is {index}, but this node has {count} GPUs; start at most {count} ranks on this node"
        )
    gpu = torch.device("cuda", index)
    torch.cuda.set_device(gpu)
    return gpu
