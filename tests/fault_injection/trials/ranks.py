from __future__ import annotations

import contextlib
import functools
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from child_processes import start_child
from prepare_fixtures import digests

from fault_injection import TESTS
from fault_injection.trial import Tally, Trial

FIRST: list[Callable[[], None]] = []
"""Functions that each rank calls first if it was started without torchrun, to inject a fault into its process."""
LOST = re.compile(r"chatmill: rank \d on \S+ is lost")
LATER = 0.05
"""Maximum number of seconds between a step and the kill of a rank."""
PROGRESS_SECONDS = 600
"""Seconds without a change to any file of the run after which its ranks are considered stuck."""
# Restarted ranks need a new store: the agent's store would still contain keys of the dead ranks.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def two_machines(folder: Path, args: tuple[Any, ...]) -> tuple[int, str, int]:
    port = free_port()
    meets = [("--nnodes", "2", "--node-rank", str(node), "--master-port", port) for node in range(2)]
    with ThreadPoolExecutor() as threads:
        ends = [threads.submit(torchrun, folder, 0, *args, meets=(*meet, "--nproc-per-node", "1")) for meet in meets]
        codes, errors, lines = zip(*(end.result() for end in ends), strict=True)
    return (1 if all(codes) else 0), " and ".join(errors), sum(lines)


def torchrun(
    folder: Path, restarts: int, *args: object, meets: Sequence[str] = ("--standalone", "--nproc-per-node", "2")
) -> tuple[int, str, int]:
    """Run two ranks under torchrun; return its exit code, its last error, and the number of lines that name a lost
    rank.

    The exit code is -1 if torchrun made no progress.
    """
    command = [sys.executable, "-m", "torch.distributed.run", *meets]
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
            # Ranks may still be running, even if torchrun has ended.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        if process.wait() == -signal.SIGKILL:
            return -1, f"no file of the run changed for {PROGRESS_SECONDS} seconds", 0
        errors.seek(0)
        printed = errors.read().splitlines()
    lines = [line for line in printed if "Error" in line]
    about_ranks = sum(bool(LOST.match(line)) for line in printed)
    return process.returncode, lines[-2] if len(lines) > 1 else "".join(lines), about_ranks


def files_in(folder: Path) -> list[tuple[str, int, int]]:
    listed = []
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            listed.append((str(path), status.st_size, status.st_mtime_ns))
    return sorted(listed)


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def one_rank(first: Sequence[Callable[[], None]], args: tuple[Any, ...]) -> None:
    from fault_injection.rank import run_as_command

    for each in first:
        each()
    run_as_command(*args)


def left_alone(folder: Path, name: str, args: tuple[Any, ...]) -> str:
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": "2"}
    children, outputs = [], [folder / f"{name}-{rank}" for rank in range(2)]
    for rank, output in enumerate(outputs):
        output.mkdir()
        work = functools.partial(one_rank, tuple(FIRST), args)
        children.append(start_child(work, variables={**meet, "RANK": str(rank)}, output=output))
    victim = args[4]
    children[victim].join()
    survivor = children[1 - victim]
    # A rank that does not detect the loss would wait forever.
    survivor.join(PROGRESS_SECONDS)
    ended = survivor.exitcode
    survivor.kill()
    errors = (outputs[1 - victim] / "err").read_text()
    lines = [line for line in errors.splitlines() if line.startswith("chatmill: ")]
    if ended == 1 and len(lines) == 1 and LOST.match(lines[0]) and "Traceback" not in errors:
        return ""
    return f"the other rank ended with {ended} and printed {errors[-300:]}"


def work(size: int, seed: int, folder: Path, tally: Tally) -> None:
    from train_fixtures import curve, prepare, ranks

    from fault_injection.rank import STEPS, run

    rng, data = random.Random(seed), str(prepare(folder, "sums", "--val-split", "0.2", seed=seed))

    def result(name: str) -> Any:
        last = max((folder / name).glob("step_*"), default=None)
        tensors = {path: hash for path, hash in digests(last).items() if "safetensors" in path} if last else {}
        return tensors, curve(folder / name)

    ranks(2, lambda _: run(data, str(folder), "undisturbed"))
    right = result("undisturbed")
    assert right[0]
    for number in range(size):
        name, at, victim = f"run-{number}", rng.randrange(1, STEPS["max_iters"] - 1), rng.randrange(2)
        args = (data, str(folder), name, at, victim, rng.uniform(0, LATER))
        # Without torchrun, or if the other rank is on another node, the remaining rank must end by itself. On the same
        # node, torchrun restarts both ranks, or ends and is started again.
        how = ("left alone", "restarted", "ended by torchrun", "on two machines")[number % 4]
        where = f"rank {victim} killed after step {at}, {how}"
        if how == "left alone":
            fault = left_alone(folder, name, args)
        elif how == "on two machines":
            code, error, lines = two_machines(folder, args)
            fault = "" if code and lines == 1 else f"exit code {code}, {lines} lines about a lost rank, {error}"
        else:
            restarts = int(how == "restarted")
            code, error, lines = torchrun(folder, restarts, *args)
            is_right = bool(code) != bool(restarts) and lines == 1
            fault = "" if is_right else f"exit code {code}, {lines} lines about a lost rank, {error}"
        if fault or not (folder / f"{name}.killed").exists():
            tally.loses(f"{where}: {fault or 'the rank was not killed'}")
            continue
        if how in ("left alone", "on two machines"):
            ranks(2, lambda _, name=name: run(data, str(folder), name))
        elif how == "ended by torchrun":
            code, error, _ = torchrun(folder, 0, *args)
            if code:
                tally.loses(f"{where}: cannot be resumed: exit code {code}, {error}")
                continue
        if result(name) != right:
            tally.is_wrong(f"{where}: weights or losses differ from the uninterrupted run")
        else:
            tally.survives()


TRIAL = Trial(
    "killed torchrun rank",
    "Kills one of two ranks at a random step. The other rank must exit. After a restart, weights, optimizer state "
    "and losses must be bitwise equal to those of an uninterrupted run",
    work,
    full=12,
    short=1,
)
