"""Set up a run: open its data, model and optimizer, either new or from a checkpoint.

A run consists of one or more stages. Changing the dataset, or turning post-training on or off, starts a new stage. The
data order and the learning rate schedule restart with each stage.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from chatmill.audit import Audit
from chatmill.errors import UsageError, one_line
from chatmill.load.loader import EpisodeLoader
from chatmill.remote.urls import Place
from chatmill.train import checkpoint as checkpoints
from chatmill.train.best import BestEval, check_evaluates
from chatmill.train.checkpoint import Checkpoint
from chatmill.train.checkpoint_files import model_folder
from chatmill.train.config import TrainConfig, model_keys
from chatmill.train.data_check import DataCheck
from chatmill.train.distributed import World
from chatmill.train.evaluate import val_notes
from chatmill.train.fitting import check_run_memory
from chatmill.train.float8 import check_float8, use_float8
from chatmill.train.load_model import compute_dtype
from chatmill.train.model import CausalModel
from chatmill.train.model_files import is_adapter
from chatmill.train.optimizers import check_optimizer
from chatmill.train.preflight import (
    base_of,
    check_fit,
    data_vocab_size,
    make_model,
    padding_of,
    tokenizer_of,
    weights_hash,
)
from chatmill.train.run_dir import METRICS, config_changes, open_resumed
from chatmill.train.run_length import RunLength, run_length
from chatmill.train.saved_template import format_label, format_of, template_notes, template_record
from chatmill.train.sharded_load import OpenedModel, open_for_shards
from chatmill.train.start_notes import NonAnswers, cache_lengths, count_non_answers
from chatmill.train.step import LRSchedule, StepCounts, Stepper
from chatmill.train.untrained import check_trained


@dataclass(frozen=True)
class Stage:
    """A stage of a run: consecutive steps on the same data."""

    start: int
    """Number of steps that the run completed before this stage."""
    length: RunLength
    schedule: LRSchedule
    dataset_sha256: str
    post_training: bool

    @property
    def stop(self) -> int:
        return self.start + self.length.steps

    def lr(self, step: int) -> float:
        """Return the learning rate at `step` of the run (0-based)."""
        return self.schedule(step - self.start)

    def to_json(self) -> dict[str, Any]:
        return {"start": self.start, "dataset_sha256": self.dataset_sha256, "post_training": self.post_training}


@dataclass
class Totals:
    """Counts of tokens, rows and conversations, summed over all steps of a run."""

    tokens: int = 0
    trained: int = 0
    untrained_rows: int = 0
    """Number of nonempty rows without trained tokens."""
    cut_episodes: int = 0
    """Number of conversations that were truncated at the start because they were longer than a row."""
    cut_tokens: int = 0
    answer_cut: int = 0
    """Number of truncated conversations that lost part of an answer."""
    skipped_steps: int = 0
    """Number of steps that post-training skipped because they had no trained tokens."""

    def add(self, counts: StepCounts) -> None:
        for name in ("tokens", "trained", "untrained_rows", "cut_episodes", "cut_tokens", "answer_cut"):
            setattr(self, name, getattr(self, name) + int(getattr(counts, name)))


@dataclass
class TrainState:
    """The data, the model and the counters of a run."""

    config: TrainConfig
    world: World
    loader: EpisodeLoader
    audit: Audit | None
    stepper: Stepper
    stage: Stage
    step: int = 0
    """Number of finished steps."""
    totals: Totals = field(default_factory=Totals)
    best: BestEval = field(default_factory=BestEval)
    saved: Path | None = None
    """The last checkpoint that the run wrote or resumed from."""
    base: Mapping[str, str] | None = None
    """Folder and weight hash of the base model, on rank 0 of a run that trains adapters."""
    template: Mapping[str, Any] = field(default_factory=dict)
    """The entry of training.json about chat templates of the initial model that saved models do not contain."""
    notes: list[str] = field(default_factory=list)
    """Messages to print when the run starts."""
    non_answers: NonAnswers | None = None
    """Number of trained tokens outside answers, if the data has a loss mask that the run does not use."""
    has_trained: bool = False
    """Whether this process has finished at least one step."""
    data_check: DataCheck | None = None
    """Checks the hashes of the data files; None unless `verify` is set."""

    @property
    def epoch(self) -> float | None:
        """Number of epochs completed so far; None for the order `random`."""
        return self.loader.plan(self.loader.split).passes(self.loader.cursor())

    @property
    def stopped_early(self) -> str | None:
        """The reason for early stopping if the run must stop early now, otherwise None."""
        is_early = self.step < self.stage.stop and self.best.stops(self.config)
        return self.best.reason(self.config) if is_early else None

    def to_json(self) -> dict[str, Any]:
        """Return the state of the run for a checkpoint. All ranks must call this method if the run has an audit log."""
        return {
            "step": self.step,
            "stage": self.stage.to_json(),
            "totals": asdict(self.totals),
            "best": asdict(self.best),
            "config": self.config.to_json(),
            "dataset_dir": str(self.loader.dataset_dir),
            "format": format_label(format_of(self.loader.sources[0])),
            "loader": self.loader.state_dict(),
            "audit": None if self.audit is None else self.audit.checkpoint(),
            # Store only the seed, because random numbers depend only on the seed, the step and the rank.
            "seed": self.config.seed,
            "vocab_size": self.stepper.model.vocab_size,
            "tokenizer_sha256": self.loader.sources[0].tokenizer_sha256,
            "base": self.base,
            "world_size": self.world.size,
        }


@contextmanager
def open_run(
    config: TrainConfig,
    dataset_dir: Place,
    folder: Path,
    world: World,
    *,
    resume: str | None,
    model: CausalModel | None,
) -> Iterator[TrainState]:
    """Open the data and the model; if the run resumes, restore both from the checkpoint.

    The audit log is opened last and is removed if no step finishes, so a run that fails early leaves no log behind.
    """
    checkpoint = open_resumed(folder, resume, world, otherwise="another --model_name")
    if checkpoint is not None and "stage" not in checkpoint.state:
        raise UsageError(
            f"{checkpoint.path}: was written by chatmill rollout train; resume with that command, or start from this "
            f"model with --init_from_model {checkpoint.path}"
        )
    loader, same_data = _open_data(config, dataset_dir, world, checkpoint)
    state: TrainState | None = None
    succeeded = False
    data_check = DataCheck(loader) if config.verify else None
    try:
        # Check the data before loading the model, which takes longer.
        warning = world.together(lambda: loader.prefetch(_steps_ahead(config, loader)))
        if data_check is not None:
            world.together(data_check.check)
        mix_notes = world.together(lambda: check_trained(loader))
        world.together(lambda: check_evaluates(config, loader))
        base = world.together(lambda: _base(config, checkpoint) if world.is_first and model is None else None)
        stepper, notes = _open_model(config, loader, world, checkpoint, model)
        start = 0 if checkpoint is None else checkpoint.state["stage"]["start"] if same_data else checkpoint.step
        length = world.together(lambda: run_length(config, loader))
        schedule = LRSchedule.of(config, warmup=config.warmup_steps(length.steps), total=length.steps)
        stage = Stage(start, length, schedule, loader.sha256, config.post_training)
        state = TrainState(config, world, loader, None, stepper, stage, base=base, data_check=data_check)
        state.notes += [*notes, *([] if warning is None else [f"warning: {warning}"])]
        if checkpoint is not None:
            state.step, state.saved = checkpoint.step, checkpoint.path
            state.totals = Totals(**checkpoint.state["totals"])
            if same_data and (best := checkpoint.state.get("best")) is not None:
                state.best = BestEval(**best)
        state.non_answers = world.together(lambda: count_non_answers(loader) if world.is_first else None)
        # Print the note about use_loss_mask early, because training without the loss mask is usually a mistake.
        state.notes += [] if state.non_answers is None else [str(state.non_answers)]
        state.template, about_template = world.together(lambda: _templates(stepper.model, loader))
        state.notes += about_template
        state.notes += _notes(state, checkpoint, folder, same_data=same_data)
        state.notes += [*mix_notes, *cache_lengths(loader)]
        if config.eval_interval:
            state.notes += val_notes(loader)
        state.audit = _open_audit(config, loader, world, checkpoint if same_data else None)
        yield state
        succeeded = True
    finally:
        if data_check is not None:
            data_check.close()
        loader.close()
        if state is not None and state.audit is not None:
            if not succeeded and not state.has_trained:
                state.audit.discard()
            elif succeeded or world.size == 1:
                # Close the log only if all ranks succeeded, because closing it synchronizes all ranks.
                state.audit.close()


def _steps_ahead(config: TrainConfig, loader: EpisodeLoader) -> int | None:
    return None if config.max_iters is None else max(0, config.max_iters - loader.cursor().step)


def _notes(state: TrainState, checkpoint: Checkpoint | None, folder: Path, *, same_data: bool) -> Iterator[str]:
    stage, loader = state.stage, state.loader
    if checkpoint is None:
        if (folder / METRICS).exists():
            yield (
                f"{folder} has no checkpoint: the run starts again from the beginning, and its previous metrics "
                "are removed"
            )
    else:
        yield f"resuming from {checkpoint.path}"
        others = (name for name in state.config.to_json() if name not in (*model_keys(), "dataset_dir"))
        yield from config_changes(checkpoint, state.config.to_json(), others)
        if state.step >= stage.stop:
            yield f"the run is already finished: it has {state.step:,} steps; {stage.length.further(state.config)}"
        elif state.best.stops(state.config):
            yield (
                f"the run is already finished: it stopped early because {state.best.reason(state.config)}; to "
                f"continue, raise early_stop_patience or set it to null"
            )
        if not same_data:
            yield (
                f"{_change(checkpoint.state, state)}: the data order starts again from the beginning, "
                f"and the learning rate warms up again over {stage.schedule.warmup:,} steps"
            )
            before, now = checkpoint.state.get("format"), format_label(format_of(loader.sources[0]))
            if None not in (before, now) and before != now:
                yield (
                    f"warning: the earlier steps trained on data with the format {one_line(str(before))}, but "
                    f"{loader.dataset_dir} has the format {now}; prepare the data again with the old format, unless "
                    "the model is meant to change to the new one"
                )
    yield from stage.length.notes
    if not same_data:
        # Print these notes only once per stage, because the data order does not change within a stage.
        yield from stage.length.left_out_note(loader)
        yield from stage.length.short_note(state.config)


def _open_data(
    config: TrainConfig, dataset_dir: Place, world: World, checkpoint: Checkpoint | None
) -> tuple[EpisodeLoader, bool]:
    """Return the loader, and whether it continues the stage of the checkpoint. A loader that continues a stage starts
    at the position in the checkpoint.
    """
    pin = world.device.type == "cuda"
    loader = world.together(
        lambda: EpisodeLoader(dataset_dir, config, rank=world.rank, world_size=world.size, pin_memory=pin)
    )
    saved = {} if checkpoint is None else checkpoint.state
    stage = {"dataset_sha256": loader.sha256, "post_training": config.post_training}
    same = bool(saved) and all(saved["stage"][name] == value for name, value in stage.items())
    if same:
        world.together(lambda: loader.load_state_dict(saved["loader"]))
        if config.audit_dir is not None and saved.get("audit") is None:
            raise UsageError(
                f"audit_dir is {config.audit_dir}, but the run started without an audit log; set audit_dir to null "
                f"to continue"
            )
    return loader, same


def _templates(model: CausalModel, loader: EpisodeLoader) -> tuple[dict[str, Any], list[str]]:
    """Return the entry of training.json about the chat template, and notes if saved models get another template."""
    folder, source = model.tokenizer_folder, loader.sources[0]
    if folder is None:
        return {}, []
    chat_format = format_of(source)
    return template_record(folder, chat_format), list(template_notes(folder, chat_format, str(source.path)))


def _open_audit(
    config: TrainConfig, loader: EpisodeLoader, world: World, checkpoint: Checkpoint | None
) -> Audit | None:
    """Open the audit log, which records the loader's batches; a resumed run continues the log of its checkpoint."""
    if config.audit_dir is None:
        return None
    state = None if checkpoint is None else checkpoint.state["audit"]
    audit = Audit(config.audit_dir, state=state, reduce=world.add if world.size > 1 else None)
    try:
        world.together(lambda: loader.listen(audit))
    except BaseException:
        audit.discard()
        raise
    return audit


