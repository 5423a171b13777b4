from __future__ import annotations

import os
import random
import resource
import shutil
import signal
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from load_fixtures import talks, write_rows
from store_fixtures import equal, some_rows, write_dataset

from chatmill.errors import ChatmillError
from chatmill.load import EpisodeLoader
from chatmill.rows import Rows
from chatmill.store.files import disk
from chatmill.store.read import open_dataset
from chatmill.store.verify import verify_dataset
from fault_injection.processes import apart, outcome
from fault_injection.trial import Tally, Trial

CONFIG = {"batch_size": 4, "block_size": 32, "use_loss_mask": True}
SOURCES = 5
BATCHES = 12


def rows_judged(tally: Tally, dataset: Any, right: dict[str, Rows]) -> None:
    rows = right[dataset.sha256]
    ended = outcome(lambda: equal(dataset["train"].rows(range(len(rows))), rows))
    if ended.value is False:
        tally.is_wrong(f"the rows are not those of dataset {dataset.sha256[:12]}")
    else:
        found = bool(ended.refused) and "\n" not in ended.refused
        tally.judge(survived=bool(ended.value), found=found, lost=ended.broke or ended.refused)


def exchange(size: int, seed: int, folder: Path, tally: Tally) -> None:
    x, y = folder / "x", folder / "y"
    right = {}
    for number, path in enumerate((x, y)):
        rows = some_rows(seed + number, count=12)
        right[write_dataset(path, {"train": rows}).sha256] = rows
    pid = os.fork()
    if not pid:
        while os.getppid() != 1:
            disk.exchange(x, y)
        os._exit(0)
    try:
        for _ in range(size):
            try:
                dataset = open_dataset(x)
            except ChatmillError as error:
                tally.judge(found="\n" not in str(error), lost=str(error))
                continue
            rows_judged(tally, dataset, right)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    for number in range(max(2, size // 50)):
        dataset = open_dataset(x)
        for again in range(3):
            rows = some_rows(seed + 2 + 3 * number + again, count=12)
            right[write_dataset(x, {"train": rows}, overwrite=True).sha256] = rows
            rows_judged(tally, dataset, right)


def batches_of(folder: Path, config: dict[str, Any], count: int, before: Callable[[int], None]) -> list[Any]:
    loader = EpisodeLoader(folder, config, tensors=False, ahead=0)
    arrays = []
    for number, batch in enumerate(islice(loader, count)):
        arrays.append([np.asarray(column).tolist() for column in batch])
        before(number)
    return arrays


def cut(size: int, seed: int, folder: Path, tally: Tally) -> None:
    rng = random.Random(seed)
    write_rows(folder / "whole", {"train": talks(seed, 1500)}, shard_tokens=1 << 20)
    right = batches_of(folder / "whole", CONFIG, 300, lambda number: None)
    files = sorted(path.name for path in (folder / "whole/train/shard_00000").iterdir())
    for number in range(size):
        part = folder / f"part{number}"
        shutil.copytree(folder / "whole", part)
        path = part / "train/shard_00000" / files[number % len(files)]
        there = path.stat().st_size
        to = rng.choice([0, rng.randrange(there), there // 4096 * 4096, there - 1, there - rng.randrange(1, 64)])
        when = rng.choice([0, rng.randrange(300)])

        def attempt(part: Path = part, path: Path = path, to: int = to, when: int = when) -> bool:
            def before(batch: int) -> None:
                if batch == when:
                    os.truncate(path, to)

            return batches_of(part, CONFIG, 300, before) == right

        ended = apart(attempt)
        what = f"{path.name} truncated from {there} to {to} bytes after batch {when}"
        if ended.value is False:
            tally.is_wrong(f"{what}: wrong batches")
        else:
            found = bool(ended.refused) and "\n" not in ended.refused
            tally.judge(survived=bool(ended.value), found=found, lost=f"{what}: {ended.broke or ended.refused}")
        shutil.rmtree(part)


def in_any_order(files: list[Path], rng: random.Random) -> list[Path]:
    return rng.sample(files, len(files))


def kind_by_kind(files: list[Path], rng: random.Random) -> list[Path]:
    kinds = sorted({path.name for path in files})
    rng.shuffle(kinds)
    return sorted(files, key=lambda path: (path.name == "dataset_metadata.json", kinds.index(path.name)))


def shard_by_shard(files: list[Path], rng: random.Random) -> list[Path]:
    """Return the tokenizer state, and the token, mask and index files of some shards."""
    shards = sorted(path.parent for path in files if path.name == "tokens.bin")[: rng.randrange(1, 5)]
    state = [path for path in files if path.name == "tokenizer_state.json"]
    return state + [shard / name for shard in shards for name in PLAIN]


PLAIN = ("tokens.bin", "mask.bin", "episodes.idx")
COPIES: tuple[Callable[[list[Path], random.Random], list[Path]], ...] = (in_any_order, kind_by_kind, shard_by_shard)


def partial(size: int, seed: int, folder: Path, tally: Tally) -> None:
    rng = random.Random(seed)
    whole = folder / "whole"
    write_dataset(whole, {"train": some_rows(seed, count=30), "val": some_rows(seed + 1, count=9)}, shard_tokens=60)
    files = sorted(path for path in whole.rglob("*") if path.is_file())
    for number in range(size):
        order = COPIES[number % len(COPIES)](files, rng)
        copied = order[: rng.randrange(len(files))]
        part = folder / f"part{number}"
        part.mkdir()
        for path in copied:
            to = part / path.relative_to(whole)
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, to)
        if copied and rng.random() < 0.3:
            os.truncate(to, rng.randrange(to.stat().st_size + 1))
        ours = any(path.name not in PLAIN for path in copied)
        ended = apart(
            lambda part=part: [len(open_dataset(part)["train"]), list(verify_dataset(part, full=True).faults)]
        )
        what = f"a copy of {len(copied)} of {len(files)} files"
        if ended.value is not None and ours:
            tally.is_wrong(f"{what} opens with {ended.value[0]} episodes")
        else:
            # A copy with only tokens, masks and indices looks like a dataset written by another program.
            found = bool(ended.refused) and "\n" not in ended.refused
            tally.judge(survived=ended.value is not None, found=found, lost=f"{what}: {ended.broke or ended.refused}")
        shutil.rmtree(part)


def descriptors(size: int, seed: int, folder: Path, tally: Tally) -> None:
    config = {**CONFIG, "batch_size": 40, "mix_sft": {f"s{number}": 1 for number in range(SOURCES)}}
    for number in range(SOURCES):
        write_rows(folder / f"mix/s{number}", {"train": talks(seed + number, size)}, shard_tokens=1)
    right = batches_of(folder / "mix", config, BATCHES, lambda number: None)
    for spare in (6, 64):

        def attempt(spare: int = spare) -> bool:
            used = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
            resource.setrlimit(resource.RLIMIT_NOFILE, (used + spare, used + spare))
            return batches_of(folder / "mix", config, BATCHES, lambda number: None) == right

        ended = apart(attempt)
        if ended.value is False:
            tally.is_wrong(f"wrong batches with {spare} free descriptors")
        else:
            tally.judge(survived=bool(ended.value), lost=f"{spare} free descriptors: {ended.broke or ended.refused}")


EXCHANGED = Trial(
    "datasets replaced while being read",
    "Opens and reads a dataset while another process keeps replacing it. Reading must give the rows of the dataset "
    "that was opened, or a one-line error",
    exchange,
    full=3_000,
    short=60,
)
CUT = Trial(
    "files truncated while being read",
    "Truncates a file of a dataset while a loader has it open. The loader must give the right batches, or a "
    "one-line error that names the file",
    cut,
    full=600,
    short=12,
    in_memory=True,
)
PARTIAL = Trial(
    "interrupted copies",
    "Interrupts a copy of a dataset after any number of files. Opening or verifying an incomplete copy must fail, "
    "unless the copy looks like a dataset from another program",
    partial,
    full=2_000,
    short=40,
    in_memory=True,
)
DESCRIPTORS = Trial(
    "few file descriptors",
    f"Mixes {SOURCES} sources with many shards each, with only 6 or 64 free file descriptors. The batches must be the "
    "same as without the limit",
    descriptors,
    full=256,
    short=24,
    in_memory=True,
)
