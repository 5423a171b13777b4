"""Checkpoints: all state that a run needs to resume, in safetensors and JSON files, published atomically.

step_00000500/
  model/                             a model folder that can be loaded directly; if sharded, each rank writes a part
  state-00000-of-00001.safetensors   weights and optimizer state: one file from rank 0, or one file from each rank
  checkpoint.json                    run state, size and hash of every other file, and its own hash; written last

torch.distributed.checkpoint is not used: its metadata is a pickle, and reading a checkpoint must not run code. Only the
files that checkpoint.json lists are read.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError
from torch import Tensor

from chatmill.errors import ChatmillError, DataError, UsageError, one_line
from chatmill.plain_file import check_plain
from chatmill.store import files
from chatmill.store.hashed import FileInfo
from chatmill.store.publish import FolderKind, publish, recover, remove_folder
from chatmill.train.best import link_best
from chatmill.train.checkpoint_files import (
    BEST,
    MARKER,
    MODEL,
    PREFIX,
    STATE_FILE,
    VERSION,
    list_checkpoints,
    named_checkpoint,
    read_marker,
    self_sha256,
    step_name,
    step_of,
    unlisted,
)
from chatmill.train.distributed import World, is_sharded, local, rows_of, whole
from chatmill.train.model import CausalModel
from chatmill.train.model_files import match_modes
from chatmill.train.optimizers import AnyOptimizer, fresh_state, state_fault
from chatmill.train.saved_template import write_templates
from chatmill.train.sharded_save import can_save_in_shards, save_in_shards
from chatmill.train.sharded_tensors import ShardedTensors, TensorEntry, TensorRows, file_info, write_tensors
from chatmill.train.weight_dtypes import check_float16, saved_dtype

LEFT = ".left"
"""Suffix for checkpoints that are later than the one that the run resumed from."""
WEIGHTS, OPTIMIZER = "weights", "optimizer"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files match their recorded hashes."""

    path: Path
    state: Mapping[str, Any]
    """The state of the run, from checkpoint.json."""
    files: Mapping[str, FileInfo]
    """Size and hash of each file in the checkpoint, by relative path."""

    @property
    def step(self) -> int:
        return int(self.state["step"])

    def state_files(self) -> list[Path]:
        """Return the files that contain weights and optimizer state."""
        return [self.path / name for name in sorted(self.files) if STATE_FILE.fullmatch(name)]


# Tensors.


def named_tensors(model: CausalModel, optimizer: AnyOptimizer) -> dict[str, Tensor]:
    """Return a dict of the trained weights, as weights/NAME, and of their optimizer state, as optimizer/KIND/NAME."""
    kinds: dict[str, dict[str, Tensor]] = {WEIGHTS: {}}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        kinds[WEIGHTS][name] = parameter
        for kind, tensor in sorted(optimizer.state.get(parameter, {}).items()):
            kinds.setdefault(f"{OPTIMIZER}/{kind}", {})[name] = tensor
    return {f"{kind}/{name}": tensor for kind, group in kinds.items() for name, tensor in group.items()}