def _open_model(
    config: TrainConfig, loader: EpisodeLoader, world: World, checkpoint: Checkpoint | None, given: CausalModel | None
) -> tuple[Stepper, list[str]]:
    """Open the model and its optimizer on all ranks; return them with notes to print. A resumed run restores the state
    of the model and the optimizer from its checkpoint.
    """
    compute = compute_dtype(config.dtype, world.device)
    if checkpoint is not None and given is None:
        changes = config_changes(checkpoint, config.to_json(), model_keys())
        if changes:
            raise UsageError(f"{checkpoint.path}: {'; '.join(changes)}; resume with the same model")
    if checkpoint is not None:
        check_optimizer(checkpoint.state, config, checkpoint.path)
    if config.fp8:
        world.together(lambda: check_float8(world.device, block_size=config.block_size))
    saved = None if checkpoint is None else checkpoint.state
    vocab_size = saved["vocab_size"] if saved else max(data_vocab_size(loader.sources), padding_of(loader) + 1)
    if given is None:
        world.together(lambda: check_run_memory(config, vocab_size, world))
    sharded = config.parallel == "fsdp" and dist.is_initialized()
    if given is None and sharded:
        opened = open_for_shards(config, vocab_size, compute=compute, world=world)
    else:
        make = lambda: make_model(config, vocab_size, compute=compute)  # noqa: E731
        opened = OpenedModel(given or world.together(make))
    model = opened.model
    tokenizer_sha256 = saved.get("tokenizer_sha256") if saved else tokenizer_of(config, loader)
    world.together(lambda: check_fit(config, loader, model, tokenizer_sha256=tokenizer_sha256))
    model.train()
    if checkpointing := config.activation_checkpointing or config.activation_offload:
        model.checkpoint_blocks(offload=config.activation_offload)
    if config.fp8:
        world.together(lambda: use_float8(model))
    if config.compile if config.compile is not None else world.device.type == "cuda":
        model.compile_blocks(recompute=not checkpointing)
    module = world.distribute(model, sharded=sharded, compute=compute, values=opened.values)
    stepper = Stepper(model, module, world, config)
    if checkpoint is not None:
        world.together(lambda: checkpoints.restore(checkpoint, model, stepper.optimizer))
    return stepper, [] if opened.note is None else [opened.note]


