"""Measure how fast a dataset is written, opened and read: `benchmarks/open.py [--episodes N] [--folder DIR] [--json]`.

The script writes a dataset of 20 million small episodes, which takes up about 3 GB in --folder. New processes open the
dataset and read random episodes, and each read is timed. Writing is also timed with rows as long as chat conversations.
The script exits with 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from measure import machine, report, versions

from chatmill.ledger import Ledger
from chatmill.rows import ORIGIN, OWN_ID, SPAN, File, Rows
from chatmill.store.episodes import Episodes
from chatmill.store.metadata import Metadata, write_metadata
from chatmill.store.read import open_dataset
from chatmill.store.write import SplitWriter

OPEN_MS, READ_US, WRITE_MTOK = 200, 50, 100
READS = 20_000
OPENING = """
import json, sys, time
from chatmill.store.read import open_dataset
started = time.perf_counter()
episodes = open_dataset(sys.argv[1])["train"]
tokens = episodes.tokens(len(episodes) // 2)
taken = time.perf_counter() - started
status = open("/proc/self/status").read()
print(json.dumps({"s": taken, "memory": 1024 * int(status.split("VmHWM:")[1].split()[0])}))
"""
# The minimum work to open a dataset: parse the metadata, and memory-map one file of each kind.
BARE = """
import json, mmap, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
started = time.perf_counter()
json.loads((folder / "dataset_metadata.json").read_bytes())
for path in (folder / "train" / "shard_00000").iterdir():
    with path.open("rb") as file:
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)[0]
print(json.dumps({"s": time.perf_counter() - started}))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=20_000_000)
    parser.add_argument("--folder", type=Path, help="temporary folder for the dataset")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        # Writing is measured first, while no other data is being flushed to disk.
        rows = chunk(20_000, spans=16, longest=97)
        chat = {
            bits: statistics.median(
                write(Path(folder) / f"{bits}-{run}", rows, 160_000, vocab_size=vocab_size) for run in range(3)
            )
            for bits, vocab_size in (("uint16", 50_000), ("uint32", 100_000))
        }
        small = write(Path(folder) / "small", chunk(100_000, spans=2, longest=7), args.episodes, vocab_size=50_000)
        store = Path(folder) / "small"
        opened = [json.loads(python(OPENING, str(store))) for _ in range(5)]
        bare = [json.loads(python(BARE, str(store))) for _ in range(5)]
        reads = read(open_dataset(store)["train"])
        floor_us = bare_read(store)
    open_ms, floor_ms = (1e3 * statistics.median(one["s"] for one in found) for found in (opened, bare))
    memory = max(one["memory"] for one in opened)
    lines = [
        (f"open {args.episodes:,} episodes and read one, in a new process", f"{open_ms:.1f} ms (target {OPEN_MS})"),
        *(
            (
                f"read {what} of a random episode, warm, median and 99th percentile",
                f"{mid:.1f} and {most:.1f} µs (target {READ_US})",
            )
            for what, (mid, most) in reads.items()
        ),
        ("floor: parse the metadata and memory-map five files", f"{floor_ms:.1f} ms"),
        ("floor: read the same number of bytes from a memory map", f"{floor_us:.1f} µs"),
        ("peak memory of the process that opened the dataset", f"{memory / 1e6:.0f} MB"),
        *(
            (f"write rows as long as chat conversations, {bits}, without fsync", f"{speed:.0f} Mtok/s")
            for bits, speed in chat.items()
        ),
        ("write small episodes", f"{small:.0f} Mtok/s"),
    ]
    figures = {
        "episodes": args.episodes,
        "open_ms": open_ms,
        "floor_ms": floor_ms,
        "read_us": reads,
        "floor_us": floor_us,
        "write_mtok": chat,
        "memory": memory,
        "versions": versions("chatmill", "numpy"),
    }
    report(f"store; {machine('numpy')}", lines, figures, as_json=args.json)
    kept = open_ms < OPEN_MS and all(mid < READ_US for mid, _ in reads.values()) and min(chat.values()) > WRITE_MTOK
    return 0 if kept else 1


def chunk(count: int, *, spans: int, longest: int) -> Rows:
    """Return `count` random rows with one conversation each; half of the spans are trained."""
    rng = np.random.default_rng(0)
    table = np.zeros(count * spans, dtype=SPAN)
    table["length"] = rng.integers(1, longest + 1, len(table))
    table["weight"] = np.arange(len(table)) % 2
    table["target"] = OWN_ID
    origins = np.zeros(count, dtype=ORIGIN)
    origins["line"] = np.arange(count)
    first_span = np.arange(0, len(table) + 1, spans)
    ids = rng.integers(0, 50_000, int(table["length"].sum())).astype(np.uint32)
    return Rows(ids, table, first_span, origins, np.arange(count + 1), (File("made", "generator"),))


def write(folder: Path, rows: Rows, count: int, *, vocab_size: int) -> float:
    """Write a dataset of `count` episodes; return the write speed in millions of tokens per second."""
    started = time.perf_counter()
    with SplitWriter(folder / "train", vocab_size=vocab_size, shard_tokens=50_000_000) as writer:
        for at in range(0, count, len(rows)):
            writer.append(rows[: min(len(rows), count - at)])
        info = writer.close()
    taken = time.perf_counter() - started
    write_metadata(
        folder,
        Metadata(
            vocab_size=vocab_size,
            format={},
            tokenizer={"name": "generator", "sha256": "0" * 64},
            special_token_ids={},
            pad_token_id=None,
            splits={"train": info},
            ledger=Ledger(),
            config={},
        ),
        tokenizer_state={},
    )
    return info.num_tokens / taken / 1e6


def read(episodes: Episodes) -> dict[str, tuple[float, float]]:
    """Return the median and the 99th percentile of the time to read one random episode, in microseconds."""
    numbers = np.random.default_rng(1).integers(0, len(episodes), READS).tolist()
    works = {
        "tokens and mask": lambda number: (episodes.tokens(number).sum(), episodes.mask(number).sum()),
        "rows with spans and origins": lambda number: episodes.rows([number]),
    }
    found = {}
    for name, work in works.items():
        for number in numbers:
            work(number)
        taken = []
        for number in numbers:
            started = time.perf_counter()
            work(number)
            taken.append(1e6 * (time.perf_counter() - started))
        found[name] = (statistics.median(taken), statistics.quantiles(taken, n=100)[-1])
    return found


def bare_read(store: Path) -> float:
    """Return the median time, in microseconds, to sum 8 token ids and 8 mask values at a known offset of memory-mapped
    files.
    """
    shard = store / "train" / "shard_00000"
    tokens = np.asarray(np.memmap(shard / "tokens.bin", dtype="<u2", mode="r"))
    mask = np.asarray(np.memmap(shard / "mask.bin", dtype="u1", mode="r"))
    taken = []
    for at in np.random.default_rng(1).integers(0, len(mask) - 8, READS).tolist():
        started = time.perf_counter()
        tokens[at : at + 8].sum(), mask[at : at + 8].sum()
        taken.append(1e6 * (time.perf_counter() - started))
    return statistics.median(taken)


def python(code: str, *args: str) -> str:
    return subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    sys.exit(main())
