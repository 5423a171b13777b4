"""The training loop: batches in, checkpoints out.

    train_model(config, model_name="my_sft_model", dataset_dir="data/chat_sft")

A run that is stopped at any moment and resumes from its last checkpoint computes the same as an undisturbed one: the
batches are a function of the loader's cursor, the learning rate and all random numbers one of the step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

from chatmill.errors import UsageError
from chatmill.load.plan import Cursor
from chatmill.plain_file import local_path
from chatmill.train import checkpoint as checkpoints
from chatmill.train.config import TrainConfig
from chatmill.train.distributed import init_world
from chatmill.train.evaluate import Evaluation, Samples, TokenText, evaluate, raise_unknown
from chatmill.train.loss import LossFunction
from chatmill.train.model import CausalModel
from chatmill.train.out_of_memory import memory_errors
from chatmill.train.preflight import about_model
from chatmill.train.run_dir import RowsData, RunDir, stop_on_signal
from chatmill.train.setup import TrainState, open_run
from chatmill.train.step import Pending, StepCounts, count_batch, micro_batches, seed_step, unknown_id

CUT_COUNTS = ("cut_episodes", "cut_tokens", "answer_cut")
"""What the loader counts of episodes that are longer than a row."""
SHOWN_EPISODES = 20
"""An error names at most this many episodes."""


class StepRecord(NamedTuple):
    """The metrics of one step."""

    step: int
    """Steps of the run, this one included."""
    loss: float | None
    """The mean over the trained tokens of the global batch; None if there are none."""
    grad_norm: float
    lr: float
    tokens: int
    """Tokens without padding."""
    trained: int
    untrained_rows: int
    seconds: float
    """From the end of the step before to the end of this one."""
    data_wait: float
    """Seconds spent waiting for the batch."""


OnStep = Callable[[StepRecord], None]
"""Called on every rank after each step."""
OnEval = Callable[[CausalModel, int], Mapping[str, float]]
"""Called on rank 0 after an evaluation with the model and the step; the result goes into the metrics."""
OpenText = Callable[[Path], TokenText | None]
"""Opens what turns the tokens of a dataset into text, to show sample answers; None if it has no tokenizer."""


@dataclass(frozen=True)
class TrainResult:
    """The result of a run."""

    folder: Path
    checkpoint: Path | None
    step: int
    total: int
    """Steps of the whole run."""
    loss: float | None
    """Of the last step with a trained token; None if there was none."""
    val_loss: float | None
    val_perplexity: float | None
    val_sources: Mapping[str, Mapping[str, float | None] | None]
    """`loss`, `perplexity` and `trained` tokens of each source of a mix; None for one without episodes in val."""
    tokens: int
    trained: int
    untrained_rows: int
    """Rows without a trained token, which do not count."""
    cut_episodes: int
    """Conversations longer than a row, which lost their beginning."""
    cut_tokens: int
    answer_cut: int
    """Of these, conversations that lost part of an answer."""
    skipped_steps: int
    """Steps of post-training without a trained token."""
    non_answer_tokens: int
    """Trained tokens of the train split that are not answers, because use_loss_mask is false."""
    seconds: float
    """Of the steps of this process, without evaluations and checkpoints."""
    data_wait: float
    """Seconds of them spent waiting for batches."""
    stopped_by: str | None
    """The signal that ended the run early, if one did."""

    def to_json(self) -> dict[str, Any]:
        values = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}
        return {**values, "finished": self.step >= self.total}


def train_model(
    config: TrainConfig,
    *,
    model_name: str,
    dataset_dir: str | Path | None = None,
    out_dir: str | Path = "checkpoints",
    resume: str | None = None,
    model: CausalModel | None = None,
    loss: LossFunction | None = None,
    watch: OnStep | None = None,
    on_eval: OnEval | None = None,
    open_text: OpenText | None = None,
    notes: Sequence[str] = (),
    quiet: bool = False,
) -> TrainResult:
    """Train a model on a dataset, by default that of the config, and write the run to out_dir/model_name.

    `resume` is `auto`, the newest checkpoint if there is one, or the folder of a checkpoint. `model` replaces the one
    that the config would make, and `loss` the weighted cross entropy. `watch` is called after every step, `on_eval`
    after every evaluation. Sample answers are shown if `open_text` gives what turns their tokens into text. `notes` are
    printed when the run starts. `quiet` prints nothing.

    A run that fails before it finishes its first step leaves neither a folder nor an audit log.

    >>> from chatmill import InputSource, Job, TrainConfig, prepare_dataset, train_model
    >>> _ = prepare_dataset(Job((InputSource(("data/conversations.jsonl",)),), tokenizer="bytes"), "sft")
    >>> tiny = {"n_layer": 1, "n_embd": 16, "n_head": 2, "max_iters": 2, "eval_interval": 0, "use_loss_mask": True}
    >>> result = train_model(TrainConfig(**tiny), model_name="mine", dataset_dir="sft", quiet=True)
    >>> result.step, str(result.checkpoint)
    (2, 'checkpoints/mine/step_00000002')
    """
    is_name = model_name and Path(model_name).name == model_name and not model_name.startswith(".")
    if not is_name or not model_name.isprintable():
        raise UsageError(f"model_name is {model_name!r}; expected the name of a folder, printable and without slashes")
    if (chosen := dataset_dir or config.dataset_dir) is None:
        raise UsageError("dataset_dir is missing; expected the folder of a dataset")
    folder, data = local_path(out_dir) / model_name, local_path(chosen)
    for named in (config.init_from_model, config.audit_dir, resume):
        # Before anything is written.
        local_path(named or "")
    with (
        init_world(config.device) as world,
        memory_errors(config, world),
        open_run(config, data, folder, world, resume=resume, model=model) as state,
    ):
        if loss is not None:
            state.stepper.model.loss = loss
        state.notes += notes
        run_dir = _run_dir(state, folder, data, quiet=quiet)
        return _Loop(state, run_dir, watch, on_eval, open_text).run()


def _run_dir(state: TrainState, folder: Path, dataset_dir: Path, *, quiet: bool) -> RunDir:
    config = {**state.config.to_json(), "dataset_dir": str(dataset_dir)}
    data = RowsData(str(dataset_dir), state.stage.dataset_sha256, state.loader.config.mix_sft)
    rows = data if state.config.log_rows else None
    run_dir = RunDir(folder, config, state.world, step=state.step, total=state.stage.stop, quiet=quiet, rows=rows)
    state.notes += [f"a later checkpoint stays as {path}; it is not used any more" for path in run_dir.set_aside]
    return run_dir


class _Launched(NamedTuple):
    """A step that was launched on the device and whose result has not been read."""

    step: int
    cursor: Cursor
    lr: float
    counts: StepCounts
    data_wait: float
    pending: Pending | None
    """None if there was nothing to train."""


@dataclass
class _Loop:
    """The remaining steps of a run."""

    state: TrainState
    run_dir: RunDir
    watch: OnStep | None
    on_eval: OnEval | None
    open_text: OpenText | None
    launched: _Launched | None = None
    ended: float = 0.0
    """When the last step whose result was read ended."""
    seconds: float = 0.0
    data_wait: float = 0.0
    loss: float | None = None
    evaluation: Evaluation | None = None

    def run(self) -> TrainResult:
        """Take all remaining steps, or those before a signal; save, and return the result."""
        state, config, began = self.state, self.state.config, self.state.step
        try:
            for note in state.notes:
                self.run_dir.print(note)
            with stop_on_signal() as request:
                self.ended = time.perf_counter()
                stop = False
                while state.step < state.stage.stop and not stop:
                    stop = self._step(stop_requested=request.by is not None)
                    last = state.step == state.stage.stop
                    evaluates = config.eval_interval and (state.step % config.eval_interval == 0 or last)
                    saves = config.save_interval and (state.step % config.save_interval == 0 or stop or last)
                    if evaluates or saves or stop or last:
                        self._finish_step()
                        if last and state.data_check is not None:
                            state.data_check.check_at_end(self.run_dir.folder, state.step, state.world)
                        if evaluates:
                            self._evaluate()
                        if saves:
                            self._save()
                        self.ended = time.perf_counter()
            if state.step > began:
                self.run_dir.plot()
            early = stop and state.step < state.stage.stop
            return self._result((request.by or "a signal to another rank") if early else None)
        except BaseException:
            if not state.has_trained:
                self.run_dir.discard()
            raise
        finally:
            self.run_dir.close()

    def _step(self, *, stop_requested: bool) -> bool:
        """Launch one step and read the result of the one before; whether a stop was requested on any rank."""
        state, config, world = self.state, self.state.config, self.state.world
        before = time.perf_counter()
        cursor, cut = state.loader.cursor(), state.loader.counts()
        batch = world.alone(state.loader.get_batch)
        parts = micro_batches(batch, config.gradient_accumulation_steps, world.device)
        data_wait = time.perf_counter() - before
        unknown, check = unknown_id(batch, state.stepper.model.vocab_size), state.data_check
        counts = count_batch(batch, parts)._replace(
            **{name: getattr(state.loader.counts(), name) - getattr(cut, name) for name in CUT_COUNTS},
            stop=float(stop_requested),
            unknown_ids=float(unknown is not None),
            damaged=float(check is not None and check.fault is not None),
            checking=float(check is not None and check.is_running),
        )
        counts = StepCounts(*world.sums(counts))
        if counts.unknown_ids:
            world.together(partial(raise_unknown, unknown, state.loader))
        if check is not None:
            if counts.damaged:
                check.stop(self.run_dir.folder, state.step, world)
            check.follow(state.saved, state.loader.cursor(), all_done=not counts.checking)
        lr = state.stage.lr(state.step)
        pending = None
        if counts.weight or not config.post_training:
            seed_step(config.seed, state.step, world.rank)
            pending = state.stepper.step(parts, weight=counts.weight, lr=lr, rows=config.log_rows)
        state.step += 1
        launched = _Launched(state.step, cursor, lr, counts, data_wait, pending)
        self._finish_step()
        self.launched = launched
        return counts.stop > 0

    def _finish_step(self) -> None:
        """Wait for the launched step, and log it."""
        launched, self.launched = self.launched, None
        if launched is None:
            return
        counts, totals = launched.counts, self.state.totals
        result = None if launched.pending is None else launched.pending.read()
        self.state.has_trained = True
        totals.add(counts)
        now = time.perf_counter()
        seconds, self.ended = now - self.ended, now
        self.seconds += seconds
        self.data_wait += launched.data_wait
        if result is None:
            totals.skipped_steps += 1
            self.run_dir.log({"step": launched.step, "skipped": 1, "untrained_rows": int(counts.untrained_rows)})
            return
        result.check_finite(launched.step, self.state.saved, lambda: self._advice(launched.cursor))
        loss = result.loss if counts.weight else None
        self.loss = self.loss if loss is None else loss
        record = StepRecord(
            step=launched.step,
            loss=loss,
            grad_norm=result.grad_norm,
            lr=launched.lr,
            tokens=int(counts.tokens),
            trained=int(counts.trained),
            untrained_rows=int(counts.untrained_rows),
            seconds=seconds,
            data_wait=launched.data_wait,
        )
        speed = {"tokens_per_second": record.tokens / seconds, "trained_per_second": record.trained / seconds}
        first = {} if record.step > 1 or self.state.non_answers is None else self.state.non_answers.to_metrics()
        self.run_dir.log({**record._asdict(), **speed, **first})
        self.run_dir.log_rows(record.step, result.rows)
        self.run_dir.show_step(record.step, loss=loss, seconds=seconds, tokens=record.tokens, trained=record.trained)
        if self.watch is not None:
            self.watch(record)

    def _advice(self, cursor: Cursor) -> str:
        """Which episodes a step at this cursor trains, for the error about a loss that is not finite."""
        loader = self.state.loader
        episodes = loader.plan(loader.split).step(cursor).episodes.tolist()
        more = f" and {len(episodes) - SHOWN_EPISODES} more" if len(episodes) > SHOWN_EPISODES else ""
        shown = ", ".join(map(str, episodes[:SHOWN_EPISODES]))
        return f"its episodes are {shown}{more}; look at them or lower learning_rate"

    def _evaluate(self) -> None:
        state, model = self.state, self.state.stepper.model
        if "val" not in state.loader.splits:
            return
        evaluation = evaluate(model, state.loader, state.world, batches=state.config.eval_iters)
        self.evaluation = evaluation
        more: dict[str, float] = {}
        lines: list[str] = []
        # A sharded model generates only if all ranks take part.
        if state.world.is_first and state.stepper.is_whole:
            if self._samples is not None:
                answers = self._samples.answer(model)
                more |= self._samples.rates(answers)
                lines = [] if self._text is None else self._samples.lines(answers, self._text)
            if self.on_eval is not None:
                more |= self.on_eval(model, state.step)
        self.run_dir.log({"step": state.step, **evaluation.metrics(), **more})
        shown = "".join(f", {name} {value:.4g}" for name, value in more.items())
        self.run_dir.print("\n".join([f"step {state.step:,}: {evaluation}{shown}", *lines]))

    @cached_property
    def _samples(self) -> Samples | None:
        state, count = self.state, self.state.config.eval_samples
        return Samples(state.loader.sources_of("val"), count, state.stepper.model) if count else None

    @cached_property
    def _text(self) -> TokenText | None:
        if self.open_text is None:
            return None
        folder = self.state.loader.sources[0].path
        text = self.open_text(folder)
        if text is None:
            self.run_dir.print(f"sample answers are counted and not shown: the tokenizer of {folder} is not beside it")
        return text

    def _save(self) -> None:
        """Write a checkpoint; all ranks call this."""
        state, stepper, keep = self.state, self.state.stepper, self.state.config.keep_checkpoints
        sharded = state.config.checkpoint == "sharded"
        # Sharded checkpoints hold a model folder, for which ranks gather all weights, only at the end.
        usable = not sharded or state.step == state.stage.stop
        about = about_model(state.loader, step=state.step) if usable else None
        folder, run, world = self.run_dir.folder, state.to_json(), state.world
        state.saved = checkpoints.save(
            folder,
            run,
            stepper.model,
            stepper.optimizer,
            world,
            sharded=sharded,
            keep=keep,
            about=about,
            protected=None if state.data_check is None else state.data_check.verified,
        )

    def _result(self, stopped_by: str | None) -> TrainResult:
        state, evaluation = self.state, self.evaluation
        return TrainResult(
            folder=self.run_dir.folder,
            checkpoint=state.saved,
            step=state.step,
            total=state.stage.stop,
            loss=self.loss,
            val_loss=evaluation and evaluation.loss,
            val_perplexity=evaluation and evaluation.perplexity,
            val_sources=self._val_sources(),
            **asdict(state.totals),
            non_answer_tokens=0 if state.non_answers is None else state.non_answers.non_answers,
            seconds=self.seconds,
            data_wait=self.data_wait,
            stopped_by=stopped_by,
        )

    def _val_sources(self) -> dict[str, Mapping[str, float | None] | None]:
        """The last evaluation of each source of a mix; empty if there was none."""
        if self.evaluation is None or not self.evaluation.sources:
            return {}
        parts = {
            name: {"loss": each.loss, "perplexity": each.perplexity, "trained": each.trained}
            for name, each in self.evaluation.sources.items()
        }
        return {source.name: parts.get(source.name) for source in self.state.loader.sources}
