"""Measure how many rollout targets are built per second on one core. The answers are long, and half of their objects
match true objects.

    python benchmarks/rollout.py [--runs N] [--targets N] [--json]

The CPU time of the fastest run is reported, because other processes have little effect on it. The script exits with 1
if the target is missed.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from measure import machine, own_peak, report, versions

from chatmill.format import load_format
from chatmill.rollout.scan import scan_rollout
from chatmill.rollout.target import build_answer, build_target
from chatmill.rollout.vocabulary import COORDINATES, vocabulary_of
from chatmill.tokenizer import Tokenizer, open_tokenizer, train_bpe

TOKENS, OBJECTS = 1500, 50
LEAST = 1000
WORDS = (
    "small",
    "large",
    "red",
    "green",
    "black",
    "wooden",
    "cat",
    "dog",
    "bird",
    "chair",
    "lamp",
    "cup",
    "near",
    "the",
)


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure rollout targets per second on one core.")
    parser.add_argument("--runs", type=int, default=15, help="number of runs; the fastest run is reported")
    parser.add_argument("--targets", type=int, default=100, help="number of targets per run")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    tokenizer = tokenizer_with_coordinates()
    draw = random.Random(0)
    work = [rollout(draw, tokenizer) for _ in range(args.targets)]
    vocabulary = vocabulary_of(tokenizer)

    def targets() -> None:
        for ids, truth in work:
            build_target(ids, truth, tokenizer=tokenizer)

    def scans() -> None:
        for ids, _ in work:
            scan_rollout(ids, vocabulary)

    texts = [tokenizer.decode(ids) for ids, _ in work]

    def bare() -> None:
        """Measure the floor: decode and parse the answers, and encode the true objects."""
        for (ids, truth), text in zip(work, texts, strict=True):
            tokenizer.decode(ids)
            msgspec.json.decode(text[: text.rindex("}") + 1])
            tokenizer.encode(msgspec.json.encode(truth).decode())

    first = build_target(*work[0], tokenizer=tokenizer)
    seconds = fastest(args.runs, targets=targets, scans=scans, bare=bare)
    speed = len(work) / seconds["targets"]
    tokens = sum(len(ids) for ids, _ in work) / len(work)
    report(
        f"rollout targets, one core; {machine('chatmill', 'scipy', 'shapely')}",
        [
            (
                "tokens per rollout; objects found in the first rollout; true objects",
                f"{tokens:.0f}; {len(first.valid_objects)}; {OBJECTS}",
            ),
            ("matched and missed objects in the first rollout", f"{len(first.matched)}, {len(first.missed)}"),
            ("targets built per second", f"{speed:,.0f}"),
            (
                "floor: decode and parse the answer, encode the true objects, per second",
                f"{len(work) / seconds['bare']:,.0f}",
            ),
            ("rollouts scanned per second, without building targets", f"{len(work) / seconds['scans']:,.0f}"),
            (f"{'met' if speed >= LEAST else 'MISSED'}: at least {LEAST:,} targets per second", f"{speed:,.0f}"),
        ],
        {
            "targets_per_second": speed,
            "floor_per_second": len(work) / seconds["bare"],
            "scans_per_second": len(work) / seconds["scans"],
            "tokens": tokens,
            "objects": OBJECTS,
            "runs": args.runs,
            "kept": speed >= LEAST,
            "memory": own_peak(),
            "versions": versions("chatmill", "scipy", "shapely"),
        },
        as_json=args.json,
    )
    return int(speed < LEAST)


def fastest(runs: int, **works: Callable[[], object]) -> dict[str, float]:
    """Return the minimum CPU time of each function in seconds. The functions run in turn, so a slowdown of the machine
    affects all of them.
    """
    seconds: dict[str, list[float]] = {name: [] for name in works}
    gc.collect()
    gc.freeze()
    for _ in range(runs):
        for name, work in works.items():
            started = time.process_time()
            work()
            seconds[name].append(time.process_time() - started)
    return {name: min(taken) for name, taken in seconds.items()}


def tokenizer_with_coordinates() -> Tokenizer:
    format = load_format("chatml")
    draw = random.Random(1)
    texts = [
        f'{{"desc": "{description(draw)}", "bbox_2d": ["", ""]}}, "poly": [[""], [""]], "object_{n}": '
        for n in range(2000)
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.json"
        path.write_bytes(train_bpe(texts, vocab_size=2000, control=list(format.tokens.values())))
        return open_tokenizer(path, control=format.tokens, besides=COORDINATES, add_tokens=True)


def rollout(draw: random.Random, tokenizer: Tokenizer) -> tuple[list[int], list[dict[str, object]]]:
    """Return an answer with `OBJECTS` objects in about `TOKENS` tokens, and a list of `OBJECTS` true objects. About
    half of the objects in the answer match a true object.
    """
    found, truth = [], []
    for number in range(OBJECTS):
        x, y = draw.randrange(850), draw.randrange(850)
        width, height = draw.randrange(30, 140), draw.randrange(30, 140)
        thing = {"desc": description(draw), "bbox_2d": [x, y, x + width, y + height]}
        truth.append(thing)
        if number % 2:
            nudged = [min(999, place + draw.randrange(5)) for place in (x, y, x + width + 5, y + height + 5)]
            found.append({"desc": thing["desc"], "bbox_2d": nudged})
        elif number % 25:
            found.append({"desc": description(draw), "bbox_2d": [0, 0, 5, 5]})
        else:
            # Matching polygons takes longer than matching boxes.
            found.append({"desc": description(draw), "poly": [x, y, x + width, y, x + width, y + height]})
    ids: list[int] = build_answer(found, tokenizer=tokenizer).ids.tolist()
    return ids, truth


def description(draw: random.Random) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(draw.randrange(1, 3)))


if __name__ == "__main__":
    sys.exit(main())
