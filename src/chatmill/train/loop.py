"""The training loop, from batches to checkpoints.

    train_model(config, model_name="my_sft_model", dataset_dir="data/chat_sft")

A run that resumes from a checkpoint computes the same results as an uninterrupted run. Batches depend only on the
loader's cursor. The learning rate and random numbers depend only on the step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

from chatmill.errors import UsageError
from chatmill.plain_file import local_path
from chatmill.remote.urls import Place, place
from chatmill.train import checkpoint as checkpoints
from chatmill.train.best import link_best
from chatmill.train.checkpoint_files import BEST
from chatmill.train.config import TrainConfig
from chatmill.train.evaluate import Evaluation, Samples, TokenText, evaluate, raise_unknown
from chatmill.train.first_batch import show_first_batch
from chatmill.train.loss import LossFunction
from chatmill.train.model import CausalModel
from chatmill.train.out_of_memory import memory_errors
from chatmill.train.preflight import about_model
from chatmill.train.process_group import init_world
from chatmill.train.remote import configure_cache, shown_downloads, storable_config
from chatmill.train.result import StepRecord, TrainResult
from chatmill.train.run_dir import RowsData, RunDir
from chatmill.train.saved_template import format_of
from chatmill.train.setup import TrainState, open_run
from chatmill.train.spikes import LossSpikes, not_finite
from chatmill.train.step import Pending, StepCounts, count_batch, micro_batches, seed_step, unknown_id
from chatmill.train.stop_signal import stop_on_signal
from chatmill.train.trackers.interface import Tracker
from chatmill.train.trackers.pages import ReportPage, report_pages
from chatmill.train.trackers.reporter import named_trackers
from chatmill.train.untrained import UntrainedSteps

CUT_COUNTS = ("cut_episodes", "cut_tokens", "answer_cut")
"""Names of the loader's counters for episodes that are longer than a row."""


OnStep = Callable[[StepRecord], None]
"""A function that is called on every rank after each step."""
OnEval = Callable[[CausalModel, int], Mapping[str, float]]
"""A function that is called on rank 0 after each evaluation, with the model and the step; its return values are
added to the metrics.
"""
OpenText = Callable[[Place], TokenText | None]
"""A function that opens the decoder for a dataset's tokens, or returns None if the dataset has no tokenizer."""


