"""Stage 2: the model answers, its answers become targets, and it is trained on them.

    every K steps    prompts ── generate ──▶ rollouts ── match, append ──▶ K batches
    every step       batch ──▶ one forward pass, one loss, one backward pass

Prompts come in an order that is a pure function of the seed, and what is drawn for a rollout depends on (seed, step,
row) alone. Every rollout is logged, so that a run can be replayed from its log.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from chatmill.cli.rollout_generator import generator_of
from chatmill.errors import ChatmillError, DataError, UsageError
from chatmill.load.order import make_order
from chatmill.load.row_table import collate
from chatmill.records.files import expand
from chatmill.rollout.config import RolloutConfig
from chatmill.rollout.files import GroundTruth, Rollout, RolloutLog, read_truth
from chatmill.rollout.generate import Generator
from chatmill.rollout.health import Health
from chatmill.rollout.loss import Axis, LossTerms, WithRolloutLoss
from chatmill.rollout.task import Task, open_task, prompt_lists, target_rows, task_prompts
from chatmill.rollout.vocabulary import vocabulary_of
from chatmill.rows import Rows
from chatmill.store import files
from chatmill.store.layout import TOKENIZER_STATE
from chatmill.train import checkpoint as checkpoints
from chatmill.train.distributed import World, joined
from chatmill.train.load_model import compute_dtype, open_model
from chatmill.train.metrics_log import METRICS, MetricsLog, rewind
from chatmill.train.model import CausalModel
from chatmill.train.preflight import TRAINING, trained_with
from chatmill.train.progress import TrainProgress
from chatmill.train.schedule import LRSchedule
from chatmill.train.sharded_tensors import file_info
from chatmill.train.signals import noted
from chatmill.train.step import Stepper, make_optimizer, parts_of, seed_draws

CONFIG, ROLLOUTS = "config.json", "rollouts.jsonl"


@dataclass(frozen=True)
class RolloutResult:
    """What became of a run."""

    folder: Path
    checkpoint: Path | None
    step: int
    total: int
    loss: float | None
    """Of the last step."""
    health: Health
    """Of all rollouts since the run began or went on."""
    stopped_by: str | None

    def to_json(self) -> dict[str, Any]:
        said = {name: str(value) if isinstance(value, Path) else value for name, value in vars(self).items()}
        return {**said, "health": self.health.to_json()}


def train_rollouts(
    config: RolloutConfig,
    folder: Path,
    *,
    resume: str | None = None,
    model: CausalModel | None = None,
    generator: Generator | None = None,
    quiet: bool = False,
) -> RolloutResult:
    """Train a model on its own answers and write all about it to `folder`.

    `resume` is `auto` or the folder of a checkpoint. `model` stands in for the one that the config names, and
    `generator` for who would answer.
    """
    with joined(config.device) as world:
        if world.size > 1:
            raise UsageError(f"{world.size} processes; stage 2 runs in one")
        run = RolloutRun(config, folder, world, model)
        try:
            run.begin(resume, generator, quiet=quiet)
            return run.go()
        finally:
            run.close()


class RolloutRun:
    """One run, from its first step or a checkpoint to its last."""

    def __init__(self, config: RolloutConfig, folder: Path, world: World, model: CausalModel | None) -> None:
        self.config, self.folder, self.world = config, folder, world
        fields = None if config.fields is None else tuple(config.fields)
        self.task = open_task(
            config.tokenizer, config.format, fields=fields, gate=config.gate, add_tokens=config.add_tokens
        )
        self.truths = list(read_truth(config.truth or ""))
        self.truth_sha256 = file_info(expand([config.truth or ""])[0]).sha256
        if not self.truths:
            raise DataError(f"{config.truth}: holds no record; expected at least one")
        self.model = (model or self._open_model()).to(world.device)
        _check_model(self.model, self.task, config)
        self.order = make_order("epoch", len(self.truths), seed=config.seed)
        axis = None
        if self.task.schema.uses_coordinates:
            ids = vocabulary_of(self.task.tokenizer).coordinate_ids
            axis = Axis.of(ids, self.model.vocab_size, world.device)
        terms = LossTerms(
            config.text_weight, config.soft_weight, config.wasserstein_weight, config.outside_weight, config.sigma
        )
        self.module = WithRolloutLoss(self.model, axis, terms)
        optimizer = make_optimizer(
            self.model,
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            eps=config.adam_eps,
            weight_decay=config.weight_decay,
        )
        self.stepper = Stepper(self.model, self.module, optimizer, world, grad_clip=config.grad_clip)
        floor = config.learning_rate * config.min_lr_ratio
        self.lr = LRSchedule(config.learning_rate, floor, config.warmup_iters, config.max_iters, config.lr_schedule)
        self.step = 0
        self.health = Health()
        self._saved: Path | None = None
        self._loss: float | None = None
        self._metrics: MetricsLog | None = None
        self._log: RolloutLog | None = None
        self._progress: TrainProgress | None = None

    def _open_model(self) -> CausalModel:
        folder = checkpoints.model_folder(self.config.init_from_model or "")
        said, tokenizer, format = trained_with(folder), self.task.tokenizer, self.task.format
        for what, theirs, mine in (
            ("tokenizer", said.get("tokenizer_sha256"), tokenizer.sha256),
            ("format", said.get("format"), format.name if isinstance(said.get("format"), str) else format.to_json()),
        ):
            if theirs is not None and theirs != mine:
                raise UsageError(
                    f"{folder}: was trained with another {what} than the config names; "
                    "give the tokenizer, the format and add_tokens that it was trained with"
                )
        return open_model(folder, compute=compute_dtype(self.config.dtype, self.world.device))

    def begin(self, resume: str | None, generator: Generator | None, *, quiet: bool) -> None:
        config, folder = self.config, self.folder
        if resume is None and (checkpoints.found(folder) or (folder / METRICS).exists()):
            raise UsageError(f"{folder}: holds a run already; --resume auto goes on with it, or give another folder")
        path = None if resume is None else checkpoints.choose(folder, resume)
        if path is not None:
            found = checkpoints.open_checkpoint(path, self.world)
            self._check_same(found)
            checkpoints.restore(found, self.model, self.stepper.optimizer)
            self.step, self._saved = found.step, path
        self.generator = generator or generator_of(config, self.model, self.task.eos_id)
        files.make_folder(folder)
        checkpoints.clean(folder)
        checkpoints.leave_later(folder, self.step)
        rewind(folder / METRICS, self.step)
        # A round is logged under the step it begins with, which is done when the round is trained.
        rewind(folder / ROLLOUTS, self.step - 1)
        files.write_file(folder / CONFIG, (json.dumps(config.to_json(), indent=1) + "\n").encode(), overwrite=True)
        self._metrics = MetricsLog(folder / METRICS)
        self._log = RolloutLog(folder / ROLLOUTS)
        self._progress = None if quiet else TrainProgress(self.step, config.max_iters, every=config.log_interval)

    def _check_same(self, found: checkpoints.Checkpoint) -> None:
        mine = json.loads(json.dumps(self.config.to_json()))
        free = {"max_iters", "save_interval", "keep_checkpoints", "log_interval", "device", "replay"}
        differ = [
            f"{name} was {json.dumps(found.said['config'].get(name))}, now it is {json.dumps(value)}"
            for name, value in mine.items()
            if name not in free and found.said["config"].get(name) != value
        ]
        if (theirs := found.said.get("truth_sha256")) != self.truth_sha256:
            differ.append(f"{self.config.truth} was {str(theirs)[:12]}…, now it is {self.truth_sha256[:12]}…")
        if differ:
            raise UsageError(f"{found.path}: {'; '.join(differ)}; a run goes on as it began")

    def go(self) -> RolloutResult:
        """All steps that are left, or after a signal those of the round, from whose end a run can go on."""
        config = self.config
        rows: list[Rows] = []
        with noted() as asked:
            stop = False
            while self.step < config.max_iters and not stop:
                if self.step % config.rollout_every == 0 or not rows:
                    rows = self._round()
                self._train(rows.pop(0))
                last = self.step == config.max_iters
                stop = asked.by is not None and self.step % config.rollout_every == 0
                if config.save_interval and (self.step % config.save_interval == 0 or last or stop):
                    self._save()
        stopped = asked.by if self.step < config.max_iters else None
        return RolloutResult(self.folder, self._saved, self.step, config.max_iters, self._loss, self.health, stopped)

    def _round(self) -> list[Rows]:
        """Answers to the prompts of the next steps, as the rows of each."""
        config, began = self.config, time.perf_counter()
        steps = min(config.rollout_every, config.max_iters - self.step)
        numbers = self._numbers(self.step, self.step + steps)
        asked = prompt_lists(task_prompts([self.truths[number] for number in numbers], self.task))
        # A prompt that leaves no position for an answer is left out, as a target that is too long is.
        places = [place for place, prompt in enumerate(asked) if len(prompt) < self.model.max_positions]
        truths, prompts = [self.truths[numbers[place]] for place in places], [asked[place] for place in places]
        answers = self.generator(prompts, step=self.step)
        assert self._log is not None and self._metrics is not None
        self._log.add(self.step, [truth.record.id or "" for truth in truths], prompts, answers)
        generated = time.perf_counter()
        health = Health()
        chosen = {"train_values": config.train_values, "train_cut": config.train_cut}
        rows = target_rows(_pairs(truths, prompts, answers), self.task, health, **chosen)
        fits = rows.lengths <= self.model.max_positions
        health.too_long = len(asked) - int(np.count_nonzero(fits))
        self.health.merge(health)
        seconds = {"generate_seconds": generated - began, "target_seconds": time.perf_counter() - generated}
        self._metrics.add({"step": self.step + 1, "rollouts": health.to_json(), **seconds})
        step_of = np.array(places, dtype=np.int64) // config.batch_size
        return [rows.take(np.flatnonzero(fits & (step_of == step))) for step in range(steps)]

    def _numbers(self, first: int, last: int) -> list[int]:
        """The records of some steps: the epoch's order, one epoch after the other."""
        places = np.arange(first * self.config.batch_size, last * self.config.batch_size)
        epochs, inside = np.divmod(places, len(self.truths))
        found = np.empty(len(places), dtype=np.int64)
        for epoch in np.unique(epochs).tolist():
            found[epochs == epoch] = self.order.at(epoch, inside[epochs == epoch])
        numbers: list[int] = found.tolist()
        return numbers

    def _train(self, rows: Rows) -> None:
        """One step on the rows of one batch."""
        config, began = self.config, time.perf_counter()
        pad = self.task.eos_id
        count = min(config.gradient_accumulation_steps, max(1, len(rows)))
        cuts = np.linspace(0, len(rows), count + 1).astype(int).tolist()
        batches = [collate(rows[start:stop], pad_token_id=pad) for start, stop in pairwise(cuts) if start < stop]
        parts = [part for batch in batches for part in parts_of(batch, 1, self.world.device)]
        weight = math.fsum(part.inputs.targets.weight for part in parts)
        lr = self.lr(self.step)
        self.step += 1
        assert self._metrics is not None
        if not weight:
            self._metrics.add({"step": self.step, "skipped": 1})
            return
        seed_draws(config.seed, self.step)
        read = self.stepper.step(parts, weight=weight, lr=lr).read()
        if not (math.isfinite(read.loss) and math.isfinite(read.grad_norm)):
            norm = f"the length of the gradient is {read.grad_norm}"
            raise ChatmillError(
                f"step {self.step}: {norm if math.isfinite(read.loss) else f'the loss is {read.loss}'}; "
                f"lower learning_rate, and go on from {self._saved or 'the beginning, no checkpoint was written'}"
            )
        self._loss = read.loss
        terms = {name: value / weight for name, value in self.module.take_terms().items()}
        trained, seconds = sum(part.inputs.targets.count for part in parts), time.perf_counter() - began
        of_step = {"step": self.step, "loss": read.loss, **terms, "grad_norm": read.grad_norm, "lr": lr}
        self._metrics.add({**of_step, "tokens": len(rows.ids), "trained": trained, "seconds": seconds})
        if self._progress is not None:
            self._progress.step(self.step, loss=read.loss, seconds=seconds, tokens=len(rows.ids), trained=trained)

    def _save(self) -> None:
        tokenizer = self.task.tokenizer
        about = {
            "truth": self.config.truth,
            "tokenizer_sha256": tokenizer.sha256,
            "step": self.step,
            "format": self.task.format.to_json(),
            "tokenizer": {"name": tokenizer.name, "sha256": tokenizer.sha256},
            "special_token_ids": tokenizer.special_token_ids(),
        }
        state = tokenizer.state(added_tokens=self.task.add_tokens)
        self._saved = checkpoints.save(
            self.folder,
            {"step": self.step, "config": self.config.to_json(), "truth_sha256": self.truth_sha256},
            self.model,
            self.stepper.optimizer,
            self.world,
            sharded=False,
            keep=self.config.keep_checkpoints,
            about={
                name: json.dumps(data, indent=1).encode()
                for name, data in ((TRAINING, about), (TOKENIZER_STATE, state))
            },
        )

    def close(self) -> None:
        for opened in (self._progress, self._metrics, self._log):
            if opened is not None:
                opened.close()


def _pairs(
    truths: Sequence[GroundTruth], prompts: Sequence[list[int]], answers: Sequence[list[int]]
) -> list[tuple[GroundTruth, Rollout]]:
    return [
        (truth, Rollout(truth.record.id or "", answer, prompt))
        for truth, prompt, answer in zip(truths, prompts, answers, strict=True)
    ]


def _check_model(model: CausalModel, task: Task, config: RolloutConfig) -> None:
    if task.tokenizer.vocab_size > model.vocab_size:
        raise UsageError(
            f"{config.init_from_model}: knows {model.vocab_size} tokens, the tokenizer {task.tokenizer.vocab_size}; "
            "train it with this tokenizer first, as `chatmill rollout answers` prepares it"
        )