def _base(config: TrainConfig, checkpoint: Checkpoint | None) -> dict[str, str] | None:
    """Return the folder and weight hash of the base model if the run trains adapters, otherwise None. Raise
    `UsageError` if the adapters in the checkpoint have a different base model.
    """
    if config.init_from_model is None:
        return None
    folder = model_folder(config.init_from_model)
    if config.lora is None:
        # If the run trains existing adapters, loading the adapters checks their base model.
        return base_of(folder) if is_adapter(folder) else None
    mine = {"folder": str(folder.resolve()), "sha256": weights_hash(folder)}
    theirs = None if checkpoint is None else checkpoint.state.get("base")
    if checkpoint is not None and theirs is not None and theirs["sha256"] != mine["sha256"]:
        raise UsageError(
            f"{checkpoint.path}: the adapters were trained on {theirs['folder']} "
            f"with weights {theirs['sha256'][:12]}…, but init_from_model is {folder} with weights "
            f"{mine['sha256'][:12]}…; adapters can be trained further only on the same base model"
        )
    return mine


def _change(saved: Mapping[str, Any], state: TrainState) -> str:
    old, new = saved["stage"], state.stage
    if old["dataset_sha256"] != new.dataset_sha256:
        # Checkpoints of earlier versions contain the folder only as part of the config.
        folder = saved.get("dataset_dir") or saved["config"].get("dataset_dir")
        before = "" if folder is None else f"{one_line(str(folder), 300)} "
        return (
            f"the data changed from {before}({old['dataset_sha256'][:12]}…) to {state.loader.dataset_dir} "
            f"({new.dataset_sha256[:12]}…)"
        )
    return f"post_training changed from {json.dumps(old['post_training'])} to {json.dumps(new.post_training)}"
