"""Measure the start-up time of short commands, as seen from the shell.

    python benchmarks/startup.py              report the best of ten runs of each command
    python benchmarks/startup.py --runs 3     use fewer runs

The commands are `chatmill --help`, and `chatmill prepare` on 100 records with a vocabulary of 128,000 tokens. `prepare`
runs with an empty and with a filled cache of compiled tokenizers. The first run is not counted, because it compiles the
bytecode.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

from corpus import add_options, chosen, grown
from measure import machine, report, versions

VOCABULARY = 128_000
RECORDS = 100
HELP_S, PREPARE_S = 0.15, 1.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    data = chosen(args)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer = folder / "tokenizer.json"
        tokenizer.write_text(json.dumps(enlarged(json.loads(data.tokenizer.read_bytes()), VOCABULARY)), "utf-8")
        records = grown(data.path, folder, lines=RECORDS)
        prepare = ["prepare", str(records), "-o", str(folder / "v1"), "--tokenizer", str(tokenizer)]
        prepare += ["--format", "chatml", "--overwrite"]
        cache = folder / "cache"
        chatmill = [sys.executable, "-m", "chatmill"]
        figures: dict[str, Any] = {
            "vocabulary": VOCABULARY,
            "records": RECORDS,
            "python_s": best(args.runs, [sys.executable, "-c", ""], cache),
            "help_s": best(args.runs, [*chatmill, "--help"], cache),
            "cold_s": best(args.runs, [*chatmill, *prepare], cache, cold=True),
            "prepare_s": best(args.runs, [*chatmill, *prepare], cache),
            "versions": versions("typer", "numpy"),
        }
    lines = [
        ("python -c ''", f"{figures['python_s']:.3f} s"),
        ("chatmill --help", f"{figures['help_s']:.3f} s (target {HELP_S})"),
        (f"chatmill prepare on {RECORDS} records, empty cache", f"{figures['cold_s']:.3f} s"),
        (f"chatmill prepare on {RECORDS} records, filled cache", f"{figures['prepare_s']:.3f} s (target {PREPARE_S})"),
    ]
    title = f"start-up with a vocabulary of {VOCABULARY:,}; {machine('typer', 'numpy')}"
    report(title, lines, figures, as_json=args.json)
    return 0 if figures["help_s"] < HELP_S and figures["prepare_s"] < PREPARE_S else 1


def enlarged(content: dict[str, Any], size: int) -> dict[str, Any]:
    """Add merges to a byte-level BPE tokenizer until its vocabulary has `size` tokens."""
    vocab, merges = content["model"]["vocab"], content["model"]["merges"]
    words = [token for token in vocab if token.isalpha() and len(token) > 2]
    taken = {*vocab.values(), *(token["id"] for token in content["added_tokens"])}
    free = (id for id in range(2 * size) if id not in taken)
    for left, right in product(words, words[:1000]):
        if len(vocab) >= size:
            break
        if left + right not in vocab:
            vocab[left + right] = next(free)
            merges.append([left, right])
    return content


def best(runs: int, command: list[str], cache: Path, *, cold: bool = False) -> float:
    """Return the shortest time of several runs of a command, in seconds; the first run is not counted."""
    environment = os.environ | {"CHATMILL_CACHE_DIR": str(cache)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    taken = []
    for _ in range(runs + 1):
        if cold:
            shutil.rmtree(cache, ignore_errors=True)
        started = time.perf_counter()
        subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
        taken.append(time.perf_counter() - started)
    return min(taken[1:])


if __name__ == "__main__":
    sys.exit(main())
