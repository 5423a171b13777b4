"""From a config to a run that can take its first step, or the one after its checkpoint.

A run has stages: from the step at which it began with a dataset, or changed from plain training to post-training, to
the last step on it. The order of the data and the schedule count from there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from chatmill.audit import Audit
from chatmill.errors import UsageError
from chatmill.load.loader import EpisodeLoader
from chatmill.train import checkpoint as checkpoints
from chatmill.train.checkpoint import Checkpoint
from chatmill.train.config import TrainConfig, model_keys
from chatmill.train.distributed import World
from chatmill.train.metrics_log import METRICS
from chatmill.train.model import CausalModel
from chatmill.train.preflight import (
    EpochSteps,
    check_fit,
    data_vocab_size,
    make_model,
    one_pass,
    padding_of,
    tokenizer_of,
    weights_hash,
)
from chatmill.train.schedule import LRSchedule
from chatmill.train.step import StepCounts, Stepper, make_optimizer


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
    """Episodes that fill no batch at the end of it, if it is one pass."""

    @property
    def stop(self) -> int:
        return self.start + self.length

    def lr(self, step: int) -> float:
        """The learning rate of the run's step, counted from 0."""
        return self.schedule(step - self.start)

    def to_json(self) -> dict[str, Any]:
        return {"start": self.start, "dataset_sha256": self.dataset_sha256, "post_training": self.post_training}


@dataclass
class Totals:
    """What a run has seen since its first step."""

    tokens: int = 0
    trained: int = 0
    untrained_rows: int = 0
    """Rows that hold something, of which nothing was trained."""
    cut_episodes: int = 0
    """Conversations that were longer than a row, and lost their beginning."""
    cut_tokens: int = 0
    skipped_steps: int = 0
    """Steps of post-training that had nothing to train at all."""

    def add(self, counts: StepCounts) -> None:
        for name in ("tokens", "trained", "untrained_rows", "cut_episodes", "cut_tokens"):
            setattr(self, name, getattr(self, name) + int(getattr(counts, name)))


@dataclass
class RunState:
    """All that the loop needs."""

    config: TrainConfig
    world: World
    loader: EpisodeLoader
    audit: Audit | None
    stepper: Stepper
    stage: Stage
    step: int = 0
    """Steps that were made."""
    totals: Totals = field(default_factory=Totals)
    saved: Path | None = None
    """The last checkpoint."""
    base: Mapping[str, str] | None = None
    """On rank 0, of a run that trains adapters: the folder of the model under them, and the hash of its weights."""
    notes: list[str] = field(default_factory=list)
    """What somebody who starts the run should know."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint says of the run. All ranks call this, if there is an audit log."""
        return {
            "step": self.step,
            "stage": self.stage.to_json(),
            "totals": asdict(self.totals),
            "config": self.config.to_json(),
            "loader": self.loader.state_dict(),
            "audit": None if self.audit is None else self.audit.checkpoint(),
            # What is drawn in a step is a function of the seed, the step and the rank.
            "seed": self.config.seed,
            "vocab_size": self.stepper.model.vocab_size,
            "tokenizer_sha256": self.loader.sources[0].tokenizer_sha256,
            "base": self.base,
            "world_size": self.world.size,
        }


