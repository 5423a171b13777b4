"""The training loop: batches in, checkpoints out.

    train(config, model_name="my_sft_model", dataset_dir="data/chat_sft")

A run that is stopped at any moment and goes on from its last checkpoint computes what an undisturbed one does: the
batches are a function of the loader's cursor, the learning rate and the dropout of the step.
"""

from __future__ import annotations

import json
import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from chatmill.errors import ChatmillError, UsageError
from chatmill.load.audit import Audit
from chatmill.load.loader import EpisodeLoader
from chatmill.load.plan import Cursor
from chatmill.store import files
from chatmill.train import checkpoint as checkpoints
from chatmill.train.config import TrainConfig, model_keys
from chatmill.train.evaluate import Evaluation, evaluate
from chatmill.train.journal import METRICS, ROWS, Board, Journal, read_metrics, rewind, rows_file, rows_line
from chatmill.train.plot import loss_plot
from chatmill.train.port import CausalModel
from chatmill.train.progress import Progress, Silence
from chatmill.train.schedule import Schedule
from chatmill.train.start import about_model, check_fit, data_vocab_size, make_model, steps_in_pass
from chatmill.train.step import Counts, Pending, Stepper, counts_of, make_optimizer, parts_of
from chatmill.train.world import World, joined

CONFIG, PLOT = "config.json", "loss.svg"
SHOWN = 20
"""Episodes that a fault names, at most."""


class Step(NamedTuple):
    """What one step was, for whoever watches."""

    step: int
    """Steps of the run, this one included."""
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    trained: int
    seconds: float
    """From the end of the step before to its own."""
    data_wait: float
    """Seconds of them in which the batch was waited for."""


@dataclass(frozen=True)
class Result:
    """What became of a run."""

    folder: Path
    checkpoint: Path | None
    step: int
    total: int
    """Steps the run is to have."""
    loss: float | None
    """Of the last step; None if none was made."""
    val_loss: float | None
    val_perplexity: float | None
    tokens: int
    trained: int
    untrained_rows: int
    """Rows in which nothing was trained: they count for nothing, and in post-training their steps are skipped."""
    skipped_steps: int
    seconds: float
    data_wait: float
    stopped_by: str | None
    """The signal that ended the run early, if one did."""

    @property
    def finished(self) -> bool:
        return self.step >= self.total


class NotFiniteError(ChatmillError):
    """The loss is no number any more, and so the run stops."""


OnEval = Callable[[CausalModel, int], Mapping[str, float]]
"""Called on rank 0 after an evaluation with the model and the step; what it gives goes into the metrics."""


def train(
    config: TrainConfig,
    *,
    model_name: str,
    dataset_dir: str | Path,
    out_dir: str | Path = "checkpoints",
    resume: str | None = None,
    model: CausalModel | None = None,
    watch: Callable[[Step], None] | None = None,
    on_eval: OnEval | None = None,
    quiet: bool = False,
) -> Result:
    """Train a model on a dataset and write all about it to out_dir/model_name.

    `resume` is `auto`, which goes on with the newest checkpoint if there is one, or the folder of a checkpoint.
    `model` stands in for the one that the config would make.
    """
    with joined(config.device) as world:
        run = Run(config, model_name, Path(dataset_dir), Path(out_dir), world, model, quiet=quiet)
        try:
            run.begin(resume)
            return run.go(watch, on_eval)
        except torch.OutOfMemoryError:
            raise _out_of_memory(config, world) from None
        finally:
            run.close()


