"""The training loop: batches in, checkpoints out.

    train(config, model_name="my_sft_model", dataset_dir="data/chat_sft")

A run that is stopped at any moment and goes on from its last checkpoint computes what an undisturbed one does: the
batches are a function of the loader's cursor, the learning rate and all that is drawn one of the step.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

from chatmill.errors import ChatmillError, UsageError
from chatmill.load.plan import Cursor
from chatmill.train.config import TrainConfig
from chatmill.train.distributed import World, joined
from chatmill.train.evaluate import Evaluation, evaluate
from chatmill.train.model import CausalModel
from chatmill.train.run_dir import CONFIG as CONFIG
from chatmill.train.run_dir import RunDir, StepRecord
from chatmill.train.samples import Read, Samples
from chatmill.train.setup import RunState, open_run
from chatmill.train.signals import noted
from chatmill.train.step import Pending, StepCounts, counts_of, parts_of, seed_draws

HOST_IS_FULL = ("DefaultCPUAllocator", "Storage size calculation overflowed")
"""What torch says of it."""
SHOWN = 20
"""Episodes that a fault names, at most."""

Watch = Callable[[StepRecord], None]
"""Called on every rank with each step, when it is done."""
OnEval = Callable[[CausalModel, int], Mapping[str, float]]
"""Called on rank 0 after an evaluation with the model and the step; what it gives goes into the metrics."""
Words = Callable[[Path], Read | None]
"""How the tokens of a dataset read, for sample answers that are shown; None if its tokenizer is not there."""


class NotFiniteError(ChatmillError):
    """The loss is no number any more, and so the run stops."""


class OutOfMemoryError(ChatmillError):
    """The memory of a GPU or of the host is full, perhaps that of one rank alone."""


@dataclass(frozen=True)
class TrainResult:
    """What became of a run."""

    folder: Path
    checkpoint: Path | None
    step: int
    total: int
    """Steps the run is to have."""
    loss: float | None
    """Of the last step that trained anything; None if there was none."""
    val_loss: float | None
    val_perplexity: float | None
    tokens: int
    trained: int
    untrained_rows: int
    """Rows of which nothing was trained: they count for nothing."""
    cut_episodes: int
    """Conversations that were longer than a row, and lost their beginning."""
    cut_tokens: int
    skipped_steps: int
    """Steps of post-training that had nothing to train at all."""
    seconds: float
    """Of the steps that this process made, without evaluations and checkpoints."""
    data_wait: float
    """Seconds of them in which batches were waited for."""
    stopped_by: str | None
    """The signal that ended the run early, if one did."""

    def to_json(self) -> dict[str, Any]:
        said = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}
        return {**said, "finished": self.step >= self.total}


def train_model(
    config: TrainConfig,
    *,
    model_name: str,
    dataset_dir: str | Path | None = None,
    out_dir: str | Path = "checkpoints",
    resume: str | None = None,
    model: CausalModel | None = None,
    watch: Watch | None = None,
    on_eval: OnEval | None = None,
    words: Words | None = None,
    quiet: bool = False,
) -> TrainResult:
    """Train a model on a dataset, that of the config if none is given, and write all about it to out_dir/model_name.

    `resume` is `auto`, which goes on with the newest checkpoint if there is one, or the folder of a checkpoint.
    `model` stands in for the one that the config would make. Sample answers are shown if `words` says how their
    tokens read. `quiet` runs tell nothing on standard error.
    """
    is_name = model_name and Path(model_name).name == model_name and not model_name.startswith(".")
    if not is_name or not model_name.isprintable():
        raise UsageError(f"model_name is {model_name!r}; expected the name of a folder, printable and without slashes")
    if (chosen := dataset_dir or config.dataset_dir) is None:
        raise UsageError("dataset_dir is missing; expected the folder of a dataset")
    folder, data = Path(out_dir) / model_name, Path(chosen)
    with joined(config.device) as world:
        try:
            with open_run(config, data, folder, world, resume=resume, model=model) as opened:
                return Loop(opened, RunDir(folder, data, opened, quiet=quiet), watch, on_eval, words).run()
        except torch.OutOfMemoryError:
            raise _out_of_memory(config, world) from None
        except (MemoryError, RuntimeError) as error:
            # torch has no error of its own for a host that is full.
            if isinstance(error, RuntimeError) and not any(words in str(error) for words in HOST_IS_FULL):
                raise
            raise OutOfMemoryError(_host_is_full(config, world)) from None


class _Behind(NamedTuple):
    """A step that was handed to the device and not yet looked at."""

    step: int
    at: Cursor
    lr: float
    counts: StepCounts
    waited: float
    pending: Pending | None
    """None if there was nothing to train."""


class Loop:
    """The steps of a run that are left to be made."""

    def __init__(
        self,
        opened: RunState,
        output: RunDir,
        watch: Watch | None = None,
        on_eval: OnEval | None = None,
        words: Words | None = None,
    ) -> None:
        self._o, self._output, self._watch, self._on_eval, self._words = opened, output, watch, on_eval, words
        self._behind: _Behind | None = None
        self._ended = 0.0
        """When the last step that was looked at ended."""
        self._seconds = self._waited = 0.0
        self._loss: float | None = None
        self._evaluation: Evaluation | None = None

    def run(self) -> TrainResult:
        """Make all steps that are left, or those before a signal; save, and say what became of it."""
        opened, config, began = self._o, self._o.config, self._o.step
        try:
            with noted() as asked:
                self._ended = time.perf_counter()
                stop = False
                while opened.step < opened.stage.stop and not stop:
                    stop = self._step(asked_to_stop=asked.by is not None)
                    last = opened.step == opened.stage.stop
                    evaluates = config.eval_interval and (opened.step % config.eval_interval == 0 or last)
                    saves = config.save_interval and opened.step % config.save_interval == 0
                    if evaluates or saves or stop or last:
                        self._catch_up()
                        if evaluates:
                            self._evaluate()
                        if saves or (config.save_interval and (stop or last)):
                            self._output.save()
                        self._ended = time.perf_counter()
            if opened.step > began:
                self._output.plot()
            early = stop and opened.step < opened.stage.stop
            return self._result((asked.by or "a signal to another rank") if early else None)
        finally:
            self._output.close()

    def _step(self, *, asked_to_stop: bool) -> bool:
        """Hand one step to the device and look at the one before; whether any rank was asked to stop."""
        opened, config, world = self._o, self._o.config, self._o.world
        before = time.perf_counter()
        at, cut = opened.loader.cursor(), opened.loader.counts()
        batch = opened.loader.get_batch()
        parts = parts_of(batch, config.gradient_accumulation_steps, world.device)
        waited = time.perf_counter() - before
        counts = counts_of(batch, parts)._replace(
            cut_episodes=opened.loader.counts().cut_episodes - cut.cut_episodes,
            cut_tokens=opened.loader.counts().cut_tokens - cut.cut_tokens,
            stop=float(asked_to_stop),
        )
        counts = StepCounts(*world.sums(counts))
        lr = opened.stage.lr(opened.step)
        pending = None
        if counts.weight or not config.post_training:
            seed_draws(config.seed, opened.step, world.rank)
            pending = opened.stepper.step(parts, weight=counts.weight, lr=lr, rows=config.log_rows)
        opened.step += 1
        now = _Behind(opened.step, at, lr, counts, waited, pending)
        self._catch_up()
        self._behind = now
        return counts.stop > 0

    def _catch_up(self) -> None:
        """Look at the step that was handed out last, when it is done."""
        behind, self._behind = self._behind, None
        if behind is None:
            return
        counts, totals = behind.counts, self._o.totals
        totals.add(counts)
        read = None if behind.pending is None else behind.pending.read()
        now = time.perf_counter()
        seconds, self._ended = now - self._ended, now
        self._seconds += seconds
        self._waited += behind.waited
        if read is None:
            totals.skipped_steps += 1
            self._output.skipped(behind.step, untrained_rows=int(counts.untrained_rows))
            return
        if not (math.isfinite(read.loss) and math.isfinite(read.grad_norm)):
            raise self._not_finite(behind, read.loss, read.grad_norm)
        loss = read.loss if counts.weight else None
        self._loss = self._loss if loss is None else loss
        step = StepRecord(
            step=behind.step,
            loss=loss,
            grad_norm=read.grad_norm,
            lr=behind.lr,
            tokens=int(counts.tokens),
            trained=int(counts.trained),
            untrained_rows=int(counts.untrained_rows),
            seconds=seconds,
            data_wait=behind.waited,
        )
        self._output.step(step, read.rows)
        if self._watch is not None:
            self._watch(step)

    def _not_finite(self, behind: _Behind, loss: float, norm: float) -> NotFiniteError:
        loader = self._o.loader
        episodes = loader.plan(loader.split).step(behind.at).episodes.tolist()
        rest = f" and {len(episodes) - SHOWN} more" if len(episodes) > SHOWN else ""
        what = f"the length of the gradient is {norm}" if math.isfinite(loss) else f"the loss is {loss}"
        saved = self._o.saved
        return NotFiniteError(
            f"step {behind.step}: {what}; its episodes are {', '.join(map(str, episodes[:SHOWN]))}{rest}; "
            f"look at them or lower learning_rate, and go on from {saved or 'the beginning, no checkpoint was written'}"
        )

    def _evaluate(self) -> None:
        opened = self._o
        if "val" not in opened.loader.splits:
            return
        model = opened.stepper.model
        found = evaluate(model, opened.loader, opened.world, batches=opened.config.eval_iters)
        self._evaluation = found
        more: dict[str, float] = {}
        shown: list[str] = []
        # A model in shards answers only if all ranks ask.
        if opened.world.is_first and opened.stepper.is_whole:
            if self._samples is not None:
                said = self._samples.ask(model)
                more |= self._samples.rates(said)
                shown = [] if self._read is None else self._samples.told(said, self._read)
            if self._on_eval is not None:
                more |= self._on_eval(model, opened.step)
        self._output.evaluation(opened.step, found, more, shown)

    @cached_property
    def _samples(self) -> Samples | None:
        opened = self._o
        count = opened.config.eval_samples
        return Samples(opened.loader.sources, count, opened.stepper.model) if count else None

    @cached_property
    def _read(self) -> Read | None:
        if self._words is None:
            return None
        folder = self._o.loader.sources[0].path
        read = self._words(folder)
        if read is None:
            self._output.say(f"sample answers are counted and not shown: the tokenizer of {folder} is not beside it")
        return read

    def _result(self, stopped_by: str | None) -> TrainResult:
        opened, found = self._o, self._evaluation
        return TrainResult(
            folder=self._output.folder,
            checkpoint=opened.saved,
            step=opened.step,
            total=opened.stage.stop,
            loss=self._loss,
            val_loss=found and found.loss,
            val_perplexity=found and found.perplexity,
            **asdict(opened.totals),
            seconds=self._seconds,
            data_wait=self._waited,
            stopped_by=stopped_by,
        )


def _host_is_full(config: TrainConfig, world: World) -> str:
    rows = config.batch_size // world.size // config.gradient_accumulation_steps
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{_rank(world)}the host is out of memory (it has {size:.1f} GiB) with {rows} rows of {config.block_size} "
        "tokens at a time; lower batch_size, block_size or max_positions, or take a smaller model"
    )


def _rank(world: World) -> str:
    return f"rank {world.rank}: " if world.size > 1 else ""


def _out_of_memory(config: TrainConfig, world: World) -> OutOfMemoryError:
    rows = config.batch_size // world.size // config.gradient_accumulation_steps
    taken = ""
    if world.device.type == "cuda":
        free, size = torch.cuda.mem_get_info(world.device)
        taken = f" ({(size - free) / 2**30:.1f} of {size / 2**30:.1f} GiB are taken)"
    lower = "lower batch_size or block_size" if config.activation_checkpointing else "set activation_checkpointing"
    return OutOfMemoryError(
        f"{_rank(world)}the GPU is out of memory{taken} with {rows} rows of {config.block_size} tokens at a time; "
        f"raise gradient_accumulation_steps from {config.gradient_accumulation_steps}, or {lower}"
    )
