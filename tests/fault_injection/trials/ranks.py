"""A rank of a torchrun job is killed: all ranks end, are started again, and the run comes to the same bits."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from prepare_fixtures import digests

from fault_injection import TESTS
from fault_injection.trial import Tally, Trial

LATER = 0.05
"""Seconds, at most, from a step to the kill."""
PROGRESS_SECONDS = 600
"""Without a change to any file of the run for so long, its ranks wait for one another for ever."""
# Ranks that are started again meet in a store of their own: in the agent's they would look for those that are gone.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def torchrun(folder: Path, restarts: int, *args: object) -> tuple[int, str]:
    """Two ranks under torchrun; its exit code, -1 if it makes no progress, and the last error that it printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", str(restarts), "--monitor-interval", "0.1"]
    command += [str(TESTS / "fault_injection" / "rank.py"), *map(str, args)]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=errors, env={**os.environ, **ENVIRONMENT}, start_new_session=True
        )
        before, at = files_in(folder), time.monotonic()
        try:
            while process.poll() is None and time.monotonic() - at < PROGRESS_SECONDS:
                time.sleep(0.2)
                if (now := files_in(folder)) != before:
                    before, at = now, time.monotonic()
        finally:
            # Its ranks too, whatever became of it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        if process.wait() == -signal.SIGKILL:
            return -1, f"no file of the run changed for {PROGRESS_SECONDS} seconds"
        errors.seek(0)
        lines = [line.rstrip() for line in errors if "Error" in line]
    return process.returncode, lines[-2] if len(lines) > 1 else "".join(lines)


def files_in(folder: Path) -> list[tuple[str, int, int]]:
    """Every file below a folder with its size and the time of its last change."""
    listed = []
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            listed.append((str(path), status.st_size, status.st_mtime_ns))
    return sorted(listed)


def work(size: int, seed: int, folder: Path, tally: Tally) -> None:
    from train_fixtures import prepare, ranks

    from fault_injection.rank import STEPS, run

    rng, data = random.Random(seed), str(prepare(folder, "sums", "--val-split", "0.2", seed=seed))

    def weights(name: str) -> dict[str, str]:
        last = max((folder / name).glob("step_*"), default=None)
        return {path: hash for path, hash in digests(last).items() if "safetensors" in path} if last else {}

    ranks(2, lambda _: run(data, str(folder), "undisturbed"))
    right = weights("undisturbed")
    assert right
    for number in range(size):
        name, at, victim = f"run-{number}", rng.randrange(1, STEPS["max_iters"] - 1), rng.randrange(2)
        # Torchrun is to start the ranks again; or it ends, and is itself started again.
        restarts = 1 - number % 2
        args = (data, folder, name, at, victim, rng.uniform(0, LATER))
        code, said = torchrun(folder, restarts, *args)
        where = f"rank {victim} killed after step {at}, {restarts} restarts"
        if not (folder / f"{name}.killed").exists() or bool(code) == bool(restarts):
            tally.loses(f"{where}: exit {code}, {said}")
            continue
        if not restarts:
            code, said = torchrun(folder, 0, *args)
        if code:
            tally.loses(f"{where}: exit {code}, {said}")
        elif weights(name) != right:
            tally.is_wrong(f"{where}: other weights than those of the undisturbed run")
        else:
            tally.survives()


TRIAL = Trial(
    "a torchrun rank killed",
    "SIGKILL of one of two ranks at a random step: the other ends too, torchrun or the next command starts them again, "
    "and weights and moments equal those of an undisturbed run to the bit",
    work,
    full=6,
    short=1,
)
