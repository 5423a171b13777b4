"""Measure how chatmill's time and memory grow with the amount of data: `python benchmarks/growth.py [--json]`.

The benchmark prepares, verifies and loads three datasets: a tenth of the conversations, all conversations, and ten
times as many. Each measurement runs in a separate process. The time to verify a dataset is compared with the time to
hash the same bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from corpus import DATA, Data, add_options, chosen, grown, options_of
from measure import alone, machine, report, versions

from chatmill.store.read import open_dataset
from chatmill.store.verify import verify_dataset

HERE = Path(__file__).parent
BATCHES = 40
CONFIG = {"batch_size": 16, "block_size": 4096, "use_loss_mask": True, "pad_token_id": 0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument(
        "--side", choices=tuple(SIDES), help="run only this measurement, on the dataset given by --dataset"
    )
    parser.add_argument("--dataset", type=Path)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.side:
        print(json.dumps(SIDES[args.side](args.dataset)))
        return
    data = chosen(args)
    tenth = data.conversations // 10
    steps = []
    with tempfile.TemporaryDirectory(dir=DATA) as temporary:
        folder = Path(temporary)
        for lines, times in ((tenth, 1), (data.conversations, 1), (data.conversations, 10)):
            path = grown(data.path, folder, lines=lines, times=times)
            steps.append(one_size(Data(path, lines * times, data.tokenizer), folder))
            path.unlink()
    packages = ("chatmill", "fastokens", "msgspec", "numpy")
    report(
        f"growth; {machine(*packages)}",
        [line for step in steps for line in shown(step)],
        {"sizes": steps, "versions": versions(*packages)},
        as_json=args.json,
    )


def one_size(data: Data, folder: Path) -> dict[str, Any]:
    dataset = folder / "dataset"
    made, memory = alone(
        str(HERE / "prepare.py"), "--side", "chatmill", *options_of(data), "--folder", folder, every=0.1
    )
    found = {
        "conversations": data.conversations,
        "tokens": made["tokens"],
        "bytes": sum(path.stat().st_size for path in dataset.rglob("*") if path.is_file()),
        "prepare": {"seconds": made["seconds"], "memory": memory},
    }
    for side in SIDES:
        figures, peak = alone(__file__, "--side", side, "--dataset", dataset)
        found[side] = {**figures, "memory": peak}
    shutil.rmtree(dataset)
    return found


def shown(step: dict[str, Any]) -> list[tuple[str, str]]:
    def line(what: str, side: str, figure: str) -> tuple[str, str]:
        return f"{step['conversations']:,} conversations, {what}", f"{figure}, {step[side]['memory'] / 1e6:.0f} MB"

    return [
        line("prepare", "prepare", f"{step['prepare']['seconds']:.2f} s"),
        line("open and read one episode", "open", f"{step['open']['ms']:.1f} ms"),
        line(
            "verify --full",
            "verify",
            f"{step['verify']['full_s']:.2f} s, hashing alone {step['verify']['hash_s']:.2f} s",
        ),
        line("load a packed batch", "load", f"{step['load']['ms']:.2f} ms"),
    ]


# Each of the following functions runs in a separate process.


def opening(dataset: Path) -> dict[str, float]:
    started = time.perf_counter()
    episodes = open_dataset(dataset)["train"]
    episodes.tokens(len(episodes) // 2)
    return {"ms": 1e3 * (time.perf_counter() - started)}


def verifying(dataset: Path) -> dict[str, float]:
    def bare() -> None:
        for path in dataset.rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    hashlib.file_digest(file, "sha256")

    def checked(full: bool) -> None:
        if faults := verify_dataset(dataset, full=full).faults:
            raise SystemExit(faults[0])

    works = {"quick_s": lambda: checked(False), "full_s": lambda: checked(True), "hash_s": bare}
    seconds = {}
    for name, work in works.items():
        started = time.perf_counter()
        work()
        seconds[name] = time.perf_counter() - started
    return seconds


def loading(dataset: Path) -> dict[str, float]:
    """Return the average time per batch in milliseconds. The time of the first batch, which includes planning, is
    returned separately.
    """
    # The loader imports torch, which would add to the memory of the other measurements.
    from chatmill.load.loader import EpisodeLoader

    loader = EpisodeLoader(dataset, CONFIG)
    taken = []
    for _ in range(BATCHES):
        started = time.perf_counter()
        loader.get_batch()
        taken.append(1e3 * (time.perf_counter() - started))
    loader.close()
    return {"ms": statistics.fmean(taken[1:]), "first_ms": taken[0]}


SIDES = {"open": opening, "verify": verifying, "load": loading}


if __name__ == "__main__":
    main()