@contextmanager
def open_run(
    config: TrainConfig, dataset_dir: Path, folder: Path, world: World, *, resume: str | None, model: CausalModel | None
) -> Iterator[RunState]:
    """Open data and model, and put both where the checkpoint stands that the run goes on from, if it does."""
    path = world.together(lambda: _chosen(folder, resume))
    found = None if path is None else checkpoints.open_checkpoint(path, world)
    if found is not None and "stage" not in found.said:
        raise UsageError(
            f"{found.path}: was written by chatmill rollout train, which goes on with it; "
            f"to train its model, give --init_from_model {found.path}"
        )
    loader, audit, same_data = _open_data(config, dataset_dir, world, found)
    ended_well = False
    try:
        base = world.together(lambda: _base(config, found) if world.is_first and model is None else None)
        stepper = _open_model(config, loader, world, found, model)
        start = 0 if found is None else found.said["stage"]["start"] if same_data else found.step
        opened = RunState(config, world, loader, audit, stepper, world.together(lambda: _stage(config, loader, start)))
        opened.base = base
        if found is None and (folder / METRICS).exists():
            opened.notes.append(
                f"{folder} holds no checkpoint: the run begins again, and what it measured is taken back"
            )
        if found is not None:
            opened.step, opened.saved = found.step, found.path
            opened.totals = Totals(**found.said["totals"])
            opened.notes.append(f"goes on from {found.path}")
            if opened.step >= opened.stage.stop:
                opened.notes.append(
                    f"nothing is left to be done: it has {opened.step:,} steps; {_further(config, opened.stage)}"
                )
            if not same_data:
                opened.notes.append(
                    f"{_change(found.said['stage'], opened.stage)}: its order begins at the beginning, "
                    f"and the learning rate rises again over {opened.stage.schedule.warmup:,} steps"
                )
        if (left := opened.stage.left_out) and not same_data:
            # Within a stage it was said, and the order cannot be another one any more.
            opened.notes.append(
                f"{left:,} of {loader.plan(loader.split).num_eligible:,} episodes fill no batch at the end of the pass "
                "and are left out; set epoch_drop_last to false to train them too"
            )
        if config.eval_interval and "val" not in loader.splits:
            opened.notes.append(f"{dataset_dir} has no episodes in val: nothing is evaluated")
        yield opened
        ended_well = True
    finally:
        loader.close()
        # To close it ranks must meet, which they may not do any more if one of them failed.
        if audit is not None and (ended_well or world.size == 1):
            audit.close()


def _chosen(folder: Path, resume: str | None) -> Path | None:
    if resume is not None:
        return checkpoints.choose(folder, resume)
    if checkpoints.found(folder) or (folder / METRICS).exists():
        raise UsageError(f"{folder}: holds a run already; --resume auto goes on with it, or give another --model_name")
    return None


def _open_data(
    config: TrainConfig, dataset_dir: Path, world: World, found: Checkpoint | None
) -> tuple[EpisodeLoader, Audit | None, bool]:
    """The loader, where the checkpoint left it if that was in the same stage; and whether it was."""

    def open_loader(listener: Audit | None) -> EpisodeLoader:
        return EpisodeLoader(
            dataset_dir,
            config,
            rank=world.rank,
            world_size=world.size,
            listener=listener,
            pin_memory=world.device.type == "cuda",
        )

    loader = world.together(lambda: open_loader(None))
    said = {} if found is None else found.said
    mine = {"dataset_sha256": loader.sha256, "post_training": config.post_training}
    same = bool(said) and all(said["stage"][name] == value for name, value in mine.items())
    audit = None
    if config.audit_dir is not None:
        if same and said["audit"] is None:
            raise UsageError(
                f"audit_dir is {config.audit_dir}, and the run began without an audit log; set it to null to go on"
            )
        reduce = world.add if world.size > 1 else None
        audit = Audit(config.audit_dir, state=said["audit"] if same else None, reduce=reduce)
        loader = world.together(lambda: open_loader(audit))
    if same:
        world.together(lambda: loader.load_state_dict(said["loader"]))
    return loader, audit, same


def _open_model(
    config: TrainConfig, loader: EpisodeLoader, world: World, found: Checkpoint | None, given: CausalModel | None
) -> Stepper:
    """The model on its device and on all ranks, with its optimizer, as the checkpoint left them."""
    compute = torch.bfloat16 if _is_bfloat16(config, world) else None
    if found is not None and given is None:
        world.together(lambda: _check_same_model(config, found))
    known = (
        found.said["vocab_size"] if found is not None else max(data_vocab_size(loader.sources), padding_of(loader) + 1)
    )
    model = given or world.together(lambda: make_model(config, known, compute=compute, device=world.device))
    theirs = tokenizer_of(config, loader) if found is None else found.said["tokenizer_sha256"]
    world.together(lambda: check_fit(config, loader, model, tokenizer_sha256=theirs))
    model.train()
    if config.activation_checkpointing:
        model.checkpoint_blocks()
    if config.compile if config.compile is not None else world.device.type == "cuda":
        model.compile_blocks()
    module = world.spread(model, sharded=config.parallel == "fsdp", compute=compute)
    optimizer = make_optimizer(
        model,
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.adam_eps,
        weight_decay=config.weight_decay,
    )
    if found is not None:
        world.together(lambda: checkpoints.restore(found, model, optimizer))
    return Stepper(model, module, optimizer, world, grad_clip=config.grad_clip)


