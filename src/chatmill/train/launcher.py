"""Read the environment variables that a launcher such as torchrun sets: rank, world size and rendezvous address."""

from __future__ import annotations

import os

from chatmill.errors import UsageError, one_line

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def place_in_world() -> tuple[int, int] | None:
    """Return the rank of this process and the world size, or None if no launcher set them."""
    if os.environ.keys() >= set(VARIABLES):
        rank, size = (_number(name) for name in VARIABLES[:2])
        if rank >= size:
            raise UsageError(f"RANK is {rank} and WORLD_SIZE is {size}; expected a rank from 0 to {size - 1}")
        return rank, size
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    if "RANK" not in os.environ and tasks != "1":
        raise UsageError(
            f"srun started {one_line(tasks)} processes without RANK and WORLD_SIZE, so each would be a separate run; "
            f"set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT as examples/cluster/train.sbatch does, or "
            "RANK=0 if this is the only process"
        )
    return None


def _number(name: str) -> int:
    text = os.environ[name]
    if not text.isascii() or not text.isdigit():
        raise UsageError(f"{name} is {one_line(text)!r}; expected an integer, as set by torchrun")
    return int(text)
