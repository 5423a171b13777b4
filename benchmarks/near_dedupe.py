"""Compare the time and memory to remove near-duplicates with those of datatrove's MinHash.

    python benchmarks/near_dedupe.py [--json]

Every tenth conversation is a copy of an earlier conversation with one word changed. `chatmill prepare --near-dedupe
0.8` reads, renders, compares and writes the conversations with one worker per core. datatrove runs its four stages
(signatures, buckets, clusters, filter) on the same texts with the same number of workers. Here, datatrove splits words
at spaces, which is faster than its default. Memory is the PSS of all processes together. The script exits with 1 if a
target is missed.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from corpus import DATA, prose_and_code, tokenizer_file
from measure import machine, report, versions, watched

from chatmill.store.read import open_dataset

CORES = len(os.sched_getaffinity(0))
LIMIT = 2e9
WORD = re.compile("[A-Za-z]+")
LINE = '{"messages": [{"role": "user", "content": "%s"}, {"role": "assistant", "content": "%s"}]}\n'
GROWTH = 1.2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--records",
        type=int,
        default=1_000_000,
        help="number of records in the smaller build; the larger build has four times as many",
    )
    parser.add_argument(
        "--peer-records", type=int, default=100_000, help="number of records for the comparison with datatrove"
    )
    parser.add_argument("--peer-python", default=sys.executable, help="Python interpreter with datatrove installed")
    parser.add_argument("--side", type=Path, metavar="FOLDER", help="run only datatrove, on the texts in this folder")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.side:
        datatrove_stages(args.side)
        return 0
    DATA.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=DATA) as temporary:
        folder = Path(temporary)
        beside = side_by_side(folder, args.peer_records, args.peer_python)
        sizes = [one_size(folder, count) for count in (args.records, 4 * args.records)]
    small, large = (size["memory"] for size in sizes)
    kept = small < LIMIT and large <= GROWTH * small
    name = [args.peer_python, "-c", "import importlib.metadata as m; print(m.version('datatrove'))"]
    packages = versions("chatmill", "rensa", "numpy")
    packages["datatrove"] = subprocess.run(name, capture_output=True, text=True, check=True).stdout.strip()
    lines = [
        (
            f"{beside['records']:,} records: chatmill prepare",
            f"{beside['seconds']:.1f} s, {beside['removed']:,} removed",
        ),
        (
            f"{beside['records']:,} records: datatrove {packages['datatrove']}, four stages",
            f"{beside['peer_seconds']:.1f} s, {beside['peer_removed']:,} removed",
        ),
        *(
            (f"{size['records']:,} records", f"{size['seconds']:.1f} s, {size['memory'] / 1e6:,.0f} MB")
            for size in sizes
        ),
        (
            "memory under 2 GB, and at most 1.2 times as much for four times the records",
            "met" if kept else "MISSED",
        ),
    ]
    title = f"near-duplicates; {machine('chatmill', 'rensa', 'numpy')}"
    report(title, lines, {"beside": beside, "sizes": sizes, "kept": kept, "versions": packages}, as_json=args.json)
    return int(not kept)


def side_by_side(folder: Path, count: int, peer_python: str) -> dict[str, Any]:
    ours = one_size(folder, count, keep_texts=True)
    theirs = folder / "peer"
    began = time.perf_counter()
    _, peak = watched([peer_python, __file__, "--side", theirs])
    seconds = time.perf_counter() - began
    left = sum(file.read_bytes().count(b"\n") for file in (theirs / "kept").rglob("*.jsonl"))
    shutil.rmtree(theirs)
    return {
        **ours,
        "changed": changed(count),
        "peer_seconds": seconds,
        "peer_memory": peak,
        "peer_removed": count - left,
        "times": seconds / ours["seconds"],
    }


def one_size(folder: Path, count: int, *, keep_texts: bool = False) -> dict[str, Any]:
    path, dataset = folder / "chat.jsonl", folder / "dataset"
    write_records(path, count, folder / "peer" / "texts" if keep_texts else None)
    options = ["--near-dedupe", "0.8", "--tokenizer", tokenizer_file(), "--shape", "messages", "--workers", CORES]
    began = time.perf_counter()
    _, peak = watched([sys.executable, "-m", "chatmill", "prepare", path, "-o", dataset, *options])
    seconds = time.perf_counter() - began
    removed = open_dataset(dataset).metadata.ledger.total("dropped").rows
    shutil.rmtree(dataset)
    path.unlink()
    print(f"{count:,} records: {seconds:.1f} s, {peak / 1e6:,.0f} MB", file=sys.stderr, flush=True)
    return {"records": count, "seconds": seconds, "memory": peak, "removed": removed}


# Records.


def changed(count: int) -> int:
    return sum(number % 10 == 9 for number in range(count))


def write_records(path: Path, count: int, texts: Path | None) -> None:
    """Write questions of 8 words and answers of 12 words. Every tenth record is a copy of an earlier record with
    the last word changed.
    """
    rng = random.Random(0)
    words = sorted({word for part in prose_and_code(rng)[0] for word in part.split() if WORD.fullmatch(word)})
    earlier: list[list[str]] = []
    parts = []
    if texts is not None:
        texts.mkdir(parents=True)
        parts = [(texts / f"{number}.jsonl").open("w", encoding="utf-8") for number in range(CORES)]
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            if number % 10 == 9:
                chosen = [*rng.choice(earlier)[:-1], rng.choice(words)]
            else:
                chosen = rng.choices(words, k=20)
                if len(earlier) < 10_000:
                    earlier.append(chosen)
                else:
                    earlier[number % 10_000] = chosen
            question, answer = " ".join(chosen[:8]), " ".join(chosen[8:])
            # Plain letters need no escaping in JSON.
            file.write(LINE % (question, answer))
            if parts:
                parts[number % CORES].write(f'{{"text": "{question} {answer}", "id": "{number}"}}\n')
    for part in parts:
        part.close()


# The peer.


def datatrove_stages(folder: Path) -> None:
    """Run the four stages of datatrove's example with its defaults: 14 buckets of 8 hashes."""
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.dedup import MinhashDedupCluster, MinhashDedupFilter, MinhashDedupSignature, minhash
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.writers.jsonl import JsonlWriter

    # datatrove's own word tokenizers need spaCy or NLTK, and are many times slower than splitting at spaces.
    minhash.load_word_tokenizer = lambda language: SimpleNamespace(word_tokenize=str.split)
    config = minhash.MinhashConfig()
    names = ("texts", "signatures", "buckets", "removed", "kept")
    texts, signatures, buckets, removed, kept = (str(folder / name) for name in names)
    reader = JsonlReader(texts)
    stages: list[tuple[list[Any], int]] = [
        ([reader, MinhashDedupSignature(signatures, config=config)], CORES),
        ([minhash.MinhashDedupBuckets(signatures, buckets, config=config)], config.num_buckets),
        ([MinhashDedupCluster(buckets, removed, config=config)], 1),
        ([reader, MinhashDedupFilter(removed), JsonlWriter(kept, compression=None)], CORES),
    ]
    for number, (pipeline, tasks) in enumerate(stages):
        LocalPipelineExecutor(
            pipeline=pipeline, tasks=tasks, workers=CORES, logging_dir=str(folder / f"logs{number}")
        ).run()


if __name__ == "__main__":
    sys.exit(main())
