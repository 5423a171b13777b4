"""The rollout training loop: the model generates answers, and is trained on targets built from them.

    every K steps    prompts ── generate ──▶ rollouts ── match, append ──▶ K batches
    every step       batch ──▶ one forward pass, one loss, one backward pass

The order of the prompts depends only on the seed, and sampling depends only on (seed, step, row). All rollouts are
logged, so a run can be replayed from its log.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from chatmill.errors import DataError, UsageError
from chatmill.load.batch import collate
from chatmill.load.order import make_order
from chatmill.plain_file import local_path
from chatmill.records import Record
from chatmill.records.files import expand, shown
from chatmill.records.raw_files import open_raw
from chatmill.remote.urls import Url, place
from chatmill.rollout.config import RolloutConfig
from chatmill.rollout.files import Rollout, log_rollouts, read_truth
from chatmill.rollout.generators import Generator, generator_of, text_counts
from chatmill.rollout.loss import Axis, RolloutLoss, TermWeights
from chatmill.rollout.task import Health, Task, answer_rows, open_task, prompt_lists, target_rows, task_prompts
from chatmill.rollout.vocabulary import vocabulary_of
from chatmill.rows import Rows, concat
from chatmill.store.layout import TOKENIZER_STATE
from chatmill.train import checkpoint as checkpoints
from chatmill.train.attention import BLOCK
from chatmill.train.checkpoint_files import model_folder
from chatmill.train.distributed import World
from chatmill.train.load_model import compute_dtype, open_model
from chatmill.train.model import CausalModel
from chatmill.train.optimizers import check_optimizer, weights_of
from chatmill.train.preflight import TRAINING, trained_with
from chatmill.train.process_group import init_world
from chatmill.train.run_dir import RunDir, config_changes, open_resumed
from chatmill.train.saved_template import template_notes, template_record
from chatmill.train.step import LRSchedule, MicroBatch, Stepper, micro_batches, seed_step, unknown_id
from chatmill.train.stop_signal import stop_on_signal
from chatmill.train.trackers.reporter import named_trackers

ROLLOUTS = "rollouts.jsonl"
MAY_CHANGE = {"max_iters", "save_interval", "keep_checkpoints", "log_interval", "device", "replay", "report_to"}
"""Config keys that may change when a run is resumed."""


@dataclass(frozen=True)
class RolloutResult:
    """The result of a rollout training run."""

    folder: Path
    checkpoint: Path | None
    step: int
    total: int
    loss: float | None
    """Loss of the last training step."""
    health: Health
    """Counts over all rollouts since the start, or since the run was resumed."""
    stopped_by: str | None

    def to_json(self) -> dict[str, Any]:
        values = {name: str(value) if isinstance(value, Path) else value for name, value in vars(self).items()}
        return {**values, "health": self.health.to_json()}


def train_rollouts(
    config: RolloutConfig,
    folder: Path,
    *,
    resume: str | None = None,
    model: CausalModel | None = None,
    generator: Generator | None = None,
    quiet: bool = False,
) -> RolloutResult:
    """Train a model on its own answers, and write checkpoints and logs to `folder`.

    `resume` is the folder of a checkpoint, or `auto` for the newest checkpoint, if any. `model` and `generator`
    override the model and the generator of the config.
    """
    local_path(folder)
    trackers = named_trackers(config.report_to)
    with init_world(config.device) as world:
        run = _RolloutRun(config, folder, world, model)
        run.resume(resume)
        generator = generator or world.together(lambda: generator_of(config, run.model, run.task))
        # Keep only the rollouts of finished rounds. A rollout is logged with the first step of its round.
        rewinds = {ROLLOUTS: run.step - 1}
        run_dir = RunDir(
            folder,
            config.to_json(),
            world,
            step=run.step,
            total=config.max_iters,
            quiet=quiet,
            rewinds=rewinds,
            trackers=trackers,
            data={"truth_sha256": run.truth_sha256},
        )
        with closing(run_dir), (folder / ROLLOUTS).open("ab") if world.is_first else nullcontext() as log:
            return run.train(generator, run_dir, log)


class _RolloutRun:
    def __init__(self, config: RolloutConfig, folder: Path, world: World, model: CausalModel | None) -> None:
        self.config, self.folder, self.world = config, folder, world
        world.together(lambda: self._open(model))
        self.order = make_order("epoch", len(self.truths), seed=config.seed)
        axis = None
        if self.task.schema.uses_coordinates:
            ids = vocabulary_of(self.task.tokenizer).coordinate_ids
            axis = Axis.of(ids, self.model.vocab_size, world.device)
        weights = config.text_weight, config.soft_weight, config.wasserstein_weight, config.outside_weight
        self.loss_function = self.model.loss = RolloutLoss(axis, TermWeights(*weights, config.sigma))
        compute = compute_dtype(config.dtype, world.device)
        module = world.distribute(self.model, sharded=False, compute=compute)
        self.stepper = Stepper(self.model, module, world, config)
        self.lr = LRSchedule.of(config, warmup=config.warmup_iters, total=config.max_iters)
        self.step = 0
        self.health = Health()
        self.saved: Path | None = None
        self.loss: float | None = None

    def _open(self, model: CausalModel | None) -> None:
        config = self.config
        fields = None if config.fields is None else tuple(config.fields)
        self.task = open_task(
            config.tokenizer, config.format, fields=fields, gate=config.gate, add_tokens=config.add_tokens
        )
        truth = place(config.truth or "")
        if isinstance(truth, Url) and str(truth) != truth.address:
            raise UsageError(f"{shown(truth)}: the run would store the password or query of the URL; remove it")
        self.truths = list(read_truth(config.truth or ""))
        with open_raw(expand([truth])[0]) as file:
            self.truth_sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        if not self.truths:
            raise DataError(f"{shown(truth)}: contains no records; expected at least one")
        self.model = model or _open_model(config, self.task, self.world)
        if self.task.tokenizer.vocab_size > self.model.vocab_size:
            raise UsageError(
                f"{config.init_from_model}: the model's vocabulary size is {self.model.vocab_size}, "
                f"but the tokenizer has {self.task.tokenizer.vocab_size} tokens; "
                "first train the model with this tokenizer on data from `chatmill rollout answers`"
            )

    def resume(self, resume: str | None) -> None:
        checkpoint = open_resumed(self.folder, resume, self.world, otherwise="another folder", logs=(ROLLOUTS,))
        if checkpoint is None:
            return
        config = self.config.to_json()
        changes = config_changes(checkpoint, config, [name for name in config if name not in MAY_CHANGE])
        if (theirs := checkpoint.state.get("truth_sha256")) != self.truth_sha256:
            changes.append(
                f"the hash of {shown(place(self.config.truth or ''))} was {str(theirs)[:12]}…, "
                f"but is now {self.truth_sha256[:12]}…"
            )
        if changes:
            raise UsageError(f"{checkpoint.path}: {'; '.join(changes)}; resume with the original settings")
        check_optimizer(checkpoint.state, self.config, checkpoint.path)
        self.world.together(lambda: checkpoints.restore(checkpoint, self.model, self.stepper.optimizer))
        self.step, self.saved = checkpoint.step, checkpoint.path

    def train(self, generator: Generator, run_dir: RunDir, log: BinaryIO | None) -> RolloutResult:
        """Train for the remaining steps. After a signal, stop before the next rollouts are generated, so that the run
        can be resumed.
        """
        config = self.config
        if (base := self.model.tokenizer_folder) is not None:
            chat_format, truth = self.task.renderer.to_json(), shown(place(config.truth or ""))
            for note in template_notes(base, chat_format, truth, remedy="set format to template"):
                run_dir.print(note)
        rows: list[Rows] = []
        with stop_on_signal() as request:
            stop = False
            while self.step < config.max_iters and not stop:
                if self.step % config.rollout_every == 0 or not rows:
                    rows = self._round(generator, run_dir, log)
                self._train_step(rows.pop(0), run_dir)
                request.finished_step()
                last = self.step == config.max_iters
                if self.step % config.rollout_every == 0:
                    (stops,) = self.world.sums([request.by is not None])
                    stop = stops > 0
                if config.save_interval and (self.step % config.save_interval == 0 or last or stop):
                    self._save()
        stopped = request.by or "a signal that another rank received" if self.step < config.max_iters else None
        run_dir.end("finished" if stopped is None else "stopped")
        return RolloutResult(self.folder, self.saved, self.step, config.max_iters, self.loss, self.health, stopped)

    def _round(self, generator: Generator, run_dir: RunDir, log: BinaryIO | None) -> list[Rows]:
        """Generate the answers for the next `rollout_every` steps, and return the rows of each step."""
        config, began = self.config, time.perf_counter()
        steps = min(config.rollout_every, config.max_iters - self.step)
        numbers = self._record_numbers(self.step, self.step + steps)
        all_prompts = prompt_lists(task_prompts([self.truths[number] for number in numbers], self.task))
        # Skip prompts that leave no room for an answer.
        places = [place for place, prompt in enumerate(all_prompts) if len(prompt) < self.model.max_positions]
        first_row, share = self.step * config.batch_size, Fraction(str(config.rollout_share))
        # Of the first n rows of the run, floor(n · share) are rollouts.
        own = [place for place in places if (first_row + place + 1) * share // 1 > (first_row + place) * share // 1]
        truths, prompts = [self.truths[numbers[place]] for place in own], [all_prompts[place] for place in own]
        answers = self._answers(generator, prompts, [truth.record for truth in truths])
        rollouts = [
            Rollout(truth.record.id or "", list(answer), prompt, self.step, row)
            for row, (truth, prompt, answer) in enumerate(zip(truths, prompts, answers, strict=True))
        ]
        if log is not None:
            log_rollouts(log, rollouts)
        generated = time.perf_counter()
        health = Health()
        health.as_text, health.retokenized = map(int, self.world.sums(text_counts(generator)))
        pairs = list(zip(truths, rollouts, strict=True))
        parts = [
            target_rows(
                pairs,
                self.task,
                health,
                train_values=config.train_values,
                train_cut=config.train_cut,
                border=config.border,
                weights=config.part_weights(),
            )
        ]
        others = sorted(set(places) - set(own))
        if others:
            true = [self.truths[numbers[place]] for place in others]
            parts.append(answer_rows(true, self.task, train_values=config.train_values))
        places = [*own, *others]
        rows = concat([part for part in parts if len(part)] or parts).take(np.argsort(places))
        places.sort()
        fits = rows.lengths <= self.model.max_positions
        health.too_long = len(all_prompts) - int(np.count_nonzero(fits))
        self.health.merge(health)
        seconds = {"generate_seconds": generated - began, "target_seconds": time.perf_counter() - generated}
        run_dir.log({"step": self.step + 1, "rollouts": health.to_json(), **seconds})
        step_of = np.array(places, dtype=np.int64) // config.batch_size
        return [rows.take(np.flatnonzero(fits & (step_of == step))) for step in range(steps)]

    def _answers(self, generator: Generator, prompts: list[list[int]], records: list[Record]) -> list[list[int]]:
        """Return one answer per prompt. Each rank generates whole batches, so the number of ranks does not affect the
        answers.
        """
        size = self.config.generation_size
        starts = range(0, len(prompts), size)

        def mine() -> list[list[list[int]]]:
            own = starts[self.world.rank :: self.world.size]
            return [
                generator(prompts[at : at + size], step=self.step, first_row=at, records=records[at : at + size])
                for at in own
            ]

        of_ranks = self.world.gather(self.world.together(mine))
        return [
            answer
            for number in range(len(starts))
            for answer in of_ranks[number % self.world.size][number // self.world.size]
        ]

    def _record_numbers(self, first: int, last: int) -> list[int]:
        """Return the indices of the training records for the steps [first, last)."""
        places = np.arange(first * self.config.batch_size, last * self.config.batch_size)
        epochs, inside = np.divmod(places, len(self.truths))
        numbers = [self.order.at(epoch, inside[epochs == epoch]) for epoch in np.unique(epochs).tolist()]
        return [int(number) for number in np.concatenate(numbers)]

    def _train_step(self, rows: Rows, run_dir: RunDir) -> None:
        config, began = self.config, time.perf_counter()
        parts = self.world.alone(lambda: self._micro_batches(self._own_rows(rows)))
        weight, trained = self.world.sums(
            [math.fsum(part.inputs.targets.weight for part in parts), sum(part.inputs.targets.count for part in parts)]
        )
        lr = self.lr(self.step)
        self.step += 1
        if not weight:
            run_dir.log({"step": self.step, "skipped": 1})
            return
        seed_step(config.seed, self.step, *([self.world.rank] if self.world.size > 1 else []))
        result = self.stepper.step(parts, weight=weight, lr=lr, key=(config.seed, self.step)).read()
        result.check_finite(self.step, self.saved, lambda: "lower learning_rate")
        self.loss = result.loss
        own = self.loss_function.take_terms()
        terms = {name: value / weight for name, value in zip(own, self.world.sums(list(own.values())), strict=True)}
        tokens, trained = len(rows.ids), int(trained)
        seconds = time.perf_counter() - began
        metrics = {"step": self.step, "loss": result.loss, **terms, "grad_norm": result.grad_norm, "lr": lr}
        run_dir.log({**metrics, "tokens": tokens, "trained": trained, "seconds": seconds})
        run_dir.show_step(self.step, loss=result.loss, seconds=seconds, tokens=tokens, trained=trained)

    def _own_rows(self, rows: Rows) -> Rows:
        """Return this rank's rows of a batch. A rank without rows gets one row with weight 0."""
        rank, size = self.world.rank, self.world.size
        own = rows[len(rows) * rank // size : len(rows) * (rank + 1) // size]
        if len(own) or not len(rows):
            return own
        row = rows[:1]
        spans = row.spans.copy()
        spans["weight"] = 0
        return replace(row, spans=spans)

    def _micro_batches(self, rows: Rows) -> list[MicroBatch]:
        count = min(self.config.gradient_accumulation_steps, max(1, len(rows)))
        cuts = np.linspace(0, len(rows), count + 1).astype(int).tolist()
        pairs = [(start, stop) for start, stop in pairwise(cuts) if start < stop]
        parts = [rows[start:stop] for start, stop in pairs]
        lengths = [_padded_length(part, self.world.device) for part in parts]
        batches = [
            collate(part, pad_token_id=self.task.eos_id, length=length)
            for part, length in zip(parts, lengths, strict=True)
        ]
        for batch in batches:
            if fault := unknown_id(batch, self.model.vocab_size):
                raise DataError(f"step {self.step + 1}: {fault}; use rollouts that this model generated")
        return [part for batch in batches for part in micro_batches(batch, 1, self.world.device)]

    def _save(self) -> None:
        tokenizer = self.task.tokenizer
        about = {
            "truth": self.config.truth,
            "tokenizer_sha256": tokenizer.sha256,
            "step": self.step,
            "format": self.task.renderer.to_json(),
            "tokenizer": {"name": tokenizer.name, "sha256": tokenizer.sha256},
            "special_token_ids": tokenizer.special_token_ids(),
        }
        if (base := self.model.tokenizer_folder) is not None:
            about |= template_record(base, self.task.renderer.to_json())
        tokenizer_state = tokenizer.state(added_tokens=self.task.add_tokens)
        parts = {TRAINING: about, TOKENIZER_STATE: tokenizer_state}
        files = {name: json.dumps(value, indent=1).encode() for name, value in parts.items()}
        state = {"step": self.step, "config": self.config.to_json(), "truth_sha256": self.truth_sha256}
        model, optimizer, keep = self.model, self.stepper.optimizer, self.config.keep_checkpoints
        self.saved = checkpoints.save(
            self.folder,
            state,
            model,
            optimizer,
            self.world,
            sharded=False,
            keep=keep,
            about=files,
            chat_format=self.task.renderer.to_json(),
            save_dtype=self.config.save_dtype,
        )


def _padded_length(rows: Rows, device: torch.device) -> int | None:
    """Return the length to which a batch is padded, or None for the length of its longest row.

    On a GPU, inputs are padded to a power of two, because FlexAttention is compiled for each length.
    """
    if device.type != "cuda":
        return None
    return 1 + max(BLOCK, 1 << (int(rows.lengths.max(initial=2)) - 2).bit_length())


def _open_model(config: RolloutConfig, task: Task, world: World) -> CausalModel:
    folder = model_folder(config.init_from_model or "")
    training, format = trained_with(folder), task.renderer.to_json()
    theirs = training.get("format")
    for what, trained, given in (
        ("tokenizer", training.get("tokenizer_sha256"), task.tokenizer.sha256),
        ("format", theirs, format["name"] if isinstance(theirs, str) else format),
    ):
        if trained is not None and trained != given:
            raise UsageError(
                f"{folder}: the model was trained with a different {what} than the one in the config; "
                "use the tokenizer, format and add_tokens that the model was trained with"
            )
    compute, adapters = compute_dtype(config.dtype, world.device), config.lora_sizes()
    torch.manual_seed(config.seed)
    model = open_model(folder, compute=compute, weights=weights_of(config) if adapters is None else "stored")
    return model if adapters is None else model.with_lora(adapters, folder)