def _is_bfloat16(config: TrainConfig, world: World) -> bool:
    return world.device.type == "cuda" if config.dtype == "auto" else config.dtype == "bfloat16"


def _check_same_model(config: TrainConfig, found: Checkpoint) -> None:
    theirs, mine = found.said["config"], json.loads(json.dumps(config.to_json()))
    differ = [
        f"{name} was {json.dumps(theirs.get(name))}, now it is {json.dumps(mine[name])}"
        for name in model_keys()
        if mine[name] != theirs.get(name)
    ]
    if differ:
        raise UsageError(f"{found.path}: {'; '.join(differ)}; a run goes on with the model it began with")


def _base(config: TrainConfig, found: Checkpoint | None) -> dict[str, str] | None:
    """What adapters stand on; `UsageError` if it is another model than the one that a checkpoint's were trained on."""
    if config.lora is None:
        return None
    folder = checkpoints.model_folder(config.init_from_model or "")
    mine = {"folder": str(folder), "sha256": weights_hash(folder)}
    theirs = None if found is None else found.said.get("base")
    if found is not None and theirs is not None and theirs["sha256"] != mine["sha256"]:
        raise UsageError(
            f"{found.path}: its adapters were trained on {theirs['folder']} with weights {theirs['sha256'][:12]}…, "
            f"init_from_model is {folder} with {mine['sha256'][:12]}…; adapters go on with the model they began on"
        )
    return mine


def _stage(config: TrainConfig, loader: EpisodeLoader, start: int) -> Stage:
    length, left_out = _steps(config, loader)
    schedule = LRSchedule(
        peak=config.learning_rate,
        floor=config.learning_rate * config.min_lr_ratio,
        warmup=config.warmup_steps(length),
        total=length,
        shape=config.lr_schedule,
    )
    return Stage(start, length, schedule, loader.sha256, config.post_training, left_out)


def _steps(config: TrainConfig, loader: EpisodeLoader) -> EpochSteps:
    """Steps on this data: as many as asked for; one pass if none are, and in post-training at most."""
    if config.max_iters is not None and not config.post_training:
        return EpochSteps(config.max_iters, 0)
    whole = one_pass(loader.plan(loader.split))
    if whole is None:
        why = "post_training is one pass" if config.post_training else "max_iters is null, which is one pass"
        order = loader.plan(loader.split).order.name
        raise UsageError(
            f"{why}, and the order {order} has none; {_instead(config, mixed=loader.config.mix_sft is not None)}"
        )
    return whole if config.max_iters is None or config.max_iters >= whole.steps else EpochSteps(config.max_iters, 0)


def _instead(config: TrainConfig, *, mixed: bool) -> str:
    if not config.post_training:
        return "set max_iters"
    return "give one source of the mix as dataset_dir, and no mix_sft" if mixed else "set batch_sampling_mode to epoch"


def _further(config: TrainConfig, stage: Stage) -> str:
    if config.max_iters is None or config.max_iters > stage.length:
        return "its one pass is done" if config.post_training else "its one pass is done, set max_iters for more"
    return "raise max_iters, up to one pass" if config.post_training else "raise max_iters"


def _change(old: Mapping[str, Any], new: Stage) -> str:
    if old["dataset_sha256"] != new.dataset_sha256:
        return f"the data was {old['dataset_sha256'][:12]}…, now it is {new.dataset_sha256[:12]}…"
    return f"post_training was {json.dumps(old['post_training'])}, now it is {json.dumps(new.post_training)}"