def restore(checkpoint: Checkpoint, model: CausalModel, optimizer: AnyOptimizer) -> None:
    """Load weights and optimizer state into a model and its optimizer. The number of ranks may have changed since the
    checkpoint was saved.
    """
    stored = ShardedTensors(checkpoint.state_files())
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    need = {f"{WEIGHTS}/{name}": tuple(parameter.shape) for name, parameter in parameters.items()}
    have = {name: stored.shape(name) for name in stored.names if name.startswith(f"{WEIGHTS}/")}
    if need != have:
        wrong = sorted(name for name in need.keys() | have.keys() if need.get(name) != have.get(name))
        theirs, mine = have.get(wrong[0], "missing"), need.get(wrong[0], "none")
        raise UsageError(
            f"{checkpoint.path}: {one_line(wrong[0].removeprefix(WEIGHTS + '/'), 200)} is {theirs}, but the model "
            f"has {mine} (weights that differ: {len(wrong)}); resume with the same model"
        )
    unread = stored.names - need.keys()

    def load(tensor: Tensor, name: str, kind: str = WEIGHTS) -> None:
        values = stored.read(name, *rows_of(tensor))
        if fault := state_fault(kind, values, steps=checkpoint.step):
            raise DataError(f"{checkpoint.path}: {one_line(name, 200)} {fault}; resume from another checkpoint")
        local(tensor).copy_(values)

    with torch.no_grad():
        for name, parameter in parameters.items():
            if not stored.dtype(f"{WEIGHTS}/{name}").is_floating_point:
                _refuse_state(checkpoint, stored, f"{WEIGHTS}/{name}", "weights")
            load(parameter, f"{WEIGHTS}/{name}")
            state = fresh_state(optimizer, parameter)
            full = {f"{OPTIMIZER}/{kind}/{name}": tensor for kind, tensor in state.items()}
            kept = [each for each in full if each in unread]
            if kept and len(kept) < len(full):
                raise DataError(
                    f"{checkpoint.path}: the optimizer state of {name} is incomplete; the checkpoint contains only "
                    f"{', '.join(kept)}"
                )
            for kind, each in zip(state, full, strict=True) if kept else ():
                tensor = state[kind]
                if stored.shape(each) != tuple(tensor.shape) or stored.dtype(each) != tensor.dtype:
                    _refuse_state(checkpoint, stored, each)
                load(tensor, each, kind)
            if kept:
                optimizer.state[parameter] = state
                unread -= full.keys()
    if unread:
        _refuse_state(checkpoint, stored, min(unread))
    if not optimizer.state and checkpoint.state.get("totals", {}).get("trained"):
        raise DataError(f"{checkpoint.path}: has no optimizer state; resume from another checkpoint")


def _refuse_state(checkpoint: Checkpoint, stored: ShardedTensors, name: str, of: str = "optimizer state") -> NoReturn:
    what = f"{one_line(name, 200)} {stored.shape(name)} {str(stored.dtype(name)).removeprefix('torch.')}"
    raise DataError(f"{checkpoint.path}: {what} is not part of the {of} of this run; resume from another checkpoint")


# Writing.


def save(
    folder: Path,
    state: Mapping[str, Any],
    model: CausalModel,
    optimizer: AnyOptimizer,
    world: World,
    *,
    sharded: bool,
    keep: int,
    about: Mapping[str, bytes] | None,
    chat_format: Any = None,
    save_dtype: str = "auto",
    protected: Path | None = None,
    best: Path | None = None,
) -> Path:
    """Write and publish a checkpoint with this state, and remove all but the last `keep` checkpoints. All ranks must
    call this function.

    If `sharded` is set, every rank writes its shard of the weights and optimizer state. `about` maps the names of
    additional files in the model folder to their contents; if `about` is None, no model folder is written.
    `chat_format` is the stored format of the training data, which determines the chat template in the model folder.
    `save_dtype` is the dtype of the weights in the model folder.

    `best` is the checkpoint that the symbolic link `best` will point to: this checkpoint or an older one. The
    checkpoint that the link points to and the checkpoint `protected` are not removed. Checkpoints with files that
    chatmill did not write are not removed either.
    """
    target = folder / step_name(state["step"])
    staging = target.with_name(f".{target.name}.saving")
    tensors = named_tensors(model, optimizer)

    def begin() -> None:
        if world.is_first:
            files.make_folder(folder)
            clean(folder)
            files.disk.make_folder(staging)
            if about is not None:
                files.disk.make_folder(staging / MODEL)

    world.together(begin)
    written = world.together(lambda: _write_tensors(staging, tensors, world, sharded=sharded))
    in_shards = None
    if about is not None and can_save_in_shards(model):
        in_shards = save_in_shards(staging / MODEL, model, world, save_dtype=save_dtype)
    written |= {f"{MODEL}/{name}": info for name, info in (in_shards or {}).items()}
    weights = {} if about is None or in_shards is not None else _model_weights(model, world, save_dtype)

    def finish() -> None:
        if not world.is_first:
            return
        hashes = {name: info for part in all_written for name, info in part.items()}
        if about is not None:
            if in_shards is None:
                _write_model(staging / MODEL, model, weights)
            write_templates(staging / MODEL, chat_format)
            for name, data in about.items():
                with files.create(staging / MODEL / name) as file:
                    file.write(data)
            for path in sorted((staging / MODEL).iterdir()):
                if f"{MODEL}/{path.name}" not in hashes:
                    hashes[f"{MODEL}/{path.name}"] = astuple(file_info(path))
        body = {**state, "version": VERSION, "files": hashes}
        with files.create(staging / MARKER) as file:
            file.write((json.dumps({**body, "sha256": self_sha256(body)}, sort_keys=True) + "\n").encode())
        publish(staging, target, overwrite=True, kind=CHECKPOINT)
        if best is not None:
            link_best(folder, best)
        # Keep the checkpoint that `best` links to, even if a resumed run does not track the best checkpoint.
        linked = folder / link.readlink() if (link := folder / BEST).is_symlink() else None
        for old in list_checkpoints(folder)[:-keep]:
            if old not in (protected, linked) and _holds_nothing_else(old):
                remove_folder(old, CHECKPOINT)

    all_written = world.gather(written)
    world.together(finish)
    return target


