from __future__ import annotations

import gzip
import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from chatmill.errors import RecordError
from chatmill.prepare.engine import LocalEngine
from chatmill.prepare.job import InputSource, Job
from chatmill.prepare.pipeline import prepare_dataset
from chatmill.rows import Rows, concat
from chatmill.store.metadata import Metadata
from chatmill.store.read import open_dataset

WORDS = ("mill ", "grain ", "flour, ", "the ", "Mühle ", "水 ", "and ", "a stone\n", "<|im_end|>", "turns ")
FILES = ("a.jsonl", "b.jsonl.gz", "c.json", "d.jsonl")

JOBS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cut": {"max_tokens": 140},
    "turns": {"fit": "turns", "max_tokens": 90},
    "pack": {"pack": 300},
    "windows": {"fit": "windows", "max_tokens": 96, "val_split": 0.2},
    "blocks": {"format": "post-training", "fit": "blocks", "max_tokens": 200, "val_split": 0.1},
    "dedupe": {"dedupe": True, "val_split": 0.2},
    "shuffle": {"split": "shuffle", "seed": 7, "val_split": 0.15},
    "all at once": {"fit": "windows", "max_tokens": 120, "pack": 240, "dedupe": True, "val_split": 0.1},
    "unroll": {"unroll": True, "max_tokens": 150, "pack": 400, "dedupe": True, "split": "shuffle", "val_split": 0.1},
}


HOLD = """
import time
from chatmill.prepare import engine

run_unit = engine.run_unit
engine.run_unit = lambda unit, *args: time.sleep(3600) if unit.name != "a.jsonl" else run_unit(unit, *args)
"""
"""Code for a subprocess: workers block at every unit that is not part of `a.jsonl`."""


def conversations(count: int, seed: int = 1) -> list[dict[str, Any]]:
    """Return short and long conversations, including duplicates and conversations without an answer."""
    rng = random.Random(seed)

    def text(most: int) -> str:
        return "".join(rng.choices(WORDS, k=rng.randint(1, most)))

    made: list[dict[str, Any]] = []
    for _ in range(count):
        if made and rng.random() < 0.1:
            made.append({"messages": rng.choice(made)["messages"]})
            continue
        messages = [{"role": "system", "content": text(4)}] if rng.random() < 0.3 else []
        for _ in range(rng.randint(1, 4)):
            messages.append({"role": "user", "content": text(8)})
            if rng.random() < 0.95:
                messages.append({"role": "assistant", "content": text(12)})
        made.append({"messages": messages})
    return made


def lines(records: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(record, ensure_ascii=False).encode() + b"\n" for record in records)


def write_corpus(folder: Path, count: int = 900) -> tuple[str, ...]:
    records, third = conversations(count), count // 3
    (folder / "a.jsonl").write_bytes(lines(records[:third]))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines(records[third : 2 * third]), mtime=0))
    (folder / "c.json").write_text(json.dumps(records[2 * third :], ensure_ascii=False, indent=1))
    (folder / "d.jsonl").write_bytes(lines(records[: third // 2]))
    return tuple(str(folder / name) for name in FILES)


def job_of(inputs: tuple[str, ...], **options: Any) -> Job:
    return Job((InputSource(inputs, "messages"),), **{"shard_tokens": 20_000, **options})


def build(job: Job, target: Path, *, workers: int = 1, **options: Any) -> Metadata:
    return prepare_dataset(job, target, engine=LocalEngine(workers), **options)


def digests(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def left_beside(target: Path) -> list[str]:
    return sorted(path.name for path in target.parent.glob(f".{target.name}.*"))


def stored_rows(folder: Path, split: str) -> Rows:
    episodes = open_dataset(folder)[split]
    return episodes.rows(np.arange(len(episodes)))


def told(rows: Rows) -> Iterator[tuple[Any, ...]]:
    rows.check()
    weights = rows.weights()
    for segment, origin in enumerate(rows.origins):
        start, stop = rows.segment_start[segment : segment + 2]
        spans = rows.spans[rows.first_span[segment] : rows.first_span[segment + 1]]
        yield (
            rows.files[origin["file"]],
            int(origin["line"]),
            bytes(origin["key"]),
            rows.ids[start:stop].tobytes(),
            weights[start:stop].tobytes(),
            spans.tobytes(),
        )


def assert_equal(one: Rows, other: Rows) -> None:
    """Assert that the rows are equal; file numbers may differ if they refer to the same files."""
    assert list(told(one)) == list(told(other))
    assert np.array_equal(one.first_segment, other.first_segment)


def joined(parts: Any) -> Rows:
    return concat(list(parts))


class Faults(list[tuple[str, int, str]]):
    def __call__(self, fault: RecordError) -> None:
        self.append((Path(fault.file).name, fault.line, fault.kind))
