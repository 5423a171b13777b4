"""Measure when rollout matching is better than further fine-tuning. Each setting changes one parameter; the control run
continues the fine-tuning without rollout matching.

    python examples/detect/study.py run --out runs/study --seeds 0 1 2 --processes 14
    python examples/detect/study.py run --out runs/shown --seeds 3 4 5 6 7 --processes 14 --shown
    python examples/detect/study.py table runs/study/results.jsonl [--seeds 3 4 5 6 7]

The command `run` can be restarted; it keeps existing results. A setting and its control use the same data, the same
stage-1 model and the same seed, so that their scores can be compared in pairs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import statistics
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from setting import BORDERS, Scores, Setting, border_agreement, prepare, score, train_on

BASE = Setting()
FUSED = replace(BASE, tokens="fused")
SETTINGS = {
    "base": BASE,
    "order reading": replace(BASE, order="reading"),
    "stage 1 at 100 %": replace(BASE, stage_1=1.0),
    "share 0.5": replace(BASE, share=0.5),
    "share 0.25": replace(BASE, share=0.25),
    "surplus 1": replace(BASE, surplus=1.0),
    "without slots": replace(BASE, slot=0.0),
    "without appended objects": replace(BASE, append=0.0),
    "without the end": replace(BASE, end=0.0),
    "64 rows": replace(BASE, rows=64),
    "stage 1 at 25 %": replace(BASE, stage_1=0.25),
    "fused, shorter": FUSED,
    "fused, masked": replace(FUSED, border="masked"),
    "fused, joined": replace(FUSED, border="joined"),
    "fused, canonical": replace(FUSED, border="canonical"),
    "temperature 0.7": replace(BASE, temperature=0.7),
    "temperature 1": replace(BASE, temperature=1.0),
    "surplus 0.3": replace(BASE, surplus=0.3),
    "5 objects": replace(BASE, objects=5),
    "25 objects": replace(BASE, objects=25),
    "order random, both stages": replace(BASE, order_1="random"),
    "40 objects": replace(BASE, objects=40),
    "60 objects": replace(BASE, objects=60),
}
"""Settings that change one factor of `BASE`; the best was chosen with seeds 0 to 2."""
FEW = SETTINGS["5 objects"]
FEW_FUSED = replace(FEW, tokens="fused")
SHOWN = {
    "5 objects": FEW,
    "5 objects, 48 rows": replace(FEW, rows=48),
    "5 objects, without slots": replace(FEW, slot=0.0),
    "5 objects, without appended objects": replace(FEW, append=0.0),
    "5 objects, without the end": replace(FEW, end=0.0),
    "5 objects, share 0.5": replace(FEW, share=0.5),
    "5 objects, surplus 1": replace(FEW, surplus=1.0),
    "5 objects, fused, shorter": FEW_FUSED,
    "5 objects, fused, masked": replace(FEW_FUSED, border="masked"),
    "5 objects, fused, joined": replace(FEW_FUSED, border="joined"),
    "5 objects, fused, canonical": replace(FEW_FUSED, border="canonical"),
    "5 objects, order reading": replace(FEW, order="reading"),
    "5 objects, stage 1 at 100 %": replace(FEW, stage_1=1.0),
}
"""The chosen setting and its variants, for seeds that were not used to choose it."""
ALL = SETTINGS | SHOWN
PARTS_OF_STAGE_1 = ("objects", "order_1", "order", "tokens", "scenes", "first", "width", "layers", "rate")
PARTS_OF_CONTROL = (*PARTS_OF_STAGE_1, "stage_1", "then", "rate_then", "every")


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure when rollout matching pays off.")
    commands = parser.add_subparsers(required=True, dest="command")
    run = commands.add_parser("run", help="train and score a model for each setting")
    run.add_argument("--out", type=Path, required=True, help="folder for all runs and results.jsonl")
    run.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    run.add_argument("--only", nargs="+", choices=ALL, metavar="SETTING")
    run.add_argument("--shown", action="store_true", help="run only the chosen setting and its variants")
    run.add_argument("--processes", type=int, default=1)
    run.add_argument(
        "--set", nargs="+", default=[], metavar="KEY=VALUE", help="changes to all settings, such as then=20"
    )
    table = commands.add_parser("table", help="print the paired differences as a Markdown table")
    table.add_argument("results", type=Path)
    table.add_argument("--seeds", type=int, nargs="+")
    table.add_argument("--by", default="f1", choices=Scores._fields, help="metric to compare")
    args = parser.parse_args()
    if args.command == "table":
        print("\n".join(table_lines(read_results(args.results), args.by, args.seeds)))
        return
    changes = {name: json.loads(value) for name, _, value in (pair.partition("=") for pair in args.set)}
    names = args.only or (SHOWN if args.shown else SETTINGS)
    jobs = list(all_jobs({name: replace(ALL[name], **changes) for name in names}, args.seeds))
    args.out.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(args.out / "claims", ignore_errors=True)
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=work, args=(args.out, jobs)) for _ in range(args.processes)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    sys.exit(any(worker.exitcode for worker in workers))


# Jobs.

Job = tuple[str, Setting, int]
"""Name, setting and seed; several settings may share a job named `stage 1` or `control`."""


def all_jobs(settings: dict[str, Setting], seeds: Iterable[int]) -> Iterable[Job]:
    """Yield the jobs of all settings, in order; a job that several settings share is yielded only once."""
    seen = set()
    for name, setting in settings.items():
        for seed in seeds:
            for shared, parts in (("stage 1", PARTS_OF_STAGE_1), ("control", PARTS_OF_CONTROL)):
                key = (shared, kind(setting, parts), seed)
                if key not in seen:
                    seen.add(key)
                    yield shared, setting, seed
        yield from ((name, setting, seed) for seed in seeds)


def kind(setting: Setting, parts: Iterable[str]) -> str:
    return ",".join(str(getattr(setting, part)) for part in parts)


def work(out: Path, jobs: list[Job]) -> None:
    """Run the jobs that no other process has claimed, one at a time. A job starts only after its `stage 1` job is
    done.
    """
    import torch

    torch.set_num_threads(1)
    results = out / "results.jsonl"
    done = {(line["name"], line["kind"], line["seed"]) for line in read_results(results)}
    while True:
        left = 0
        for name, setting, seed in jobs:
            folder = out / f"seed{seed}" / kind(setting, PARTS_OF_STAGE_1)
            control = kind(setting, PARTS_OF_CONTROL)
            if (name, control, seed) in done:
                continue
            if name != "stage 1" and not (folder / "ready").exists():
                left += 1
                continue
            claim = out / "claims" / f"{seed}-{name}-{control}"
            claim.parent.mkdir(exist_ok=True)
            try:
                claim.mkdir()
            except FileExistsError:
                continue
            began = time.perf_counter()
            values = do(name, setting, seed, folder)
            line = {"name": name, "kind": control, "seed": seed, "setting": asdict(setting), **values}
            with results.open("a") as file:
                file.write(json.dumps({**line, "seconds": round(time.perf_counter() - began, 1)}) + "\n")
            print(name, seed, {key: value for key, value in values.items() if key != "setting"}, flush=True)
            break
        else:
            if not left:
                return
            time.sleep(0.5)


def do(name: str, setting: Setting, seed: int, folder: Path) -> dict[str, Any]:
    """Run one job and return its results, such as its scores and the number of trained tokens."""
    if name == "stage 1":
        prepare(folder, setting, seed)
        checkpoints = [setting.first * number // setting.saves for number in range(1, setting.saves + 1)]
        scores = {step: score(folder / "stage1" / f"step_{step:08d}", folder)._asdict() for step in checkpoints}
        started = folder / "stage1" / f"step_{setting.first_steps:08d}"
        borders = {border: border_agreement(started, folder, border) for border in BORDERS}
        return {"scores": scores, "borders": borders}
    trained = replace(setting, share=0.0, rows=16, border="shorter") if name == "control" else setting
    run = folder / f"{name}-{kind(setting, PARTS_OF_CONTROL[len(PARTS_OF_STAGE_1) :])}"
    shutil.rmtree(run, ignore_errors=True)
    train_on(folder, trained, seed, run.name)
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    sums = {key: sum(line.get(key, 0) for line in metrics) for key in ("trained", "generate_seconds", "target_seconds")}
    return {"scores": score(run, folder)._asdict(), **sums}


# Tables.


def read_results(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


COLUMNS = {
    "recall": "recall",
    "precision": "precision",
    "f1": "F1",
    "duplicates": "duplicates",
    "json": "JSON",
    "count_error": "count error",
}


def table_lines(results: list[dict[str, Any]], by: str, seeds: list[int] | None) -> Iterable[str]:
    """Yield a Markdown table of settings, with mean scores and the mean paired difference from the control with its 95
    % confidence interval.

    The column `tokens` is the number of trained tokens divided by that of the control. The column `before` is the mean
    of the metric `by` after stage 1, and the column `further` is its mean for the control.
    """
    chosen = [line for line in results if seeds is None or line["seed"] in seeds]
    controls = {(line["kind"], line["seed"]): line for line in chosen if line["name"] == "control"}
    starts = {_stage_1(line): line["scores"] for line in chosen if line["name"] == "stage 1"}
    yield f"| setting | tokens | {' | '.join(COLUMNS.values())} | before | further | difference | 95 % interval |"
    yield "|---" + "|---:" * (len(COLUMNS) + 5) + "|"
    for name in ALL:
        pairs = [
            (line, controls[line["kind"], line["seed"]])
            for line in chosen
            if line["name"] == name and (line["kind"], line["seed"]) in controls
        ]
        if not pairs:
            continue
        means = [statistics.mean(line["scores"][column] for line, _ in pairs) for column in COLUMNS]
        before = statistics.mean(
            starts[_stage_1(line)][str(round(line["setting"]["first"] * line["setting"]["stage_1"]))][by]
            for line, _ in pairs
        )
        further = statistics.mean(control["scores"][by] for _, control in pairs)
        differences = [line["scores"][by] - control["scores"][by] for line, control in pairs]
        tokens = statistics.mean(line["trained"] / control["trained"] for line, control in pairs)
        low, high = interval(differences)
        shown = " | ".join(f"{mean:.3f}" for mean in [*means, before, further])
        difference = f"{statistics.mean(differences):+.3f} | {low:+.3f} to {high:+.3f}"
        yield f"| {name} | {tokens:.2f} | {shown} | {difference} |"


def _stage_1(line: dict[str, Any]) -> tuple[Any, ...]:
    return (line["seed"], *(line["setting"][part] for part in PARTS_OF_STAGE_1))


def interval(values: list[float]) -> tuple[float, float]:
    """Return the 95 % confidence interval of the mean, computed with Student's t-distribution."""
    if len(values) < 2:
        return float("nan"), float("nan")
    quantile = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}[len(values)]
    half = quantile * statistics.stdev(values) / len(values) ** 0.5
    return statistics.mean(values) - half, statistics.mean(values) + half


if __name__ == "__main__":
    main()