def train_model(
    config: TrainConfig,
    *,
    model_name: str,
    dataset_dir: str | Place | None = None,
    out_dir: str | Path = "checkpoints",
    resume: str | None = None,
    model: CausalModel | None = None,
    loss: LossFunction | None = None,
    watch: OnStep | None = None,
    on_eval: OnEval | None = None,
    open_text: OpenText | None = None,
    trackers: Sequence[Tracker] = (),
    report_page: ReportPage | None = None,
    notes: Sequence[str] = (),
    quiet: bool = False,
) -> TrainResult:
    """Train a model on a dataset and write the run to out_dir/model_name; `dataset_dir` defaults to the dataset in the
    config.

    `resume` is a checkpoint folder, or `auto` for the newest checkpoint of the run, if it has one. `model` replaces the
    model in the config, and `loss` replaces weighted cross entropy. `watch` is called after every step, and `on_eval`
    after every evaluation. Sample answers are shown if `open_text` returns a decoder. The run reports to `trackers` in
    addition to the trackers in `report_to`. At the end of the run, the trackers also receive the HTML page that
    `report_page` returns. `notes` are printed when the run starts. `quiet` turns off all printed output.

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
        raise UsageError(
            f"model_name is {model_name!r}; expected a folder name with printable characters and without slashes"
        )
    if (chosen := dataset_dir or config.dataset_dir) is None:
        raise UsageError("dataset_dir is missing; expected the folder of a dataset")
    folder, data = local_path(out_dir) / model_name, place(chosen)
    config, chosen_steps = storable_config(config, data).with_accumulation()
    trackers = [*trackers, *named_trackers(config.report_to)]
    for named in (config.audit_dir, resume):
        # Raise errors about invalid paths before the run writes any files.
        local_path(named or "")
    configure_cache(config, data)
    with (
        init_world(config.device) as world,
        memory_errors(config, world),
        open_run(config, data, folder, world, resume=resume, model=model) as state,
    ):
        if loss is not None:
            state.stepper.model.loss = loss
        state.notes += [*chosen_steps, *notes]
        run_dir = _run_dir(state, folder, data, trackers, quiet=quiet)
        return _Loop(state, run_dir, watch, on_eval, open_text, report_page).run()


def _run_dir(
    state: TrainState, folder: Path, dataset_dir: Place, trackers: Sequence[Tracker], *, quiet: bool
) -> RunDir:
    config = {**state.config.to_json(), "dataset_dir": str(dataset_dir)}
    data = RowsData(str(dataset_dir), state.stage.dataset_sha256, state.loader.config.mix)
    rows = data if state.config.log_rows else None
    run_dir = RunDir(
        folder,
        config,
        state.world,
        step=state.step,
        total=state.stage.stop,
        quiet=quiet,
        rows=rows,
        trackers=trackers,
        data={"dataset_sha256": state.stage.dataset_sha256},
    )
    best, link = state.best.folder(folder) if state.config.keeps_best else None, folder / BEST
    # Unless keep_best is false, a resumed run that does not track the best checkpoint keeps the existing link `best`.
    outdated = link.is_symlink() and (state.config.keep_best is False or not link.exists())
    if state.config.keeps_best or outdated:
        try:
            state.world.together(lambda: link_best(folder, best) if state.world.is_first else None)
        except BaseException:
            run_dir.discard()
            raise
    state.notes += [f"a later checkpoint was renamed to {path} and is no longer used" for path in run_dir.set_aside]
    return run_dir


class _Launched(NamedTuple):
    """A step that was launched on the device and whose result has not been read yet."""

    step: int
    epoch: float | None
    lr: float
    counts: StepCounts
    data_wait: float
    pending: Pending | None
    """The result of the step on the device; None if the batch had no trained tokens."""


@dataclass
class _Loop:
    state: TrainState
    run_dir: RunDir
    watch: OnStep | None
    on_eval: OnEval | None
    open_text: OpenText | None
    report_page: ReportPage | None
    untrained: UntrainedSteps = field(default_factory=UntrainedSteps)
    launched: _Launched | None = None
    ended: float = 0.0
    """End time of the last step whose result was read."""
    seconds: float = 0.0
    data_wait: float = 0.0
    loss: float | None = None
    evaluation: Evaluation | None = None

    def run(self) -> TrainResult:
        """Run all remaining steps, or stop at a signal; save a checkpoint and return the result."""
        state, config, began = self.state, self.state.config, self.state.step
        try:
            for note in state.notes:
                self.run_dir.print(note)
            with stop_on_signal() as request:
                self.ended = time.perf_counter()
                stop = False
                while state.step < state.stage.stop and not stop and not state.best.stops(config):
                    stop = self._step(stop_requested=request.by is not None)
                    last = state.step == state.stage.stop
                    evaluates = config.eval_interval and (state.step % config.eval_interval == 0 or last)
                    saves = config.save_interval and (state.step % config.save_interval == 0 or stop or last)
                    if evaluates or saves or stop or last:
                        self._finish_step()
                        request.finished_step()
                        self.untrained.check_at_end(state, last=last)
                        if last and state.data_check is not None:
                            state.data_check.check_at_end(self.run_dir.folder, state.step, state.world)
                        keeps = bool(evaluates) and self._evaluate() and config.keeps_best
                        if not last and state.best.stops(config):
                            self._end_early()
                        elif saves or keeps:
                            self._save(usable=last or keeps)
                        self.ended = time.perf_counter()
            if state.step > began:
                self.run_dir.plot()
            early = stop and state.step < state.stage.stop and not state.best.stops(config)
            if self.run_dir.is_tracked and not early:
                write, say = self.run_dir.log_page, self.run_dir.print
                report_pages(state.loader.sources, self.report_page, write=write, note=say)
            self.run_dir.end("stopped" if early else "finished")
            return self._result((request.by or "a signal that another rank received") if early else None)
        except BaseException:
            if not state.has_trained:
                self.run_dir.discard()
            raise
        finally:
            self.run_dir.close()

    def _step(self, *, stop_requested: bool) -> bool:
        """Launch one step and read the result of the previous step; return whether any rank received a stop signal."""
        state, config, world = self.state, self.state.config, self.state.world
        before = time.perf_counter()
        cursor, cut = state.loader.cursor(), state.loader.counts()
        with shown_downloads(None if state.has_trained else state.loader, self.run_dir.print):
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
        if self.launched is None and not state.has_trained:
            self.ended += show_first_batch(batch, counts, cursor, state, self.run_dir, lambda: self._text)
        self.untrained.check(counts, state.step + 1, cursor, state.loader)
        lr = state.stage.lr(state.step)
        pending = None
        if counts.weight or not config.post_training:
            seed_step(config.seed, state.step, world.rank)
            key = config.seed, state.step
            pending = state.stepper.step(parts, weight=counts.weight, lr=lr, key=key, rows=True)
        state.step += 1
        launched = _Launched(state.step, state.epoch, lr, counts, data_wait, pending)
        self._finish_step()
        self.launched = launched
        if world.device.type == "cpu":
            # On a CPU, the step is already finished; reading its result later would attribute its time to the wrong
            # step.
            self._finish_step()
        return counts.stop > 0

    def _finish_step(self) -> None:
        """Wait for the launched step and log its result."""
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
        result.check_finite(launched.step, self.state.saved, lambda: not_finite(result.rows(), self.state))
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
            epoch=launched.epoch,
        )
        speed = {"tokens_per_second": record.tokens / seconds, "trained_per_second": record.trained / seconds}
        first = {} if record.step > 1 or self.state.non_answers is None else self.state.non_answers.to_metrics()
        spike = {} if loss is None else self._spikes.follow(record.step, result)
        self.run_dir.log({**record._asdict(), **speed, **first, **spike})
        if self.state.config.log_rows:
            self.run_dir.log_rows(record.step, result.rows())
        shown = {"loss": loss, "seconds": seconds, "epoch": record.epoch}
        self.run_dir.show_step(record.step, **shown, tokens=record.tokens, trained=record.trained)
        if self.watch is not None:
            self.watch(record)

    @cached_property
    def _spikes(self) -> LossSpikes:
        return LossSpikes.of_run(self.state, self.run_dir)

    def _evaluate(self) -> bool:
        """Evaluate on the val split, if the data has one; return whether the val loss is the lowest so far."""
        state, model = self.state, self.state.stepper.model
        if "val" not in state.loader.splits:
            return False
        evaluation = evaluate(model, state.loader, state.world, batches=state.config.eval_iters)
        self.evaluation = evaluation
        more: dict[str, float] = {}
        lines: list[str] = []
        # Generate answers only with unsharded models: rank 0 generates alone, and a sharded model would need all ranks.
        if state.world.is_first and state.stepper.is_whole:
            if self._samples is not None:
                answers = self._samples.answer(model)
                more |= self._samples.rates(answers)
                if self._text is not None:
                    lines = self._samples.lines(answers, self._text)
                    self.run_dir.log_samples(state.step, self._samples.texts(answers, self._text))
            if self.on_eval is not None:
                more |= self.on_eval(model, state.step)
        self.run_dir.log({"step": state.step, "epoch": state.epoch, **evaluation.metrics(), **more})
        shown = "".join(f", {name} {value:.4g}" for name, value in more.items())
        is_best = state.best.add(evaluation.loss, state.step, min_delta=state.config.early_stop_min_delta)
        shown += state.best.compared(is_best, state.config)
        self.run_dir.print("\n".join([f"step {state.step:,}: {evaluation}{shown}", *lines]))
        return is_best

    def _end_early(self) -> None:
        """Stop the run early: check the data and save a checkpoint, as at the end of a run."""
        state = self.state
        if state.data_check is not None:
            state.data_check.check_at_end(self.run_dir.folder, state.step, state.world)
        if state.config.save_interval:
            self._save(usable=True)
        self.run_dir.print(f"early stopping at step {state.step:,}: {state.best.reason(state.config)}")

    @cached_property
    def _samples(self) -> Samples | None:
        state, count = self.state, self.state.config.eval_samples
        return Samples(state.loader.sources_of("val"), count, state.stepper.model) if count else None

    @cached_property
    def _text(self) -> TokenText | None:
        if self.open_text is None:
            if self.run_dir.is_tracked:
                self.run_dir.print(
                    "sample answers are scored but not reported as text; use `chatmill train` to report their text"
                )
            return None
        folder = self.state.loader.sources[0].path
        text = self.open_text(folder)
        if text is None:
            self.run_dir.print(f"sample answers are scored but not shown: the tokenizer of {folder} was not found")
        return text

    def _save(self, *, usable: bool) -> None:
        """Write a checkpoint. A sharded checkpoint contains a model folder only if `usable` is true. All ranks must
        call this method.
        """
        state, stepper, keep = self.state, self.state.stepper, self.state.config.keep_checkpoints
        sharded = state.config.checkpoint == "sharded"
        # Writing a model folder from shards sends all weights between ranks, so only the last and the best checkpoint
        # get a model folder.
        usable = usable or not sharded
        folder, run, world = self.run_dir.folder, state.to_json(), state.world
        chat_format = format_of(state.loader.sources[0])
        about = about_model(state.loader, step=state.step, base=state.base, more=state.template) if usable else None
        state.saved = checkpoints.save(
            folder,
            run,
            stepper.model,
            stepper.optimizer,
            world,
            sharded=sharded,
            keep=keep,
            about=about,
            chat_format=chat_format,
            save_dtype=state.config.save_dtype,
            protected=None if state.data_check is None else state.data_check.verified,
            best=state.best.folder(folder, writing=state.step) if state.config.keeps_best else None,
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
            val_sources={} if evaluation is None else evaluation.by_source(state.loader.sources),
            **asdict(state.totals),
            loss_spikes=self._spikes.count,
            non_answer_tokens=0 if state.non_answers is None else state.non_answers.non_answers,
            seconds=self.seconds,
            data_wait=self.data_wait,
            stopped_by=stopped_by,
            stopped_early=state.stopped_early,
            best_step=state.best.step if state.best.loss is not None else None,
            best_val_loss=state.best.loss,
            best_checkpoint=state.best.folder(self.run_dir.folder) if state.config.keeps_best else None,
        )
