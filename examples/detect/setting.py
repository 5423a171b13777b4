"""One setting of the example: its data, its model, the fine-tuning in stage 1, and two ways to continue in stage 2.

    further   the same fine-tuning for more steps: rows are true answers
    matching  rollout matching: a share of the rows are the model's own answers, completed

`further` and `matching` use `train_rollouts` with the same number of steps, loss and learning rate.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from scenes import Order, records
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from chatmill.cli.rollout import answers
from chatmill.format import load_format
from chatmill.rollout import (
    DetectionScore,
    RolloutConfig,
    Task,
    answer_rows,
    build_answer,
    build_target,
    open_task,
    prompt_lists,
    read_truth,
    score_objects,
    serialize_append,
    task_prompts,
    train_rollouts,
)
from chatmill.rollout.target import Border
from chatmill.train import TrainConfig, generate, model_folder, open_model, train_model

FORMAT = "primer"
SIGMA = 0.3
"""Standard deviation of the Gaussian target, in coordinates. The value is small, because scenes use few of the 1000
coordinates.
"""
BORDERS = ("shorter", "masked", "joined", "canonical")
SHARED: dict[str, Any] = {"batch_size": 16, "weight_decay": 0.01, "min_lr_ratio": 0.1, "device": "auto"}


@dataclass(frozen=True)
class Setting:
    """The parameters of a run; the defaults are the base setting."""

    objects: int = 12
    """Maximum number of objects in a scene."""
    order_1: Order = "reading"
    order: Order = "random"
    """Order of the objects in the true answers of stage 2; `order_1` is the order in stage 1."""
    tokens: Literal["split", "fused"] = "split"
    """Whether the tokenizer merges braces, brackets and commas with adjacent characters."""
    scenes: int = 12_000
    """Number of training scenes in each stage."""
    stage_1: float = 0.5
    """Stage 1 ends after this fraction of `first` steps."""
    first: int = 2000
    """Number of steps in stage 1 if `stage_1` is 1."""
    saves: int = 4
    """Number of checkpoints in stage 1."""
    then: int = 300
    """Number of steps in stage 2."""
    width: int = 128
    layers: int = 4
    rate: float = 2e-3
    """Learning rate in stage 1."""
    rate_then: float = 3e-4
    share: float = 1.0
    """Fraction of the rows of each step that are rollouts."""
    rows: int = 16
    """Rows per step."""
    temperature: float = 0.0
    every: int = 10
    """Steps between two rounds of rollouts."""
    border: str = "shorter"
    slot: float = 1.0
    append: float = 1.0
    end: float = 1.0
    surplus: float = 0.0
    """`slot`, `append`, `end` and `surplus` are loss weights for parts of a target."""

    @property
    def first_steps(self) -> int:
        return round(self.first * self.stage_1)


class Scores(NamedTuple):
    recall: float
    precision: float
    f1: float
    duplicates: float
    """Duplicate objects per true object."""
    json: float
    """Fraction of answers that are complete and valid JSON."""
    count_error: float
    """Mean absolute difference between the numbers of predicted and true objects."""


def prepare(folder: Path, setting: Setting, seed: int, held_out: int = 300) -> Path:
    """Write the data of a setting and train its stage 1 model, unless an earlier call has done so."""
    if (folder / "ready").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    for stage, order, first in (("stage1", setting.order_1, 0), ("stage2", setting.order, 1)):
        write(folder / f"{stage}.jsonl", records(3 * seed + first, setting.scenes, setting.objects, order))
    write(folder / "held_out.jsonl", records(3 * seed + 2, held_out, setting.objects))
    (folder / "tokenizer.json").write_bytes(small_tokenizer(setting))
    task = task_of(folder)
    with contextlib.redirect_stdout(io.StringIO()):
        tokenizer = str(folder / "tokenizer.json")
        answers(folder / "stage1.jsonl", folder / "answers", tokenizer=tokenizer, format=FORMAT, add_tokens=True)
    longest = longest_row(folder, task)
    config = TrainConfig.from_mapping(
        {
            **SHARED,
            "n_layer": setting.layers,
            "n_embd": setting.width,
            "n_head": setting.width // (64 if setting.width >= 512 else 32),
            "max_positions": 2 * longest,
            "rope_theta": 500.0,
            "qk_norm": True,
            "use_loss_mask": True,
            "block_size": longest - 1,
            "epoch_seed": seed,
            "seed": seed,
            "max_iters": setting.first,
            "learning_rate": setting.rate,
            "warmup_iters": 100,
            "eval_interval": 0,
            "save_interval": max(1, setting.first // setting.saves),
            "keep_checkpoints": setting.saves,
            "audit_dir": None,
            "compile": False,
        }
    )
    train_model(config, model_name="stage1", dataset_dir=folder / "answers", out_dir=folder, quiet=True)
    (folder / "ready").touch()
    return folder


def train_on(folder: Path, setting: Setting, seed: int, name: str) -> Path:
    """Train stage 2 from a stage 1 checkpoint; return the run folder."""
    start = folder / "stage1" / f"step_{setting.first_steps:08d}" / "model"
    config = RolloutConfig.from_mapping(
        {
            **SHARED,
            "batch_size": setting.rows,
            "max_iters": setting.then,
            "learning_rate": setting.rate_then,
            "warmup_iters": 20,
            "init_from_model": str(start),
            "truth": str(folder / "stage2.jsonl"),
            "tokenizer": str(folder / "tokenizer.json"),
            "format": FORMAT,
            "add_tokens": True,
            "rollout_share": setting.share,
            "rollout_every": setting.every,
            "generate_batch_size": setting.every * setting.rows,
            "max_new_tokens": longest_answer(folder, task_of(folder)),
            "decoding": "sample" if setting.temperature else "greedy",
            "temperature": setting.temperature or 1.0,
            "border": setting.border,
            "slot_weight": setting.slot,
            "append_weight": setting.append,
            "end_weight": setting.end,
            "surplus_weight": setting.surplus,
            "sigma": SIGMA,
            "seed": seed + 1000,
            "save_interval": setting.every * 10**6,
        }
    )
    train_rollouts(config, folder / name, quiet=True)
    return folder / name


def score(model_or_run: Path, folder: Path) -> Scores:
    """Score a model on the held-out scenes, with greedy decoding."""
    task = task_of(folder)
    model = open_model(model_folder(model_or_run)).to("cuda" if torch.cuda.is_available() else "cpu")
    truths = list(read_truth(folder / "held_out.jsonl"))
    prompts = prompt_lists(task_prompts(truths, task))
    found = generate(
        model, prompts, max_tokens=longest_answer(folder, task), end_ids=[task.eos_id], batch_size=len(prompts)
    )
    total, duplicates, valid, errors = DetectionScore(), 0, 0, []
    for answer, truth in zip(found, truths, strict=True):
        target = build_target(answer, [], tokenizer=task.tokenizer, eos_id=task.eos_id)
        objects = target.valid_objects
        of_answer = score_objects(objects, truth.objects)
        total = total.plus(of_answer)
        # A box that matches a true object on its own, but not when boxes are matched one to one, is a duplicate.
        alone = sum(score_objects([thing], truth.objects).correct for thing in objects)
        duplicates += alone - of_answer.correct
        valid += answer[-1] == task.eos_id and is_json(task.tokenizer.decode(answer[:-1]))
        errors.append(abs(len(objects) - len(truth.objects)))
    return Scores(
        total.recall,
        total.precision,
        total.f1,
        duplicates / max(1, total.true),
        valid / len(truths),
        float(np.mean(errors)),
    )


def border_agreement(run: Path, folder: Path, border: str) -> dict[str, float]:
    """Truncate the true answers of held-out scenes in the middle, build rollout targets from them, and compare the
    token ids of the targets with those of the full answers.

    `same`: fraction of targets whose token ids equal those of the full answer. `likely`: fraction of targets in which
    the first token after the kept prefix is the model's most likely token.
    """
    task = task_of(folder)
    model = open_model(model_folder(run)).to("cuda" if torch.cuda.is_available() else "cpu")
    truths = [truth for truth in read_truth(folder / "held_out.jsonl") if len(truth.objects) > 1][:100]
    same = likely = 0
    for truth, prompt in zip(truths, prompt_lists(task_prompts(truths, task)), strict=True):
        answer = build_answer(truth.objects, tokenizer=task.tokenizer, eos_id=task.eos_id).ids.tolist()
        # The target keeps the complete objects and appends the missing ones, so its text is the full answer.
        target = build_target(
            answer[: len(answer) // 2 + 3],
            truth.objects,
            tokenizer=task.tokenizer,
            eos_id=task.eos_id,
            border=cast(Border, border),
        )
        same += target.ids == answer
        ids = torch.tensor([prompt + target.ids[: target.kept]], device=model.device)
        with torch.inference_mode():
            logits = model.logits(ids, torch.arange(ids.shape[1], device=ids.device)[None], torch.zeros_like(ids))
        likely += int(logits[0, -1].argmax()) == target.ids[target.kept]
    return {"same": same / len(truths), "likely": likely / len(truths)}


def task_of(folder: Path) -> Task:
    return open_task(str(folder / "tokenizer.json"), FORMAT, add_tokens=True)


def longest_row(folder: Path, task: Task) -> int:
    return int(answer_rows(list(read_truth(folder / "stage1.jsonl")), task).lengths.max())


def longest_answer(folder: Path, task: Task) -> int:
    """Return the maximum number of tokens to generate: 25 % more than in the longest true answer."""
    truths = list(read_truth(folder / "held_out.jsonl"))
    prompts = task_prompts(truths, task)
    return round(1.25 * int((answer_rows(truths, task).lengths - prompts.lengths).max()))


def small_tokenizer(setting: Setting) -> bytes:
    """Train a byte-level BPE tokenizer; a cell of a scene is one token, and an object is about sixteen tokens.

    With `tokens="split"`, an object ends with the token `}`, and the next token decides whether the answer ends. With
    `tokens="fused"`, `"]}, "object_` and `"]}}` are single tokens, as in many tokenizers.
    """
    pieces = [
        r'"object_',
        r"\d",
        r'": \{"desc": "',
        r'", "bbox_2d": \["',
        r'", "',
        r'"\]',
        r"[{}]",
        ", ",
        " [a-z.]",
        r"\n",
    ]
    if setting.tokens == "fused":
        pieces = [r'"\]\}, "object_', r'"\]\}\}', *pieces]
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex("|".join(pieces)), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(load_format(FORMAT).tokens.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(setting), trainer)
    return tokenizer.to_str().encode()


def _texts(setting: Setting) -> Iterator[str]:
    for record in records(12345, 300, setting.objects):
        yield record["messages"][0]["content"]
        yield from re.split(r"<\|coord_[0-9]+\|>", "{" + serialize_append(record["objects"], 1, "{"))


def is_json(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def write(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
