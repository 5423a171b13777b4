"""Set up a run: open its data, model and optimizer, from the start or from a checkpoint.

A run has stages. A stage starts with the first step on a dataset, or when post-training is turned on or off; the order
of the data and the learning rate schedule count from there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from chatmill.audit import Audit
from chatmill.errors import UsageError
from chatmill.load.loader import EpisodeLoader
from chatmill.train import checkpoint as checkpoints
from chatmill.train.checkpoint import Checkpoint
from chatmill.train.checkpoint_files import model_folder
from chatmill.train.config import TrainConfig, model_keys
from chatmill.train.data_check import DataCheck
from chatmill.train.distributed import World
from chatmill.train.evaluate import val_notes
from chatmill.train.load_model import compute_dtype
from chatmill.train.model import CausalModel
from chatmill.train.preflight import (
    check_fit,
    data_vocab_size,
    make_model,
    one_pass,
    padding_of,
    tokenizer_of,
    weights_hash,
)
from chatmill.train.run_dir import METRICS, config_changes, open_resumed
from chatmill.train.start_notes import NonAnswers, cache_lengths, count_non_answers
from chatmill.train.step import LRSchedule, StepCounts, Stepper


@dataclass(frozen=True)
class Stage:
    """A run's steps on one dataset."""

    start: int
    """Steps of the run before it."""
    length: int
    schedule: LRSchedule
    dataset_sha256: str
    post_training: bool
    left_out: int = 0
    """Episodes at its end that fill no batch, if it is one epoch."""

    @property
    def stop(self) -> int:
        return self.start + self.length

    def lr(self, step: int) -> float:
        """The learning rate of a step of the run; the first is 0."""
        return self.schedule(step - self.start)

    def to_json(self) -> dict[str, Any]:
        return {"start": self.start, "dataset_sha256": self.dataset_sha256, "post_training": self.post_training}


@dataclass
class Totals:
    """Counts over all steps of a run."""

    tokens: int = 0
    trained: int = 0
    untrained_rows: int = 0
    """Rows that are not empty, and had no trained token."""
    cut_episodes: int = 0
    """Conversations longer than a row, which lost their beginning."""
    cut_tokens: int = 0
    answer_cut: int = 0
    """Of these, conversations that lost a part of an answer."""
    skipped_steps: int = 0
    """Steps of post-training without a trained token."""

    def add(self, counts: StepCounts) -> None:
        for name in ("tokens", "trained", "untrained_rows", "cut_episodes", "cut_tokens", "answer_cut"):
            setattr(self, name, getattr(self, name) + int(getattr(counts, name)))


@dataclass
class TrainState:
    """Data, model and counters of a run."""

    config: TrainConfig
    world: World
    loader: EpisodeLoader
    audit: Audit | None
    stepper: Stepper
    stage: Stage
    step: int = 0
    """Finished steps."""
    totals: Totals = field(default_factory=Totals)
    saved: Path | None = None
    """The last checkpoint."""
    base: Mapping[str, str] | None = None
    """On rank 0, of a run that trains adapters: the folder of the base model, and the hash of its weights."""
    notes: list[str] = field(default_factory=list)
    """Messages to the user who starts the run."""
    non_answers: NonAnswers | None = None
    """What it trains besides answers, if the data has a loss mask that is not used."""
    has_trained: bool = False
    """Whether a step of this process is finished."""
    data_check: DataCheck | None = None
    """Checks the hashes of the data, if the config says so."""

    def to_json(self) -> dict[str, Any]:
        """What a checkpoint stores of the run. All ranks call this, if there is an audit log."""
        return {
            "step": self.step,
            "stage": self.stage.to_json(),
            "totals": asdict(self.totals),
            "config": self.config.to_json(),
            "loader": self.loader.state_dict(),
            "audit": None if self.audit is None else self.audit.checkpoint(),
            # Random numbers in a step are a function of the seed, the step and the rank.
            "seed": self.config.seed,
            "vocab_size": self.stepper.model.vocab_size,
            "tokenizer_sha256": self.loader.sources[0].tokenizer_sha256,
            "base": self.base,
            "world_size": self.world.size,
        }


