"""The disk is full: one line, nothing published, and when there is room again the work goes on to the same bytes."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prepare_fixtures import build, digests, job_of, write_corpus

from chatmill.store import files
from fault_injection.disks import Full, Room, small_room
from fault_injection.processes import Ended, apart, load_torch
from fault_injection.trial import Tally, Trial

PLENTY = 64 << 20


def room_left(place: Path, room: Room | None, free: int, work: Callable[[], Any]) -> Ended:
    """Do the work in a process of its own with so much room, by the file system or else by the seam for writing."""

    def limited() -> Any:
        if room is None:
            files.disk = Full(free)
        return work()

    if room is not None:
        held = sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
        # A file system of pages: less than one cannot be.
        room.resize(max(4096, held + free) & ~4095)
    ended = apart(limited)
    if room is not None:
        room.resize(PLENTY)
    return ended


def work(size: int, seed: int, folder: Path, tally: Tally) -> None:
    rng = random.Random(seed)
    inputs = write_corpus(folder, 150)
    job = job_of(inputs, val_split=0.2, shard_tokens=8_000)
    build(job, folder / "whole")
    right = digests(folder / "whole")
    need = 3 * sum(path.stat().st_size for path in (folder / "whole").rglob("*") if path.is_file())
    with small_room(folder / "room", PLENTY) as room:
        place = folder / "room"
        tally.notes["with a tmpfs of that size"] = size if room else 0
        tally.notes["with writes that fail"] = 0 if room else size
        for number in range(size):
            target, free = place / str(number) / "x", rng.randrange(need)
            target.parent.mkdir()
            over = number % 3 == 2
            if over:
                shutil.copytree(folder / "whole", target)
            workers, where = 1 + number % 2, f"{free} bytes of room, {1 + number % 2} workers"

            def go(target: Path = target, workers: int = workers, over: bool = over, **options: Any) -> str:
                return build(job, target, workers=workers, unit_bytes=9_000, overwrite=over, **options).sha256

            first = room_left(place, room, free, go)
            if first.broke or first.killed:
                tally.loses(f"{where}: {first.broke or 'killed'}")
            elif target.exists() and digests(target) != right:
                tally.is_wrong(f"{where}: something else than the dataset is there")
            elif first.value is None and "No space left" not in first.refused:
                tally.loses(f"{where}: {first.refused}")
            else:
                again = apart(lambda go=go: go(resume=True)) if first.value is None else first
                if again.value is None:
                    tally.loses(f"{where}: does not go on: {again.refused or again.broke}")
                elif digests(target) != right:
                    tally.is_wrong(f"{where}: the resumed build has other bytes")
                else:
                    tally.judge(survived=first.value is not None, found=True)
            shutil.rmtree(target.parent)


def runs(size: int, seed: int, folder: Path, tally: Tally) -> None:
    """A run whose checkpoints or audit log do not fit stops with one line, and goes on to the same bits."""
    from train_fixtures import prepare, trained

    load_torch()
    rng, data = random.Random(seed), prepare(folder, "sums", "--val-split", "0.2", seed=seed)

    def run(place: Path) -> str:
        steps: dict[str, Any] = {"max_iters": 6, "save_interval": 2, "audit_dir": str(place / "logs")}
        return str(trained(data, place, resume="auto", **steps).checkpoint)

    def weights(place: Path) -> dict[str, str]:
        last = max((place / "run").glob("step_*"))
        return {name: hash for name, hash in digests(last).items() if "safetensors" in name}

    assert apart(lambda: run(folder / "whole")).value
    right = weights(folder / "whole")
    need = sum(path.stat().st_size for path in (folder / "whole").rglob("*") if path.is_file())
    with small_room(folder / "room", PLENTY) as room:
        for number in range(size):
            place, free = folder / "room" / str(number), rng.randrange(need)
            place.mkdir()
            first = room_left(folder / "room", room, free, lambda place=place: run(place))
            again = apart(lambda place=place: run(place)) if first.refused else first
            if again.value is None:
                tally.loses(f"a run with {free} bytes of room: {first.broke or again.refused or again.broke}")
            elif weights(place) != right:
                tally.is_wrong(f"a run with {free} bytes of room: other weights")
            else:
                tally.judge(survived=first.value is not None, found=True)
            shutil.rmtree(place)


BUILDS = Trial(
    "full disk, prepare",
    "builds on a file system of random size: a one-line error, nothing is published, and with more space `--resume` "
    "gives the same bytes",
    work,
    full=100,
    short=4,
)
RUNS = Trial(
    "full disk, training",
    "runs on a file system of random size: a one-line error, and with more space they resume with bitwise the same "
    "result",
    runs,
    full=40,
    short=2,
)
