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
    def limited() -> Any:
        if room is None:
            files.disk = Full(free)
        return work()

    if room is not None:
        held = sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
        # The size of a file system must be a multiple of the page size, and at least one page.
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
        tally.notes["builds on a tmpfs of that size"] = size if room else 0
        tally.notes["builds with simulated write errors"] = 0 if room else size
        for number in range(size):
            target, free = place / str(number) / "x", rng.randrange(need)
            target.parent.mkdir()
            over = number % 3 == 2
            if over:
                shutil.copytree(folder / "whole", target)
            workers, where = 1 + number % 2, f"{free} bytes of free space, {1 + number % 2} workers"

            def go(target: Path = target, workers: int = workers, over: bool = over, **options: Any) -> str:
                return build(job, target, workers=workers, unit_bytes=9_000, overwrite=over, **options).sha256

            first = room_left(place, room, free, go)
            if first.broke or first.killed:
                tally.loses(f"{where}: {first.broke or 'killed'}")
            elif target.exists() and digests(target) != right:
                tally.is_wrong(f"{where}: the target is not the expected dataset")
            elif first.value is None and "No space left" not in first.refused:
                tally.loses(f"{where}: {first.refused}")
            else:
                again = apart(lambda go=go: go(resume=True)) if first.value is None else first
                if again.value is None:
                    tally.loses(f"{where}: cannot be resumed: {again.refused or again.broke}")
                elif digests(target) != right:
                    tally.is_wrong(f"{where}: the resumed build has different bytes")
                else:
                    tally.judge(survived=first.value is not None, found=True)
            shutil.rmtree(target.parent)


def runs(size: int, seed: int, folder: Path, tally: Tally) -> None:
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
                tally.loses(f"a run with {free} bytes of free space: {first.broke or again.refused or again.broke}")
            elif weights(place) != right:
                tally.is_wrong(f"a run with {free} bytes of free space: the weights differ")
            else:
                tally.judge(survived=first.value is not None, found=True)
            shutil.rmtree(place)


BUILDS = Trial(
    "full disk, prepare",
    "Builds on a file system of random size. The build must print a one-line error and publish nothing. With more "
    "space, `--resume` must give the same bytes",
    work,
    full=100,
    short=4,
)
RUNS = Trial(
    "full disk, training",
    "Trains on a file system of random size. The run must print a one-line error. With more space, the resumed run "
    "must give a bitwise identical result",
    runs,
    full=40,
    short=2,
)