@contextmanager
def open_run(
    config: TrainConfig, dataset_dir: Path, folder: Path, world: World, *, resume: str | None, model: CausalModel | None
) -> Iterator[TrainState]:
    """Open data and model, both as the checkpoint left them if the run resumes.

    The audit log is opened last, and removed if no step is finished: a run that is refused leaves none.
    """
    checkpoint = open_resumed(folder, resume, world, otherwise="another --model_name")
    if checkpoint is not None and "stage" not in checkpoint.state:
        raise UsageError(
            f"{checkpoint.path}: was written by chatmill rollout train, which goes on with it; "
            f"to train its model, give --init_from_model {checkpoint.path}"
        )
    loader, same_data = _open_data(config, dataset_dir, world, checkpoint)
    state: TrainState | None = None
    succeeded = False
    data_check = DataCheck(loader) if config.verify else None
    try:
        if data_check is not None:
            world.together(data_check.check)
        base = world.together(lambda: _base(config, checkpoint) if world.is_first and model is None else None)
        stepper = _open_model(config, loader, world, checkpoint, model)
        start = 0 if checkpoint is None else checkpoint.state["stage"]["start"] if same_data else checkpoint.step
        length, left_out = world.together(lambda: _steps(config, loader))
        schedule = LRSchedule.of(config, warmup=config.warmup_steps(length), total=length)
        stage = Stage(start, length, schedule, loader.sha256, config.post_training, left_out)
        state = TrainState(config, world, loader, None, stepper, stage, base=base, data_check=data_check)
        if checkpoint is not None:
            state.step, state.saved = checkpoint.step, checkpoint.path
            state.totals = Totals(**checkpoint.state["totals"])
        state.non_answers = world.together(lambda: count_non_answers(loader) if world.is_first else None)
        # First: it is what most runs without use_loss_mask did not mean.
        state.notes += [] if state.non_answers is None else [str(state.non_answers)]
        state.notes += _notes(state, checkpoint, folder, same_data=same_data)
        state.notes += cache_lengths(loader)
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
                # Closing it synchronizes all ranks, which is not possible after one of them failed.
                state.audit.close()


def _notes(state: TrainState, checkpoint: Checkpoint | None, folder: Path, *, same_data: bool) -> Iterator[str]:
    """What the user should know when the run starts or resumes."""
    stage, loader = state.stage, state.loader
    if checkpoint is None:
        if (folder / METRICS).exists():
            yield f"{folder} holds no checkpoint: the run begins again, and what it measured is taken back"
    else:
        yield f"goes on from {checkpoint.path}"
        if state.step >= stage.stop:
            yield f"nothing is left to be done: it has {state.step:,} steps; {_further(state.config, stage)}"
        if not same_data:
            yield (
                f"{_change(checkpoint.state['stage'], stage)}: its order begins at the beginning, "
                f"and the learning rate rises again over {stage.schedule.warmup:,} steps"
            )
    if (left := stage.left_out) and not same_data:
        # Within a stage this was said before, and the order cannot change any more.
        yield (
            f"{left:,} of {loader.plan(loader.split).num_eligible:,} episodes fill no batch at the end of the pass "
            "and are left out; set epoch_drop_last to false to train them too"
        )


def _open_data(
    config: TrainConfig, dataset_dir: Path, world: World, checkpoint: Checkpoint | None
) -> tuple[EpisodeLoader, bool]:
    """The loader, at the checkpoint's position if the stage is the same; and whether it is."""
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
                f"audit_dir is {config.audit_dir}, and the run began without an audit log; set it to null to go on"
            )
    return loader, same


