"""Crash, damage and cut a dataset, and count what is noticed: `.venv/bin/python scripts/reliability.py [--flips N]`.

Every step of building and publishing a small dataset is recorded and replayed up to each step, with what was not yet
synced lost in four ways; then bits of the finished dataset are flipped and its files cut. Exit 1 if anything is missed.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "store")]

from crash_disk import Model, Recorder, outcomes  # noqa: E402
from store_material import contents, some_rows, write_dataset  # noqa: E402

from chatmill.errors import DataError  # noqa: E402
from chatmill.store import files  # noqa: E402
from chatmill.store.publish import recover  # noqa: E402
from chatmill.store.read import open_dataset  # noqa: E402
from chatmill.store.verify import verify  # noqa: E402

OLD = {"train": some_rows(1, count=30)}
NEW = {"train": some_rows(2, count=60), "val": some_rows(3, count=20)}
WAYS = {
    "a new dataset": {"old": False, "can_exchange": True},
    "over an old one, by exchange": {"old": True, "can_exchange": True},
    "over an old one, by two renames": {"old": True, "can_exchange": False},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        for way, how in WAYS.items():
            missed += told(f"crashes, {way}", crashes(place / way, **how))
        write_dataset(place / "x", NEW, shard_tokens=100)
        shards = len(list((place / "x").glob("*/shard_*")))
        missed += told(f"flipped bits, {shards} shards", flips(place / "x", args.flips, args.seed))
        missed += told("cut files", cuts(place / "x"))
    return 1 if missed else 0


def told(what: str, results: Iterator[bool]) -> int:
    """Print how many of the results are good, and give how many are not."""
    found = list(results)
    print(f"{what:<48} {sum(found):>6} of {len(found):>6} as promised")
    return len(found) - sum(found)


def crashes(folder: Path, *, old: bool, can_exchange: bool) -> Iterator[bool]:
    """After each step of a build and each kind of loss: is the target the old, the new, or (if none was) nothing?"""
    folder.mkdir()
    allowed: set[str | None] = {None}
    if old:
        write_dataset(folder / "x", OLD, shard_tokens=100)
        allowed = {whole(folder / "x")}
    model, recorder = Model(folder), Recorder(folder, can_exchange=can_exchange)
    real, files.disk = files.disk, recorder
    write_dataset(folder / "x", NEW, shard_tokens=100, overwrite=old)
    files.disk = real
    allowed.add(whole(folder / "x"))
    known: dict[tuple[tuple[str, bytes], ...], str | None] = {}
    for number in range(len(recorder.steps) + 1):
        if number:
            recorder.steps[number - 1](model)
        for keep in outcomes(number).values():
            at = folder / "crashed"
            model.crash(at, keep)
            recover(at / "x")
            key = tuple(contents(at / "x").items()) if (at / "x").exists() else ()
            if key not in known:
                known[key] = whole(at / "x") if key else None
            yield known[key] in allowed
            shutil.rmtree(at)


def whole(path: Path) -> str:
    """The hash of a dataset without fault; a name that no dataset has if there is one."""
    found = verify(path, full=True)
    return "; ".join(found.faults) or found.sha256 or "no hash"


def flips(dataset: Path, count: int, seed: int) -> Iterator[bool]:
    """Flip one bit after the other, over all files alike: does `verify --full` find it?"""
    rng = random.Random(seed)
    paths = sorted(path for path in dataset.rglob("*") if path.is_file())
    for number in range(count):
        path = paths[number % len(paths)]
        data = path.read_bytes()
        at, bit = rng.randrange(len(data)), rng.randrange(8)
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :])
        yield bool(verify(dataset, full=True).faults)
        path.write_bytes(data)


def cuts(dataset: Path) -> Iterator[bool]:
    """Cut each file at several lengths: is it refused at opening?"""
    for path in sorted(path for path in dataset.rglob("*") if path.is_file()):
        data = path.read_bytes()
        for size in sorted({0, 1, len(data) // 4, len(data) // 2, len(data) - 8, len(data) - 1}):
            if 0 <= size < len(data):
                path.write_bytes(data[:size])
                yield refused(dataset)
        path.write_bytes(data)


def refused(dataset: Path) -> bool:
    try:
        open_dataset(dataset)
    except DataError:
        return True
    return False


if __name__ == "__main__":
    sys.exit(main())
