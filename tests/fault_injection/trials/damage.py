from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from store_fixtures import some_rows, write_dataset

from chatmill.rows import concat
from chatmill.store.read import open_dataset
from chatmill.store.verify import verify_dataset
from fault_injection.processes import outcome
from fault_injection.trial import Tally, Trial


def made(folder: Path, seed: int, *, alike: bool = False) -> Path:
    """Build a dataset with many shards; with `alike`, all shards of a split have files of equal sizes."""
    rows = {"train": some_rows(seed, count=60), "val": some_rows(seed + 1, count=20)}
    if alike:
        one, rng = some_rows(seed, count=9), np.random.default_rng(seed)
        turns = [replace(one, ids=rng.permutation(one.ids)) for _ in range(6)]
        rows = {"train": concat(turns[:4]), "val": concat(turns[4:])}
        write_dataset(folder / "x", rows, shard_tokens=len(one.ids))
    else:
        write_dataset(folder / "x", rows, shard_tokens=100)
    return folder / "x"


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def at_opening(dataset: Path) -> str:
    ended = outcome(lambda: open_dataset(dataset).splits)
    return ended.refused or (f"broke: {ended.broke}" if ended.broke else "")


def in_full(dataset: Path) -> str:
    ended = outcome(lambda: verify_dataset(dataset, full=True).faults)
    return f"broke: {ended.broke}" if ended.broke else next(iter(ended.value), "")


def judge(tally: Tally, line: str, what: str) -> None:
    if not line:
        tally.is_wrong(f"{what}: not detected")
    else:
        tally.judge(found=not line.startswith("broke: ") and "\n" not in line, lost=f"{what}: {line}")


def flip(data: bytes, rng: random.Random) -> bytes:
    at, bit = rng.randrange(len(data)), rng.randrange(8)
    return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]


def flips(size: int, seed: int, folder: Path, tally: Tally) -> None:
    rng, dataset = random.Random(seed), made(folder, seed)
    paths = files_of(dataset)
    for number in range(size):
        path = paths[number % len(paths)]
        whole = path.read_bytes()
        path.write_bytes(flip(whole, rng))
        judge(tally, in_full(dataset), f"a bit flipped in {path.relative_to(dataset)}")
        path.write_bytes(whole)
    assert not in_full(dataset)


def cuts(size: int, seed: int, folder: Path, tally: Tally) -> None:
    rng, dataset = random.Random(seed), made(folder, seed)
    for path in files_of(dataset):
        whole = path.read_bytes()
        lengths = {0, 1, len(whole) // 2, len(whole) - 8, len(whole) - 1}
        lengths |= {rng.randrange(len(whole)) for _ in range(size)}
        chosen = sorted(length for length in lengths if 0 <= length < len(whole))
        for data in [*(whole[:length] for length in chosen[-size:]), whole + b"\0"]:
            path.write_bytes(data)
            what = f"{path.relative_to(dataset)} has {len(data)} bytes instead of {len(whole)}"
            judge(tally, at_opening(dataset), what)
        path.write_bytes(whole)
    assert not in_full(dataset)


def swaps(size: int, seed: int, folder: Path, tally: Tally) -> None:
    rng, dataset = random.Random(seed), made(folder, seed, alike=True)
    paths, aside = files_of(dataset), folder / "aside"
    shards = sorted(dataset.glob("*/shard_*"))

    def exchange(one: Path, other: Path) -> None:
        one.rename(aside)
        other.rename(one)
        aside.rename(other)

    while tally.tried < size:
        number = tally.tried
        one = rng.choice(shards if number % 4 == 3 else paths)
        pool = shards if one in shards else [path for path in paths if path.name == one.name or number % 4 == 2]
        others = [path for path in pool if path != one and _differ(path, one)]
        if not others:
            # There is no other file to exchange this file with, or all other files have the same content.
            continue
        other = rng.choice(others)
        exchange(one, other)
        judge(tally, in_full(dataset), f"{one.relative_to(dataset)} and {other.relative_to(dataset)} swapped")
        exchange(one, other)
    assert not in_full(dataset)


def _differ(one: Path, other: Path) -> bool:
    if one.is_dir():
        return any(_differ(path, other / path.name) for path in one.iterdir())
    return not other.is_file() or one.read_bytes() != other.read_bytes()


def missing(size: int, seed: int, folder: Path, tally: Tally) -> None:
    dataset, aside = made(folder, seed), folder / "aside"
    stand_ins: dict[str, Callable[[Path], object]] = {
        "missing": lambda path: None,
        "a folder": lambda path: path.mkdir(),
        "a dangling link": lambda path: path.symlink_to("nothing"),
        "empty": lambda path: path.touch(),
    }
    for path in sorted(dataset.rglob("*")):
        for name, put in list(stand_ins.items())[:size]:
            if name == "empty" and path.is_file() and not path.stat().st_size:
                continue
            path.rename(aside)
            put(path)
            judge(tally, at_opening(dataset), f"{path.relative_to(dataset)} {name}")
            if path.is_dir() and not path.is_symlink():
                path.rmdir()
            elif path.is_symlink() or path.exists():
                path.unlink()
            aside.rename(path)
    assert not in_full(dataset)


def stale(size: int, seed: int, folder: Path, tally: Tally) -> None:
    rng = random.Random(seed)
    dataset = made(folder, seed, alike=True)
    (folder / "other").mkdir()
    other = made(folder / "other", seed + 100, alike=True)
    for number in range(size):
        path = files_of(dataset)[number % len(files_of(dataset))]
        theirs = other / path.relative_to(dataset)
        if not theirs.exists() or theirs.read_bytes() == path.read_bytes():
            theirs = rng.choice(files_of(other))
        shutil.copy(path, folder / "kept")
        shutil.copy(theirs, path)
        if theirs.read_bytes() != (folder / "kept").read_bytes():
            judge(tally, in_full(dataset), f"{path.relative_to(dataset)} from another build")
        shutil.copy(folder / "kept", path)
    assert not in_full(dataset)


FLIPS = Trial(
    "flipped bits, datasets",
    "Flips one bit in one file of a dataset. `verify --full` must find the flipped bit",
    flips,
    full=500,
    short=90,
    in_memory=True,
)
CUTS = Trial(
    "truncated files",
    "Truncates each file at many lengths, or extends it by a byte. Opening the dataset must fail",
    cuts,
    8,
    1,
    in_memory=True,
)
SWAPS = Trial(
    "swapped files",
    "Swaps files and shards of equal sizes, and files of different kinds. `verify --full` must find the swap",
    swaps,
    full=300,
    short=24,
    in_memory=True,
)
STALE = Trial(
    "files from another build",
    "Replaces a file with one from another dataset, of the same size if possible. `verify --full` must find the "
    "wrong file",
    stale,
    full=200,
    short=24,
    in_memory=True,
)
MISSING = Trial(
    "missing files",
    "Removes each file, shard and split, or replaces it with a folder, a dangling link or an empty file. Opening the "
    "dataset must fail",
    missing,
    full=4,
    short=1,
    in_memory=True,
)