def _open_audit(
    config: TrainConfig, loader: EpisodeLoader, world: World, checkpoint: Checkpoint | None
) -> Audit | None:
    """The audit log, which records what the loader returns from now on; that of the checkpoint is continued."""
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
) -> Stepper:
    """The model and its optimizer on all ranks, as the checkpoint left them."""
    compute = compute_dtype(config.dtype, world.device)
    if checkpoint is not None and given is None:
        changes = config_changes(checkpoint, config.to_json(), model_keys())
        if changes:
            raise UsageError(f"{checkpoint.path}: {'; '.join(changes)}; a run goes on with the model it began with")
    saved = None if checkpoint is None else checkpoint.state
    vocab_size = saved["vocab_size"] if saved else max(data_vocab_size(loader.sources), padding_of(loader) + 1)
    model = given or world.together(lambda: make_model(config, vocab_size, compute=compute, device=world.device))
    tokenizer_sha256 = saved.get("tokenizer_sha256") if saved else tokenizer_of(config, loader)
    world.together(lambda: check_fit(config, loader, model, tokenizer_sha256=tokenizer_sha256))
    model.train()
    if config.activation_checkpointing:
        model.checkpoint_blocks()
    if config.compile if config.compile is not None else world.device.type == "cuda":
        model.compile_blocks()
    module = world.distribute(model, sharded=config.parallel == "fsdp", compute=compute)
    stepper = Stepper(model, module, world, config)
    if checkpoint is not None:
        world.together(lambda: checkpoints.restore(checkpoint, model, stepper.optimizer))
    return stepper


def _base(config: TrainConfig, checkpoint: Checkpoint | None) -> dict[str, str] | None:
    """The base model of adapters; `UsageError` if it differs from the one that the checkpoint was trained on."""
    if config.lora is None:
        return None
    folder = model_folder(config.init_from_model or "")
    mine = {"folder": str(folder), "sha256": weights_hash(folder)}
    theirs = None if checkpoint is None else checkpoint.state.get("base")
    if checkpoint is not None and theirs is not None and theirs["sha256"] != mine["sha256"]:
        raise UsageError(
            f"{checkpoint.path}: its adapters were trained on {theirs['folder']} "
            f"with weights {theirs['sha256'][:12]}…, init_from_model is {folder} with {mine['sha256'][:12]}…; "
            "adapters go on with the model they began on"
        )
    return mine


def _steps(config: TrainConfig, loader: EpisodeLoader) -> tuple[int, int]:
    """Steps on this data, and the episodes left out at its end.

    Steps are max_iters, or one epoch if that is not set; in post-training at most one epoch.
    """
    if config.max_iters is not None and not config.post_training:
        return config.max_iters, 0
    plan = loader.plan(loader.split)
    epoch = one_pass(plan)
    if epoch is None:
        why, instead = "max_iters is null, which is one pass", "set max_iters"
        if config.post_training:
            mixed = loader.config.mix_sft is not None
            why, instead = "post_training is one pass", "set batch_sampling_mode to epoch"
            instead = "give one source of the mix as dataset_dir, and no mix_sft" if mixed else instead
        raise UsageError(f"{why}, and the order {plan.order.name} has none; {instead}")
    return epoch if config.max_iters is None or config.max_iters >= epoch[0] else (config.max_iters, 0)


def _further(config: TrainConfig, stage: Stage) -> str:
    if config.max_iters is None or config.max_iters > stage.length:
        return "its one pass is done" if config.post_training else "its one pass is done, set max_iters for more"
    return "raise max_iters, up to one pass" if config.post_training else "raise max_iters"


def _change(old: Mapping[str, Any], new: Stage) -> str:
    if old["dataset_sha256"] != new.dataset_sha256:
        return f"the data was {old['dataset_sha256'][:12]}…, now it is {new.dataset_sha256[:12]}…"
    return f"post_training was {json.dumps(old['post_training'])}, now it is {json.dumps(new.post_training)}"
