"""Checkpoints: all that a run needs to resume, in safetensors and JSON, published whole or not at all.

step_00000500/
  model/                             a model folder, ready for use
  state-00000-of-00001.safetensors   weights and optimizer state: all from rank 0, or one file from each rank
  checkpoint.json                    the state of the run; size and hash of every file, and of itself; written last

safetensors instead of torch.distributed.checkpoint, whose metadata is a pickle: reading a checkpoint runs no code.
What checkpoint.json does not list is not read.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from chatmill.errors import ChatmillError, DataError, UsageError, one_line
from chatmill.plain_file import check_plain, local_path
from chatmill.store import files
from chatmill.store.hashed import FileInfo
from chatmill.store.publish import FolderKind, publish, recover, remove_folder
from chatmill.train.checkpoint_files import (
    MARKER,
    MODEL,
    PREFIX,
    STATE_FILE,
    VERSION,
    list_checkpoints,
    read_marker,
    self_sha256,
    step_name,
    step_of,
    unlisted,
)
from chatmill.train.distributed import World, is_sharded, local, rows_of, whole
from chatmill.train.model import CausalModel
from chatmill.train.sharded_tensors import ShardedTensors, TensorEntry, TensorRows, file_info, write_tensors

LEFT = ".left"
"""Suffix of a checkpoint that is later than the one a run resumed from."""
WEIGHTS, OPTIMIZER = "weights", "optimizer"
STEP = "step"
KINDS = ("exp_avg", "exp_avg_sq", STEP)
"""What AdamW keeps of each parameter: two moments of its shape, and the number of its steps."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files have the hashes they were written with."""

    path: Path
    state: Mapping[str, Any]
    """What the run stored of itself in checkpoint.json."""
    files: Mapping[str, FileInfo]
    """The files of the checkpoint, by their path in its folder."""

    @property
    def step(self) -> int:
        return int(self.state["step"])

    def state_files(self) -> list[Path]:
        """The files that hold weights and optimizer state."""
        return [self.path / name for name in sorted(self.files) if STATE_FILE.fullmatch(name)]


# Weights and optimizer state.


