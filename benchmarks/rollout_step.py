"""Measure the time of one rollout-matching (stage-2) step with a 0.6B-parameter model on a GPU.

    PYTHONPATH=examples/detect python benchmarks/rollout_step.py [--steps N] [--json]

A step generates rollouts, builds the targets, and trains on the targets. The model is first fine-tuned on the scenes of
examples/detect, so that its answers have realistic lengths.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
from setting import Setting, prepare, score, train_on

SHAPE = {"layers": 28, "width": 1344}
"""The size of a model with 0.6 billion parameters."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the time of each phase of a stage-2 step.")
    parser.add_argument("--first", type=int, default=400, help="number of fine-tuning steps before stage 2")
    parser.add_argument("--steps", type=int, default=32, help="number of rollout-matching steps")
    parser.add_argument("--rows", type=int, default=64, help="number of rollouts per step")
    parser.add_argument("--width", type=int, default=SHAPE["width"])
    parser.add_argument("--layers", type=int, default=SHAPE["layers"])
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    setting = Setting(
        scenes=4000, first=args.first, saves=1, stage_1=1.0, rate=3e-4, then=args.steps, every=4, rows=args.rows
    )
    setting = replace(setting, width=args.width, layers=args.layers, rate_then=3e-5)
    with tempfile.TemporaryDirectory() as made:
        began = time.perf_counter()
        folder = prepare(Path(made) / "run", setting, 0)
        scored = score(folder / "stage1", folder)
        run = train_on(folder, setting, 0, "stage2")
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rounds = [line for line in lines if "generate_seconds" in line][1:]
    steps = [line for line in lines if "seconds" in line][setting.every :]
    seconds = {
        "generation": sum(line["generate_seconds"] for line in rounds) / len(steps),
        "targets": sum(line["target_seconds"] for line in rounds) / len(steps),
        "training": sum(line["seconds"] for line in steps) / len(steps),
    }
    total = sum(seconds.values())
    result = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "f1": scored.f1,
        "json": scored.json,
        "rows": args.rows,
        "tokens_per_step": sum(line["tokens"] for line in steps) / len(steps),
        "answer_tokens": sum(line["rollouts"]["rollout_tokens"] for line in rounds)
        / max(1, sum(line["rollouts"]["rollouts"] for line in rounds)),
        "seconds": seconds,
        "shares": {name: value / total for name, value in seconds.items()},
        "whole": time.perf_counter() - began,
    }
    print(json.dumps(result) if args.json else json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
