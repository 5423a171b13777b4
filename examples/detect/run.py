"""Detection on small scenes: fine-tuning, more fine-tuning, and rollout matching for as many steps.

    python examples/detect/run.py [--seeds 0 1 2] [--out runs/detect] [--json]

For every seed a GPT is trained on true answers; from there it is trained on with the same data and as many steps in
two ways, and all three are scored on scenes that none of them has seen: recall and F1 of boxes that overlap a true
one of their letter by at least a half.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from scenes import records

from chatmill.cli.rollout import answers
from chatmill.format import load_format
from chatmill.rollout import (
    DetectionScore,
    RolloutConfig,
    Task,
    answer_rows,
    build_target,
    open_task,
    prompt_lists,
    read_truth,
    score_objects,
    serialize_append,
    task_prompts,
    train_rollouts,
)
from chatmill.tokenizer import train_bpe
from chatmill.train import TrainConfig, generate, model_folder, open_model, train_model

FORMAT = "primer"
MODEL = {"n_layer": 3, "n_embd": 64, "n_head": 4, "max_positions": 256, "rope_theta": 200.0, "qk_norm": True}
LONGEST = 160
"""Tokens of an answer, at most; three objects need about 120."""
STAGE_1 = {"max_iters": 1500, "learning_rate": 4e-3, "warmup_iters": 100}
STAGE_2 = {"max_iters": 400, "learning_rate": 3e-4, "warmup_iters": 20}
SIGMA = 0.3
"""A scene has six places on an axis: the next of the 1000 is as wrong as any, and no scene has taught what follows."""
SHARED: dict[str, Any] = {"batch_size": 16, "weight_decay": 0.01, "min_lr_ratio": 0.1, "device": "auto"}
WAYS = ("fine-tuned", "fine-tuned further", "rollout matching")


def main() -> None:
    options = argparse.ArgumentParser(description="Detection: fine-tuning, and rollout matching after it.")
    options.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="a run of everything for each")
    options.add_argument("--out", type=Path, default=Path("runs/detect"), help="where data and runs go")
    options.add_argument("--scenes", type=int, default=8000, help="scenes to train on")
    options.add_argument("--held-out", type=int, default=300, help="scenes to score on")
    options.add_argument("--steps", type=int, nargs=2, metavar=("FIRST", "THEN"), help="steps of the two stages")
    options.add_argument("--json", action="store_true", help="print JSON")
    args = options.parse_args()
    first, then = args.steps or (STAGE_1["max_iters"], STAGE_2["max_iters"])
    began = time.perf_counter()
    scores: dict[str, list[DetectionScore]] = {way: [] for way in WAYS}
    for seed in args.seeds:
        for way, score in run(args.out / f"seed{seed}", seed, args.scenes, args.held_out, int(first), int(then)):
            scores[way].append(score)
            said = f"seed {seed}, {way}: recall {score.recall:.3f}, F1 {score.f1:.3f}"
            print(f"{said} ({time.perf_counter() - began:.0f} s)", file=sys.stderr, flush=True)
    if args.json:
        print(json.dumps({way: [score._asdict() for score in of_way] for way, of_way in scores.items()}))
        return
    print(f"{'':<20}{'recall':>16}{'precision':>16}{'F1':>16}")
    for way, of_way in scores.items():
        columns = ((getattr(score, name) for score in of_way) for name in ("recall", "precision", "f1"))
        print(f"{way:<20}" + "".join(f"{shown(column):>16}" for column in columns))


def run(
    folder: Path, seed: int, scenes: int, held_out: int, first: int, then: int
) -> Iterable[tuple[str, DetectionScore]]:
    """Everything for one seed; the three ways with their scores."""
    folder.mkdir(parents=True)
    truth, unseen = folder / "truth.jsonl", folder / "held_out.jsonl"
    write(truth, records(2 * seed, scenes))
    write(unseen, records(2 * seed + 1, held_out))
    tokenizer = folder / "tokenizer.json"
    tokenizer.write_bytes(small_tokenizer())
    task = open_task(str(tokenizer), FORMAT, add_tokens=True)
    with contextlib.redirect_stdout(io.StringIO()):
        answers(truth, folder / "answers", tokenizer=str(tokenizer), format=FORMAT, add_tokens=True)

    longest = int(answer_rows(list(read_truth(truth)), task).lengths.max())
    fine_tuning = {
        **SHARED,
        "use_loss_mask": True,
        "block_size": longest - 1,
        "epoch_seed": seed,
        "seed": seed,
        "eval_interval": 0,
        "save_interval": 10**6,
        "audit_dir": None,
    }

    def fine_tune(name: str, **settings: Any) -> Path:
        config = TrainConfig.from_mapping({**fine_tuning, **settings})
        train_model(config, model_name=name, dataset_dir=folder / "answers", out_dir=folder, quiet=True)
        return folder / name

    started = fine_tune("stage1", **MODEL, **{**STAGE_1, "max_iters": first})
    yield WAYS[0], score(started, unseen, task)
    further = {**STAGE_2, "max_iters": then, "init_from_model": str(started)}
    yield WAYS[1], score(fine_tune("control", **{**further, "epoch_seed": seed + 1000}), unseen, task)
    rollouts = RolloutConfig.from_mapping(
        {
            **SHARED,
            **further,
            "truth": str(truth),
            "tokenizer": str(tokenizer),
            "format": FORMAT,
            "add_tokens": True,
            "rollout_every": 4,
            "max_new_tokens": LONGEST,
            "sigma": SIGMA,
            "seed": seed + 1000,
            "save_interval": 4 * 10**6,
        }
    )
    train_rollouts(rollouts, folder / "matching", quiet=True)
    yield WAYS[2], score(folder / "matching", unseen, task)


def score(run: Path, unseen: Path, task: Task) -> DetectionScore:
    """How a model answers scenes it has not seen, decoded greedily."""
    model = open_model(model_folder(run)).to("cuda" if torch.cuda.is_available() else "cpu")
    truths = list(read_truth(unseen))
    prompts = prompt_lists(task_prompts(truths, task))
    found = generate(model, prompts, max_tokens=LONGEST, end_ids=[task.eos_id])
    total = DetectionScore()
    for answer, truth in zip(found, truths, strict=True):
        objects = build_target(answer, [], tokenizer=task.tokenizer, eos_id=task.eos_id).valid_objects
        total = total.plus(score_objects(objects, truth.objects))
    return total


def small_tokenizer() -> bytes:
    """A BPE in which each cell of a scene is a token, and an answer has few.

    No token fuses a brace, a bracket or a comma with anything: where an answer goes on or ends, that is a choice
    between two tokens, and each of them is trained.
    """
    texts: list[str] = []
    for record in records(12345, 300):
        answer = "{" + serialize_append(record["objects"], 1, "{")
        texts.append(record["messages"][0]["content"])
        for piece in re.split(r"<\|coord_[0-9]+\|>", answer):
            texts += re.findall(r"[{}\],]|[^{}\],]+", piece)
    return train_bpe(texts, vocab_size=340, control=list(load_format(FORMAT).tokens.values()))


def write(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def shown(values: Iterable[float]) -> str:
    """The mean, and how far the seeds lie around it."""
    found = list(values)
    spread = statistics.stdev(found) if len(found) > 1 else 0.0
    return f"{statistics.mean(found):.3f} ± {spread:.3f}"


if __name__ == "__main__":
    main()