class Run:
    """One run on one rank, from its first step or a checkpoint to its last."""

    def __init__(
        self,
        config: TrainConfig,
        name: str,
        dataset_dir: Path,
        out_dir: Path,
        world: World,
        model: CausalModel | None,
        *,
        quiet: bool,
    ) -> None:
        if not name or Path(name).name != name or name.startswith("."):
            raise UsageError(f"model_name is {name!r}; expected the name of a folder, without slashes")
        self.name, self.folder, self.dataset_dir = name, out_dir / name, dataset_dir
        self.config, self.world, self._given = config, world, model
        self._quiet = quiet or not world.is_first
        self._progress: Progress = Silence()
        self._closing: list[Callable[[], None]] = []
        self.step = 0
        self._stage_start = 0
        self._counts = dict.fromkeys(("tokens", "trained", "untrained_rows", "skipped_steps"), 0)
        self._seconds = self._data_wait = 0.0
        self._loss: float | None = None
        self._evaluation: Evaluation | None = None
        self._saved: Path | None = None

    # Before the first step.

    def begin(self, resume: str | None) -> None:
        """Open the data, the model and the checkpoint that the run goes on from."""
        config, world = self.config, self.world
        path = world.together(lambda: self._resumed(resume))
        found = None if path is None else checkpoints.open_checkpoint(path, world)
        same_data = self._open_data(found)
        vocab_size = world.together(lambda: data_vocab_size(self.loader))
        compute = torch.bfloat16 if self._bfloat16() else None
        self.model = self._given or world.together(lambda: make_model(config, vocab_size, compute=compute))
        world.together(lambda: check_fit(config, self.loader, self.model))
        self.model.to(world.device).train()
        if config.activation_checkpointing:
            self.model.checkpoint_blocks()
        if config.compile if config.compile is not None else world.device.type == "cuda":
            self.model.compile_blocks()
        module = world.spread(self.model, sharded=config.parallel == "fsdp", compute=compute)
        optimizer = make_optimizer(
            self.model,
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            eps=config.adam_eps,
            weight_decay=config.weight_decay,
        )
        self.stepper = Stepper(self.model, module, optimizer, world, grad_clip=config.grad_clip)
        if found is not None:
            self._go_on(found, same_data)
        self.total = self._stage_start + world.together(self._stage_steps)
        length = self.total - self._stage_start
        self.schedule = Schedule(
            config.learning_rate,
            config.learning_rate * config.min_lr_ratio,
            config.warmup_steps(length),
            length,
            config.lr_schedule,
        )
        world.together(self._open_files)

    def _resumed(self, resume: str | None) -> Path | None:
        if resume is not None:
            return checkpoints.choose(self.folder, resume)
        if checkpoints.found(self.folder) or (self.folder / METRICS).exists():
            raise UsageError(
                f"{self.folder}: holds a run already; --resume auto goes on with it, or give another --model_name"
            )
        return None

    def _bfloat16(self) -> bool:
        if self.config.dtype == "auto":
            return self.world.device.type == "cuda"
        return self.config.dtype == "bfloat16"

    def _open_data(self, found: checkpoints.Checkpoint | None) -> bool:
        """Open the loader, where the checkpoint left it if that was on this data; whether it was."""
        config, world = self.config, self.world

        def open_loader(listener: Audit | None = None) -> EpisodeLoader:
            return EpisodeLoader(
                self.dataset_dir,
                config,
                rank=world.rank,
                world_size=world.size,
                listener=listener,
                pin_memory=world.device.type == "cuda",
            )

        stage = None if found is None else found.said["stage"]
        probe = world.together(open_loader)
        same = stage is not None and (stage["dataset_sha256"], stage["post_training"]) == (
            probe.sha256,
            config.post_training,
        )
        self.audit = None
        if config.audit_dir is None:
            self.loader = probe
        else:
            state = found.said["audit"] if found is not None and same else None
            self.audit = Audit(config.audit_dir, state=state, reduce=world.add if world.size > 1 else None)
            self.loader = world.together(lambda: open_loader(self.audit))
        if found is not None and same:
            world.together(lambda: self.loader.load_state_dict(found.said["loader"]))
        return same

    def _go_on(self, found: checkpoints.Checkpoint, same_data: bool) -> None:
        config, said = self.config, found.said
        if self._given is None:
            mine = json.loads(json.dumps(config.to_json()))
            differ = [
                f"{name} was {said['config'].get(name)}, now it is {mine[name]}"
                for name in model_keys()
                if mine[name] != said["config"].get(name)
            ]
            if differ:
                raise UsageError(f"{found.path}: {'; '.join(differ)}; a run goes on with the model it began with")
        self.world.together(lambda: checkpoints.restore(found, self.model, self.stepper.optimizer))
        self.step = found.step
        self._counts = {**self._counts, **said["counts"]}
        self._saved = found.path
        self._stage_start = said["stage"]["start"] if same_data else found.step

    def _stage_steps(self) -> int:
        """Steps on this data: as many as asked for; one pass if none are, or in post-training at most."""
        one_pass = steps_in_pass(self.loader.plan(self.loader.split))
        if one_pass is None and (self.config.post_training or self.config.max_iters is None):
            why = "post_training is one pass" if self.config.post_training else "max_iters is null, which is one pass"
            raise UsageError(f"{why}, and the order {self.config.batch_sampling_mode} has none; set max_iters")
        if self.config.max_iters is None:
            return one_pass or 0
        if self.config.post_training:
            return min(self.config.max_iters, one_pass or 0)
        return self.config.max_iters

    def _open_files(self) -> None:
        folder, world = self.folder, self.world
        if world.is_first:
            files.make_folder(folder)
            checkpoints.clean(folder)
            if self._saved is not None:
                checkpoints.leave_later(folder, self.step)
            for path in [folder / METRICS, *(folder / ROWS).glob("rank_*.jsonl")]:
                rewind(path, self.step)
            text = json.dumps({"dataset_dir": str(self.dataset_dir), **self.config.to_json()}, indent=1)
            files.write_file(folder / CONFIG, (text + "\n").encode(), overwrite=True)
            self._progress = (
                Silence() if self._quiet else Progress(self.step, self.total, every=self.config.log_interval)
            )
            self.metrics = Journal(folder / METRICS)
            self._closing.append(self.metrics.close)
            self.board = Board(folder) if self.config.tensorboard else None
            if self.board is not None:
                self._closing.append(self.board.close)
            if self.config.log_rows:
                files.make_folder(folder / ROWS)

    def _measure(self, line: Mapping[str, Any]) -> None:
        if self.world.is_first:
            self.metrics.add(line)
            if self.board is not None:
                self.board.add(line)

    # Steps.

    def go(self, watch: Callable[[Step], None] | None, on_eval: OnEval | None) -> Result:
        """All steps that are left, or those before a signal."""
        config, world = self.config, self.world
        began = self.step
        rows = None
        if config.log_rows:
            rows = Journal(rows_file(self.folder, world.rank))
            self._closing.append(rows.close)
        behind: _Behind | None = None
        self._last_end = time.perf_counter()
        with _signals() as signals:
            while self.step < self.total:
                before = time.perf_counter()
                at = self.loader.cursor()
                batch = self.loader.get_batch()
                parts = parts_of(batch, config.gradient_accumulation_steps, world.device)
                waited = time.perf_counter() - before
                counts = Counts(*world.sums(counts_of(batch, parts, stop=signals.caught is not None)))
                lr = self.schedule(self.step - self._stage_start)
                pending = None
                if counts.weight or not config.post_training:
                    _seed(config.seed, self.step, world.rank)
                    pending = self.stepper.step(parts, weight=counts.weight, lr=lr, rows=config.log_rows)
                self.step += 1
                if behind is not None:
                    self._read(behind, watch, rows)
                behind = _Behind(self.step, at, lr, counts, waited, pending)
                evaluates = config.eval_interval and (self.step % config.eval_interval == 0 or self.step == self.total)
                saves = config.save_interval and self.step % config.save_interval == 0
                if evaluates or saves or counts.stop or self.step == self.total:
                    self._read(behind, watch, rows)
                    behind = None
                    if evaluates:
                        self._evaluate(on_eval)
                    if saves:
                        self._save()
                    self._last_end = time.perf_counter()
                if counts.stop:
                    break
        if (
            config.save_interval
            and self.step > began
            and (self._saved is None or self._saved.name != checkpoints.step_name(self.step))
        ):
            self._save()
        if self.audit is not None:
            self.audit.close()
        return self._result(signals.caught)

    def _read(self, behind: _Behind, watch: Callable[[Step], None] | None, rows: Journal | None) -> None:
        """Take note of a step when it is done."""
        counts = behind.counts
        for name, value in (("tokens", counts.tokens), ("trained", counts.trained)):
            self._counts[name] += int(value)
        self._counts["untrained_rows"] += int(counts.untrained_rows)
        self._data_wait += behind.waited
        if behind.pending is None:
            self._counts["skipped_steps"] += 1
            return
        read = behind.pending.read()
        now = time.perf_counter()
        seconds, self._last_end = now - self._last_end, now
        self._seconds += seconds
        if not (math.isfinite(read.loss) and math.isfinite(read.grad_norm)):
            raise self._not_finite(behind, read.loss, read.grad_norm)
        self._loss = read.loss
        step = Step(
            behind.step,
            read.loss,
            read.grad_norm,
            behind.lr,
            int(counts.tokens),
            int(counts.trained),
            seconds,
            behind.waited,
        )
        self._measure(
            {
                **step._asdict(),
                "tokens_per_second": counts.tokens / seconds,
                "trained_per_second": counts.trained / seconds,
            }
        )
        if rows is not None:
            rows.add(rows_line(behind.step, read.rows or []))
        self._progress.step(behind.step, loss=read.loss, seconds=seconds, tokens=counts.tokens, trained=counts.trained)
        if watch is not None:
            watch(step)

    def _not_finite(self, behind: _Behind, loss: float, norm: float) -> NotFiniteError:
        episodes = self.loader.plan(self.loader.split).step(behind.at).episodes.tolist()
        named = ", ".join(map(str, episodes[:SHOWN])) + (
            f" and {len(episodes) - SHOWN} more" if len(episodes) > SHOWN else ""
        )
        what = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient's length is {norm}"
        last = f"the last checkpoint is {self._saved}" if self._saved else "no checkpoint was written before"
        return NotFiniteError(
            f"step {behind.step}: {what}; its episodes are {named}; {last}; "
            "lower learning_rate, or look at the episodes"
        )

    def _evaluate(self, on_eval: OnEval | None) -> None:
        if "val" not in self.loader.splits:
            return
        found = evaluate(self.model, self.loader, self.world, batches=self.config.eval_iters)
        self._evaluation = found
        line: dict[str, Any] = {
            "step": self.step,
            "val_loss": found.loss,
            "val_perplexity": found.perplexity,
            "val_trained": found.trained,
        }
        sharded = self.config.parallel == "fsdp" and self.world.size > 1
        if on_eval is not None and self.world.is_first and not sharded:
            line |= on_eval(self.model, self.step)
        self._measure(line)
        self._progress.say(
            f"step {self.step:,}: val loss {found.loss:.4f}, perplexity {found.perplexity:.4g} "
            f"over {found.trained:,} trained tokens"
        )

    def _save(self) -> None:
        config = self.config
        audit = None if self.audit is None else self.audit.checkpoint()
        said = {
            "step": self.step,
            "stage": {
                "start": self._stage_start,
                "dataset_sha256": self.loader.sha256,
                "post_training": config.post_training,
            },
            "config": config.to_json(),
            "loader": self.loader.state_dict(),
            "audit": audit,
            "counts": self._counts,
            "seed": config.seed,
            "world_size": self.world.size,
        }
        self._saved = checkpoints.save(
            self.folder,
            said,
            self.model,
            self.stepper.optimizer,
            self.world,
            sharded=config.checkpoint == "sharded",
            keep=config.keep_checkpoints,
            about=about_model(self.loader, {"step": self.step}),
        )

    def _result(self, stopped_by: str | None) -> Result:
        if self.world.is_first:
            plot = loss_plot(read_metrics(self.folder), title=self.name)
            files.write_file(self.folder / PLOT, plot.encode(), overwrite=True)
        found = self._evaluation
        return Result(
            folder=self.folder,
            checkpoint=self._saved,
            step=self.step,
            total=self.total,
            loss=self._loss,
            val_loss=found and found.loss,
            val_perplexity=found and found.perplexity,
            **self._counts,
            seconds=self._seconds,
            data_wait=self._data_wait,
            stopped_by=stopped_by if self.step < self.total else None,
        )

    def close(self) -> None:
        self._progress.close()
        for close in self._closing:
            close()
        if hasattr(self, "loader"):
            self.loader.close()


