from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
from forged_metadata import FORGED, rewrite
from record_mutations import broken_value
from store_fixtures import FIELDS, some_rows, write_dataset

from chatmill.store.layout import METADATA
from chatmill.store.read import open_dataset
from chatmill.store.verify import verify_dataset
from fault_injection.processes import outcome
from fault_injection.trial import Tally, Trial

NUMBERS = (-1, 0, 1, 2**31, 2**32, 2**53 + 1, 2**62, 2**63, 2**64, 10**30, 0.5, 1e308, True, None, "7", [7])
PATHS = ("..", "../x", "/etc/passwd", "a/../../b", "", ".", "\0", "train/shard_00000", "x" * 5000, "shard_00001")


class Watched:
    """Records every file that is opened while it is active, through Python's audit hook.

    The hook does not see the dataset's own files, because they are opened relative to a folder descriptor.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.opened: list[str] = []
        self.is_on = False
        sys.addaudithook(self._hear)

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if self.is_on and event == "open" and isinstance(args[0], str | bytes | os.PathLike):
            self.opened.append(os.path.realpath(self._folder / os.fsdecode(args[0])))


def lie(data: dict[str, Any], rng: random.Random) -> str:
    at: Any = data
    path: list[Any] = []
    while True:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        key = rng.choice(keys)
        path.append(key)
        if isinstance(at[key], dict | list) and at[key] and rng.random() < 0.9:
            at = at[key]
            continue
        old = at[key]
        if isinstance(old, bool | int | float) and rng.random() < 0.8:
            at[key] = rng.choice([*NUMBERS, old + 1, old - 1, old * 2])
        elif isinstance(old, str) and rng.random() < 0.8:
            at[key] = rng.choice([*PATHS, old + "x", old[:-1], "0" * 64])
        elif isinstance(at, dict) and rng.random() < 0.5:
            at[rng.choice(PATHS)] = at.pop(key)
        else:
            at[key] = json.loads(json.dumps(broken_value(old, rng)).replace('"@nest@"', "[[[]]]"))
        return ".".join(map(str, path))


def read_all(dataset: Path) -> dict[str, tuple[bytes, ...]]:
    """Return the data of all rows as bytes, without the names of input files, which only the metadata contains."""
    opened = open_dataset(dataset)
    rows = {name: opened[name].rows(np.arange(len(opened[name]))) for name in opened.splits}
    return {name: tuple(getattr(found, field).tobytes() for field in FIELDS) for name, found in rows.items()}


def work(size: int, seed: int, folder: Path, tally: Tally) -> None:
    rng, dataset = random.Random(seed), folder / "x"
    watched = Watched(dataset)
    rows = {"train": some_rows(seed, count=30), "val": some_rows(seed + 1, count=9)}
    write_dataset(dataset, rows)
    right = read_all(dataset)
    path = dataset / METADATA
    whole = path.read_bytes()
    named = list(FORGED)
    for number in range(size):
        what = named[number] if number < len(named) else ""

        def change(data: dict[str, Any], what: str = what) -> None:
            nonlocal changed
            changed = what or lie(data, rng)
            if what:
                FORGED[what][0](data)

        changed = ""
        rewrite(dataset, change)
        same = path.read_bytes() == whole
        watched.opened, watched.is_on = [], True
        ended = outcome(lambda: verify_dataset(dataset, full=True).faults)
        opened = outcome(lambda: read_all(dataset).items() <= right.items())
        watched.is_on = False
        inside = str(dataset.resolve())
        outside = [
            name for name in watched.opened if not name.startswith(inside) and not name.endswith((".py", ".pyc"))
        ]
        path.write_bytes(whole)
        if outside:
            tally.is_wrong(f"{changed}: {outside[0]} was opened")
        elif ended.broke or opened.broke:
            tally.loses(f"{changed}: {ended.broke or opened.broke}")
        elif what and FORGED[what][1] not in next(iter(ended.value), ""):
            tally.is_wrong(f"{changed}: {ended.value or 'not detected'}")
        elif opened.value is False and not ended.value:
            tally.is_wrong(f"{changed}: wrong rows were read without an error")
        elif any("\n" in line for line in [*ended.value, opened.refused]):
            tally.loses(f"{changed}: the error has more than one line")
        else:
            # Values that do not affect rows, such as names, may change.
            tally.judge(survived=same or not ended.value, found=True)


TRIAL = Trial(
    "hostile metadata",
    "Writes metadata with a correct hash, but with wrong sizes, counts, names or types. The dataset must be refused "
    "with a one-line error or give the original rows. No file outside the dataset may be opened",
    work,
    full=10_000,
    short=100,
    in_memory=True,
)
