"""Measure how the cost of each operation grows with the size of the dataset, for docs/explanation/scale.md.

    python scripts/scale.py [--episodes 100000 1000000 10000000] [--folder DIR] [--json]

Generates datasets of small episodes (8 tokens on average, about 120 bytes each) in a temporary folder. Also measures
the time to look up one position in the shuffled order of a billion episodes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from chatmill.fit import pack_lengths
from chatmill.ledger import Ledger
from chatmill.load.order import make_order
from chatmill.rows import ORIGIN, OWN_ID, SPAN, File, Rows
from chatmill.store.metadata import Metadata, write_metadata
from chatmill.store.verify import verify_dataset
from chatmill.store.write import SplitWriter

CHUNK = 100_000
BILLION = 10**9
FIRST = """
import sys, time
import chatmill.load.loader as loader
from chatmill.store.read import open_dataset

# Count only anonymous memory: the pages of mapped files belong to the system's cache, and are released on demand.
def memory():
    return int(open("/proc/self/status").read().split("RssAnon:")[1].split()[0]) / 1024

imports, began = memory(), time.perf_counter()
episodes = open_dataset(sys.argv[1])["train"]
episodes.tokens(len(episodes) // 2)
opened = time.perf_counter()
config = {"batch_size": 8, "block_size": 512, "batch_sampling_mode": sys.argv[2], "packing": sys.argv[3]}
reader = loader.EpisodeLoader(sys.argv[1], config, tensors=False, ahead=0)
reader.get_batch()
first = time.perf_counter()
print(1e3 * (opened - began), 1e3 * (first - opened), memory() - imports)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, nargs="+", default=[100_000, 1_000_000, 10_000_000])
    parser.add_argument("--folder", type=Path, help="folder for the datasets, which are removed after the run")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = [measure(count, args.folder) for count in args.episodes]
    shards = {count: many_shards(count, args.folder) for count in (100, 1_000, 10_000)}
    order = {"position_us": microseconds(lambda: make_order("feistel", BILLION, seed=1).block(5, 123_456_789, 1))}
    if args.json:
        print(json.dumps({"sizes": found, "shards": shards, "billion": order}))
        return
    for name in found[0]:
        print(f"{name:<44}" + "".join(f"{each[name]:>14,.4g}" for each in found))
    for count, (opened, size) in shards.items():
        print(f"open {count:,} shards, ms; metadata, kB".ljust(44) + f"{opened:>14,.4g}{size:>14,.4g}")
    print(f"{'look up 1 of 10^9 positions, feistel order, µs':<44}{order['position_us']:>14,.4g}")


def measure(count: int, folder: Path | None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        dataset = Path(temporary)
        write(dataset, count)
        size = sum(path.stat().st_size for path in dataset.rglob("*") if path.is_file())
        opened, feistel, memory = first(dataset, "feistel", "none")
        _, epoch, epoch_memory = first(dataset, "epoch", "none")
        _, packed, packed_memory = first(dataset, "feistel", "bins")
        lengths = np.random.default_rng(0).integers(2, 15, min(count, 1 << 16))
        return {
            "episodes": count,
            "bytes per episode": size / count,
            "open, and read one episode, ms": opened,
            "first batch, feistel order, ms": feistel,
            "  memory without imports, MB": memory,
            "first batch, epoch order, ms": epoch,
            "  memory without imports, MB ": epoch_memory,
            "first packed batch, feistel order, ms": packed,
            "  memory without imports, MB  ": packed_memory,
            "permutation, epoch order, ms": milliseconds(lambda: make_order("epoch", count, seed=1).block(0, 0, 1)),
            "512 positions, feistel order, ms": milliseconds(
                lambda: make_order("feistel", count, seed=1).block(0, 0, 512)
            ),
            "plan for packing 65,536 episodes, ms": milliseconds(lambda: pack_lengths(lengths, 513)),
            "verify, s": milliseconds(lambda: check(dataset, full=False), runs=1) / 1e3,
            "verify --full, s": milliseconds(lambda: check(dataset, full=True), runs=1) / 1e3,
        }


def many_shards(count: int, folder: Path | None) -> tuple[float, float]:
    """Return the time in ms to open a dataset of `count` shards, and the size of its metadata in kB."""
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        dataset = Path(temporary)
        write(dataset, 20 * count, shard_tokens=160)
        opened, *_ = first(dataset, "feistel", "none")
        return opened, (dataset / "dataset_metadata.json").stat().st_size / 1e3


def check(dataset: Path, *, full: bool) -> None:
    if faults := verify_dataset(dataset, full=full).faults:
        raise SystemExit("\n".join(faults))


def write(folder: Path, count: int, *, shard_tokens: int = 1 << 24) -> None:
    """Write a dataset of `count` episodes; each is one conversation with a context span and a trained span."""
    rows = made(min(count, CHUNK))
    ledger = Ledger()
    with SplitWriter(folder / "train", vocab_size=50_000, shard_tokens=shard_tokens) as writer:
        for at in range(0, count, CHUNK):
            writer.append(rows[: min(CHUNK, count - at)])
        info = writer.close()
    tokens, trained = info.num_tokens, info.num_trained_tokens
    ledger.add("read", rows=count)
    ledger.add("rendered", rows=count, tokens=tokens, trained=trained)
    ledger.add("stored", rows=count, tokens=tokens, trained=trained)
    write_metadata(
        folder,
        Metadata(
            vocab_size=50_000,
            format={},
            tokenizer={"name": "made", "sha256": "0" * 64},
            special_token_ids={"eot": 0},
            pad_token_id=0,
            splits={"train": info},
            ledger=ledger,
            config={},
        ),
        tokenizer_state={},
    )


def made(count: int) -> Rows:
    rng = np.random.default_rng(0)
    spans = np.zeros(2 * count, dtype=SPAN)
    spans["length"] = rng.integers(1, 8, len(spans))
    spans["weight"] = np.arange(len(spans)) % 2
    spans["target"] = OWN_ID
    origins = np.zeros(count, dtype=ORIGIN)
    origins["line"] = np.arange(1, count + 1)
    ids = rng.integers(0, 50_000, int(spans["length"].sum())).astype(np.uint32)
    return Rows(ids, spans, np.arange(0, len(spans) + 1, 2), origins, np.arange(count + 1), (File("made", "made"),))


def first(dataset: Path, order: str, packing: str) -> tuple[float, float, float]:
    """Return the time in ms to open a dataset, the time in ms to build the first batch, and the memory use in MB, as
    medians over three processes.
    """
    runs = [
        [
            float(word)
            for word in subprocess.check_output([sys.executable, "-c", FIRST, str(dataset), order, packing]).split()
        ]
        for _ in range(3)
    ]
    opened, batch, memory = np.median(np.array(runs), axis=0).tolist()
    return opened, batch, memory


def milliseconds(work: Callable[[], Any], *, runs: int = 3) -> float:
    taken = []
    for _ in range(runs):
        began = time.perf_counter()
        work()
        taken.append(1e3 * (time.perf_counter() - began))
    return float(np.median(taken))


def microseconds(work: Callable[[], Any]) -> float:
    return 1e3 * milliseconds(lambda: [work() for _ in range(100)]) / 100


if __name__ == "__main__":
    main()