class _Behind(NamedTuple):
    """A step that was handed to the device and not yet looked at."""

    step: int
    at: Cursor
    lr: float
    counts: Counts
    waited: float
    pending: Pending | None


def _seed(*place: int) -> None:
    """Let what is drawn in a step depend on nothing but (seed, step, rank)."""
    torch.manual_seed(int(np.random.SeedSequence(place).generate_state(1, np.uint64)[0] >> 1))


class _Caught:
    caught: str | None = None


@contextmanager
def _signals() -> Iterator[_Caught]:
    """The first SIGINT or SIGTERM is noted; the second does what it always does."""
    noted = _Caught()
    old: dict[int, Any] = {}

    def note(number: int, _: Any) -> None:
        noted.caught = signal.Signals(number).name
        for each, handler in old.items():
            signal.signal(each, handler)

    try:
        for each in (signal.SIGINT, signal.SIGTERM):
            old[each] = signal.signal(each, note)
    except ValueError:
        # Only the main thread hears signals; elsewhere somebody else does.
        old.clear()
    try:
        yield noted
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def _out_of_memory(config: TrainConfig, world: World) -> ChatmillError:
    rows = config.batch_size // world.size // config.gradient_accumulation_steps
    free, size = torch.cuda.mem_get_info(world.device) if world.device.type == "cuda" else (0, 0)
    hint = "" if config.activation_checkpointing else ", set activation_checkpointing"
    return ChatmillError(
        f"the GPU is out of memory ({(size - free) / 2**30:.1f} of {size / 2**30:.1f} GiB are taken) with {rows} rows "
        f"of {config.block_size} tokens at a time; raise gradient_accumulation_steps (now "
        f"{config.gradient_accumulation_steps}), lower batch_size or block_size{hint}"
    )


def as_json(result: Result) -> dict[str, Any]:
    """A result as JSON holds it."""
    said = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(result).items()}
    return {**said, "finished": result.finished}