def named_tensors(model: CausalModel, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The trained weights and the optimizer's state of each, as weights/NAME, then optimizer/KIND/NAME."""
    kinds: dict[str, dict[str, Tensor]] = {WEIGHTS: {}}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        kinds[WEIGHTS][name] = parameter
        for kind, tensor in sorted(optimizer.state.get(parameter, {}).items()):
            kinds.setdefault(f"{OPTIMIZER}/{kind}", {})[name] = tensor
    return {f"{kind}/{name}": tensor for kind, group in kinds.items() for name, tensor in group.items()}


def restore(checkpoint: Checkpoint, model: CausalModel, optimizer: torch.optim.Optimizer) -> None:
    """Load weights and optimizer state into a model and its optimizer, at any number of ranks."""
    stored = ShardedTensors(checkpoint.state_files())
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    need = {f"{WEIGHTS}/{name}": tuple(parameter.shape) for name, parameter in parameters.items()}
    have = {name: stored.shape(name) for name in stored.names if name.startswith(f"{WEIGHTS}/")}
    if need != have:
        wrong = sorted(name for name in need.keys() | have.keys() if need.get(name) != have.get(name))
        theirs, mine = have.get(wrong[0], "not there"), need.get(wrong[0], "none")
        raise UsageError(
            f"{checkpoint.path}: {one_line(wrong[0].removeprefix(WEIGHTS + '/'), 200)} is {theirs}, the model has "
            f"{mine} ({len(wrong)} weights differ); a run goes on with the model it began with"
        )
    moments = {f"{OPTIMIZER}/{kind}/{name}" for kind in KINDS for name in parameters}
    for name in sorted(stored.names - need.keys()):
        shape = () if name.startswith(f"{OPTIMIZER}/{STEP}/") else need.get(f"{WEIGHTS}/{name.split('/', 2)[-1]}")
        if name not in moments or stored.shape(name) != shape:
            raise DataError(f"{checkpoint.path}: {one_line(name, 200)} {stored.shape(name)} is no state of AdamW's")
    with torch.no_grad():
        for name, parameter in parameters.items():
            local(parameter).copy_(stored.read(f"{WEIGHTS}/{name}", *rows_of(parameter)))
            full = {kind: f"{OPTIMIZER}/{kind}/{name}" for kind in KINDS}
            kept = [kind for kind in KINDS if full[kind] in stored.names]
            if kept and kept != list(KINDS):
                raise DataError(f"{checkpoint.path}: of AdamW's state of {name} only {', '.join(kept)} is there")
            state = {}
            for kind in kept:
                if kind == STEP:
                    state[kind] = stored.read(full[kind], 0, 1).to(parameter.device)
                else:
                    state[kind] = torch.zeros_like(parameter)
                    local(state[kind]).copy_(stored.read(full[kind], *rows_of(parameter)))
            if state:
                optimizer.state[parameter] = state


# Writing.


def save(
    folder: Path,
    state: Mapping[str, Any],
    model: CausalModel,
    optimizer: torch.optim.Optimizer,
    world: World,
    *,
    sharded: bool,
    keep: int,
    about: Mapping[str, bytes] | None,
    protected: Path | None = None,
) -> Path:
    """Write and publish a checkpoint with this state, and remove all but the last `keep`; all ranks call this.

    `sharded`: every rank writes its own shards. `about` are small files for the model folder; None writes no such
    folder. `protected` is not removed, nor is a checkpoint that holds other files as well.
    """
    target = folder / step_name(state["step"])
    staging = target.with_name(f".{target.name}.saving")
    tensors = named_tensors(model, optimizer)

    def begin() -> None:
        if world.is_first:
            files.make_folder(folder)
            clean(folder)
            files.disk.make_folder(staging)

    world.together(begin)
    written = world.together(lambda: _write_tensors(staging, tensors, world, sharded=sharded))
    weights = {} if about is None else _model_weights(model, world)

    def finish() -> None:
        if not world.is_first:
            return
        hashes = {name: info for part in all_written for name, info in part.items()}
        if about is not None:
            files.disk.make_folder(staging / MODEL)
            try:
                model.save(staging / MODEL, weights)
            except SafetensorError as error:
                # What safetensors raises when the disk is full.
                raise ChatmillError(
                    f"{staging / MODEL}: the model cannot be written ({one_line(str(error))})"
                ) from None
            for name, data in about.items():
                with files.create(staging / MODEL / name) as file:
                    file.write(data)
            for path in sorted((staging / MODEL).iterdir()):
                hashes[f"{MODEL}/{path.name}"] = astuple(file_info(path))
        body = {**state, "version": VERSION, "files": hashes}
        with files.create(staging / MARKER) as file:
            file.write((json.dumps({**body, "sha256": self_sha256(body)}, sort_keys=True) + "\n").encode())
        publish(staging, target, overwrite=True, kind=CHECKPOINT)
        for old in list_checkpoints(folder)[:-keep]:
            if old != protected and _holds_nothing_else(old):
                remove_folder(old, CHECKPOINT)

    all_written = world.gather(written)
    world.together(finish)
    return target


def _write_tensors(
    staging: Path, tensors: Mapping[str, Tensor], world: World, *, sharded: bool
) -> dict[str, tuple[int, str]]:
    """Write this rank's file; its name with its size and hash."""
    name = f"state-{world.rank:05d}-of-{world.size:05d}.safetensors" if sharded else "state-00000-of-00001.safetensors"
    if sharded and not world.is_first:
        # Replicated tensors are written by rank 0 alone.
        tensors = {full: tensor for full, tensor in tensors.items() if is_sharded(tensor)}
    entries = [_entry(name, tensor, sharded=sharded) for name, tensor in tensors.items()]
    values: Iterator[Tensor] = (local(tensor) if sharded else whole(tensor) for tensor in tensors.values())
    if sharded or world.is_first:
        return {name: astuple(write_tensors(staging / name, entries, values))}
    for _ in values:
        # The other ranks take part in gathering what rank 0 writes.
        pass
    return {}


def _entry(name: str, tensor: Tensor, *, sharded: bool) -> TensorEntry:
    if not sharded or not is_sharded(tensor):
        return TensorEntry(name, tuple(tensor.shape), tensor.dtype)
    start, _ = rows_of(tensor)
    return TensorEntry(name, tuple(local(tensor).shape), tensor.dtype, TensorRows(start, len(tensor)))


def _model_weights(model: CausalModel, world: World) -> dict[str, Tensor]:
    """The weights of the model folder, on rank 0: all of them, or the adapters where only they are trained."""
    adapted = not all(parameter.requires_grad for parameter in model.parameters())
    state = model.trained_state() if adapted else model.state_dict(keep_vars=True)
    gathered: dict[int, Tensor] = {}
    for tensor in state.values():
        # Tied weights are one tensor, and stay one.
        if id(tensor) not in gathered:
            full = whole(tensor.detach())
            gathered[id(tensor)] = full.cpu() if world.is_first else torch.empty(0)
    return {name: gathered[id(tensor)] for name, tensor in state.items()}


def clean(folder: Path) -> None:
    """Remove unfinished checkpoints that a killed run left."""
    for path in folder.glob(f".{PREFIX}*.saving"):
        if path.is_symlink():
            files.disk.remove(path)
        elif left := remove_folder(path, CHECKPOINT):
            raise DataError(f"{path}: {left}; it is of an earlier save, look and remove it")
    for path in folder.glob(f".{PREFIX}*.replaced"):
        recover(path.with_name(path.name.removeprefix(".").removesuffix(".replaced")), CHECKPOINT)


CHECKPOINT = FolderKind(
    "checkpoint",
    MARKER,
    re.compile(rf"{re.escape(MARKER)}|state-[^/]*\.safetensors|{MODEL}/([^/]+)?"),
    lambda folder: [f"{MODEL}/", *read_marker(folder / MARKER)[1]],
)


def _holds_nothing_else(path: Path) -> bool:
    """Whether a checkpoint holds its own files alone."""
    try:
        _, listed = read_marker(path / MARKER)
    except DataError:
        return False
    names = {Path(root, name).relative_to(path).as_posix() for root, _, names in os.walk(path) for name in names}
    return names <= {*listed, MARKER}


def set_aside_later(folder: Path, step: int) -> list[Path]:
    """Rename the checkpoints of a run that are later than a step; their new names."""
    renamed = []
    for path in list_checkpoints(folder):
        if step_of(path) > step:
            asides = (path.with_name(f"{path.name}{LEFT}{number or ''}") for number in count())
            # One of an earlier resume is replaced, unless it holds something else.
            aside = next(each for each in asides if not os.path.lexists(each) or not remove_folder(each, CHECKPOINT))
            files.disk.rename_new(path, aside)
            renamed.append(aside)
    if renamed:
        files.disk.sync(folder)
    return renamed


# Reading.


def choose(folder: Path, resume: str) -> Path | None:
    """The checkpoint that `resume` names: `auto` is the newest of the run, if there is one; else a folder."""
    if resume == "auto":
        newest = list_checkpoints(folder)[-1:]
        return newest[0] if newest else None
    path = local_path(resume)
    if not path.is_dir():
        there = ", ".join(map(str, list_checkpoints(folder)))
        right = f"auto or one of {there}" if there else f"auto; {folder} holds no checkpoint yet"
        raise UsageError(f"{resume}: no such checkpoint; expected {right}")
    return path


def open_checkpoint(path: Path, world: World) -> Checkpoint:
    """A checkpoint after all its hashes were checked; a `DataError` names the checkpoint before it."""

    def check() -> Checkpoint:
        try:
            state, listed = read_marker(path / MARKER)
            for other in unlisted(path, listed):
                raise DataError(f"{other}: {MARKER} does not list it, so it is not of this checkpoint; remove it")
            for name in sorted(listed)[world.rank :: world.size]:
                _check(path / name, listed[name])
            return Checkpoint(path, state, listed)
        except DataError as error:
            before = [each for each in list_checkpoints(path.parent) if each.name < path.name]
            offer = f"the one before it: --resume {before[-1]}" if before else "there is none before it"
            raise DataError(f"{error}; this checkpoint is not used; {offer}") from None

    return world.together(check)


def _check(path: Path, info: FileInfo) -> None:
    try:
        size = check_plain(path)
        if size != info.size:
            raise DataError(f"{path}: has {size:,} bytes, it was written with {info.size:,}")
        if file_info(path) != info:
            raise DataError(f"{path}: is damaged, its bytes do not have the hash they were written with")
    except FileNotFoundError:
        raise DataError(f"{path}: is missing") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None


def check_model(folder: Path) -> None:
    """Raise `DataError` if the model of a checkpoint is not what was written; other folders have no hashes."""
    # A model may be reached by a link, and a link may stand in the place of a model.
    for place in dict.fromkeys((folder.absolute(), folder.resolve())):
        marker = place.parent / MARKER
        if place.name != MODEL or not os.path.lexists(marker):
            continue
        try:
            _, listed = read_marker(marker)
            for other in unlisted(place.parent, listed):
                if other.parent == place:
                    raise DataError(f"{other}: {MARKER} does not list it; remove it, or copy the folder and use that")
            for name, info in listed.items():
                if name.startswith(f"{MODEL}/"):
                    _check(folder / Path(name).name, info)
        except DataError as error:
            raise DataError(f"{error}; this model is not used, take that of another checkpoint") from None