def _write_model(folder: Path, model: CausalModel, weights: dict[str, Tensor]) -> None:
    check_float16(weights)
    try:
        model.save(folder, weights)
        match_modes(folder)
    except SafetensorError as error:
        # safetensors raises `SafetensorError` when the disk is full.
        raise ChatmillError(f"{folder}: the model cannot be written ({one_line(str(error))})") from None


def _write_tensors(
    staging: Path, tensors: Mapping[str, Tensor], world: World, *, sharded: bool
) -> dict[str, tuple[int, str]]:
    """Write the state file of this rank; return its name, size and hash."""
    name = f"state-{world.rank:05d}-of-{world.size:05d}.safetensors" if sharded else "state-00000-of-00001.safetensors"
    if sharded and not world.is_first:
        # Only rank 0 writes replicated tensors.
        tensors = {full: tensor for full, tensor in tensors.items() if is_sharded(tensor)}
    entries = [_entry(name, tensor, sharded=sharded) for name, tensor in tensors.items()]
    values: Iterator[Tensor] = (local(tensor) if sharded else whole(tensor) for tensor in tensors.values())
    if sharded or world.is_first:
        return {name: astuple(write_tensors(staging / name, entries, values))}
    for _ in values:
        # All ranks take part in gathering the weights that rank 0 writes.
        pass
    return {}


def _entry(name: str, tensor: Tensor, *, sharded: bool) -> TensorEntry:
    if not sharded or not is_sharded(tensor):
        return TensorEntry(name, tuple(tensor.shape), tensor.dtype)
    start, _ = rows_of(tensor)
    return TensorEntry(name, tuple(local(tensor).shape), tensor.dtype, TensorRows(start, len(tensor)))


def _model_weights(model: CausalModel, world: World, save_dtype: str) -> dict[str, Tensor]:
    """Gather the weights for the model folder on rank 0; if some weights are frozen, gather only trained weights."""
    adapted = not all(parameter.requires_grad for parameter in model.parameters())
    state = model.trained_state() if adapted else model.state_dict(keep_vars=True)
    gathered: dict[int, Tensor] = {}
    for name, tensor in state.items():
        # Tied weights are one tensor and are gathered once.
        if id(tensor) not in gathered:
            full = whole(tensor.detach())
            dtype = saved_dtype(model, name, tensor, save_dtype)
            gathered[id(tensor)] = full.cpu().to(dtype) if world.is_first else torch.empty(0)
    return {name: gathered[id(tensor)] for name, tensor in state.items()}


def clean(folder: Path) -> None:
    """Remove unfinished checkpoints, which killed runs leave behind."""
    for path in folder.glob(f".{PREFIX}*.saving"):
        if path.is_symlink():
            files.disk.remove(path)
        elif left := remove_folder(path, CHECKPOINT):
            raise DataError(f"{path}: {left}; the folder is left over from an interrupted save; inspect and remove it")
    for path in folder.glob(f".{PREFIX}*.replaced"):
        recover(path.with_name(path.name.removeprefix(".").removesuffix(".replaced")), CHECKPOINT)


CHECKPOINT = FolderKind(
    "checkpoint",
    MARKER,
    re.compile(rf"{re.escape(MARKER)}|state-[^/]*\.safetensors|{MODEL}/([^/]+)?"),
    lambda folder: [f"{MODEL}/", *read_marker(folder / MARKER)[1]],
)


def _holds_nothing_else(path: Path) -> bool:
    """Whether a checkpoint contains only the files that chatmill wrote."""
    try:
        _, listed = read_marker(path / MARKER)
    except DataError:
        return False
    names = {Path(root, name).relative_to(path).as_posix() for root, _, names in os.walk(path) for name in names}
    return names <= {*listed, MARKER}


def set_aside_later(folder: Path, step: int) -> list[Path]:
    """Rename all checkpoints of a run that are later than `step`; return their new paths."""
    renamed = []
    for path in list_checkpoints(folder):
        if step_of(path) > step:
            asides = (path.with_name(f"{path.name}{LEFT}{number or ''}") for number in count())
            # Replace a checkpoint that an earlier resume renamed, unless the checkpoint contains files that chatmill
            # did not write.
            aside = next(each for each in asides if not os.path.lexists(each) or not remove_folder(each, CHECKPOINT))
            files.disk.rename_new(path, aside)
            renamed.append(aside)
    if renamed:
        files.disk.sync(folder)
        if (best := folder / BEST).is_symlink() and not best.exists():
            link_best(folder, None)
    return renamed


# Reading.


def choose(folder: Path, resume: str) -> Path | None:
    """Return the checkpoint that `resume` names. For `auto`, return the newest checkpoint of the run, or None if it has
    none.
    """
    if resume == "auto":
        newest = list_checkpoints(folder)[-1:]
        return newest[0] if newest else None
    path = named_checkpoint(resume)
    if not path.is_dir():
        there = ", ".join(map(str, list_checkpoints(folder)))
        right = f"auto or one of {there}" if there else f"auto; {folder} has no checkpoint yet"
        raise UsageError(f"{resume}: no such checkpoint; expected {right}")
    if its := list_checkpoints(path):
        raise UsageError(f"{resume}: is a run, not a checkpoint; expected auto or one of {', '.join(map(str, its))}")
    return path


def open_checkpoint(path: Path, world: World) -> Checkpoint:
    """Open a checkpoint and check the hashes of its files; error messages suggest the previous checkpoint."""

    def check() -> Checkpoint:
        try:
            state, listed = read_marker(path / MARKER)
            for other in unlisted(path, listed):
                raise DataError(
                    f"{other}: this file is not listed in {MARKER}, so it is not part of the checkpoint; "
                    f"remove the file"
                )
            for name in sorted(listed)[world.rank :: world.size]:
                _check(path / name, listed[name])
            return Checkpoint(path, state, listed)
        except DataError as error:
            before = [each for each in list_checkpoints(path.parent) if each.name < path.name]
            offer = (
                f"to use the previous checkpoint instead, pass --resume {before[-1]}"
                if before
                else "the run has no earlier checkpoint"
            )
            raise DataError(f"{error}; {offer}") from None

    return world.together(check)


def _check(path: Path, info: FileInfo) -> None:
    try:
        size = check_plain(path)
        if size != info.size:
            raise DataError(f"{path}: has {size:,} bytes; expected {info.size:,}")
        if file_info(path) != info:
            raise DataError(f"{path}: is damaged; its hash differs from the recorded one")
    except FileNotFoundError:
        raise DataError(f"{path}: is missing") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None


def check_model(folder: Path) -> None:
    """Raise `DataError` if the model in a checkpoint was changed. Model folders outside checkpoints are not checked."""
    # Check the path as given and with its links resolved, because either one can be inside a checkpoint.
    for place in dict.fromkeys((folder.absolute(), folder.resolve())):
        marker = place.parent / MARKER
        if place.name != MODEL or not os.path.lexists(marker):
            continue
        try:
            _, listed = read_marker(marker)
            for other in unlisted(place.parent, listed):
                if other.parent == place:
                    raise DataError(
                        f"{other}: this file is not listed in {MARKER}; remove the file, or use a copy of the folder"
                    )
            for name, info in listed.items():
                if name.startswith(f"{MODEL}/"):
                    _check(folder / Path(name).name, info)
        except DataError as error:
            raise DataError(f"{error}; the model of another checkpoint can be used instead") from None
