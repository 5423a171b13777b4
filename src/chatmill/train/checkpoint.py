"""Checkpoints: all that a run needs to resume, in safetensors and JSON, published whole or not at all.

step_00000500/
  model/                             a model folder, ready for use
  state-00000-of-00001.safetensors   weights and optimizer state: all from rank 0, or one file from each rank
  checkpoint.json                    the state of the run; size and hash of every file, and of itself; written last

safetensors instead of torch.distributed.checkpoint, whose metadata is a pickle: reading a checkpoint runs no code.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from chatmill.errors import ChatmillError, DataError, UsageError, one_line
from chatmill.store import files
from chatmill.store.hashed import FileInfo
from chatmill.store.publish import publish, recover
from chatmill.train.distributed import World, is_sharded, local, rows_of, whole
from chatmill.train.model import CausalModel
from chatmill.train.sharded_tensors import ShardedTensors, TensorEntry, TensorRows, file_info, write_tensors

VERSION = 1
MARKER = "checkpoint.json"
MODEL = "model"
PREFIX = "step_"
LEFT = ".left"
"""Suffix of a checkpoint that is later than the one a run resumed from."""
WEIGHTS, OPTIMIZER = "weights", "optimizer"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files have the hashes they were written with."""

    path: Path
    state: Mapping[str, Any]
    """What the run stored of itself in checkpoint.json."""

    @property
    def step(self) -> int:
        return int(self.state["step"])


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
    stored = ShardedTensors(sorted(checkpoint.path.glob("state-*.safetensors")))
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    need = {f"{WEIGHTS}/{name}": tuple(parameter.shape) for name, parameter in parameters.items()}
    have = {name: stored.shape(name) for name in stored.names if name.startswith(f"{WEIGHTS}/")}
    if need != have:
        wrong = sorted(name for name in need.keys() | have.keys() if need.get(name) != have.get(name))
        theirs, mine = have.get(wrong[0], "not there"), need.get(wrong[0], "none")
        raise UsageError(
            f"{checkpoint.path}: {wrong[0].removeprefix(WEIGHTS + '/')} is {theirs}, the model has {mine} "
            f"({len(wrong)} weights differ); a run goes on with the model it began with"
        )
    kinds = sorted({name.split("/")[1] for name in stored.names if name.startswith(f"{OPTIMIZER}/")})
    with torch.no_grad():
        for name, parameter in parameters.items():
            local(parameter).copy_(stored.read(f"{WEIGHTS}/{name}", *rows_of(parameter)))
            state = {}
            for kind in kinds:
                full = f"{OPTIMIZER}/{kind}/{name}"
                if full not in stored.names:
                    continue
                if stored.shape(full) == ():
                    state[kind] = stored.read(full, 0, 1).to(parameter.device)
                else:
                    state[kind] = torch.zeros_like(parameter)
                    local(state[kind]).copy_(stored.read(full, *rows_of(parameter)))
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
) -> Path:
    """Write and publish a checkpoint with this state, and remove all but the last `keep`; all ranks call this.

    `sharded`: every rank writes its own shards. `about` are small files for the model folder; None writes no such
    folder.
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
            file.write((json.dumps({**body, "sha256": _sha256(body)}, sort_keys=True) + "\n").encode())
        publish(staging, target, overwrite=True, marker=MARKER)
        for old in list_checkpoints(folder)[:-keep]:
            files.remove_tree(old, first=MARKER)

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


def step_name(step: int) -> str:
    return f"{PREFIX}{step:08d}"


def clean(folder: Path) -> None:
    """Remove unfinished checkpoints that a killed run left."""
    for path in folder.glob(f".{PREFIX}*.saving"):
        files.remove_tree(path, first=MARKER)
    for path in folder.glob(f".{PREFIX}*.replaced"):
        recover(path.with_name(path.name.removeprefix(".").removesuffix(".replaced")))


def set_aside_later(folder: Path, step: int) -> list[Path]:
    """Rename the checkpoints of a run that are later than a step; their new names."""
    renamed = []
    for path in list_checkpoints(folder):
        if path.name > step_name(step):
            aside = path.with_name(path.name + LEFT)
            if aside.exists():
                files.remove_tree(aside, first=MARKER)
            files.disk.rename_new(path, aside)
            renamed.append(aside)
    if renamed:
        files.disk.sync(folder)
    return renamed


# Reading.


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run by name, oldest first; none is opened."""
    names = sorted(path.name for path in folder.glob(f"{PREFIX}*") if path.name.removeprefix(PREFIX).isdigit())
    return [folder / name for name in names]


def choose(folder: Path, resume: str) -> Path | None:
    """The checkpoint that `resume` names: `auto` is the newest of the run, if there is one; else a folder."""
    if resume == "auto":
        return list_checkpoints(folder)[-1] if list_checkpoints(folder) else None
    path = Path(resume)
    if not path.is_dir():
        there = ", ".join(map(str, list_checkpoints(folder)))
        right = f"auto or one of {there}" if there else f"auto; {folder} holds no checkpoint yet"
        raise UsageError(f"{resume}: no such checkpoint; expected {right}")
    return path


def open_checkpoint(path: Path, world: World) -> Checkpoint:
    """A checkpoint after all its hashes were checked; a `DataError` names the checkpoint before it."""

    def check() -> Checkpoint:
        try:
            state = _read(path / MARKER)
            for name in sorted(state["files"])[world.rank :: world.size]:
                _check(path / name, FileInfo(*state["files"][name]))
            return Checkpoint(path, state)
        except DataError as error:
            before = [each for each in list_checkpoints(path.parent) if each.name < path.name]
            offer = f"the one before it: --resume {before[-1]}" if before else "there is none before it"
            raise DataError(f"{error}; this checkpoint is not used; {offer}") from None

    return world.together(check)


def _check(path: Path, info: FileInfo) -> None:
    try:
        size = path.stat().st_size
    except OSError:
        raise DataError(f"{path}: is missing") from None
    if size != info.size:
        raise DataError(f"{path}: has {size:,} bytes, it was written with {info.size:,}")
    if file_info(path) != info:
        raise DataError(f"{path}: is damaged, its bytes do not have the hash they were written with")


def _sha256(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _read(path: Path) -> dict[str, Any]:
    try:
        state = json.loads(path.read_bytes())
        stored_hash = state.pop("sha256")
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, AttributeError, KeyError, RecursionError, TypeError):
        raise DataError(f"{path}: is damaged, it is no checkpoint's") from None
    if _sha256(state) != stored_hash:
        raise DataError(f"{path}: is damaged, it does not have the hash it names")
    if lacking := [name for name in ("version", "step", "files") if name not in state]:
        raise DataError(f"{path}: is damaged, it does not say {lacking[0]}")
    if state["version"] != VERSION:
        raise DataError(f"{path}: has version {one_line(str(state['version']))}; this chatmill reads {VERSION}")
    return dict(state)


def model_folder(path: str | Path) -> Path:
    """The folder of a model: the one given, that of a checkpoint, or that of a run's newest checkpoint."""
    folder = Path(path)
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder; expected a model, a checkpoint, or a run with checkpoints")
    for place in [folder, *reversed(list_checkpoints(folder))]:
        if (place / MODEL).is_dir():
            return place / MODEL
    return folder


def check_model(folder: Path) -> None:
    """Raise `DataError` if the files of a checkpoint's model are damaged; other folders have no hashes."""
    place = folder.resolve()
    marker = place.parent / MARKER
    if place.name != MODEL or not marker.is_file():
        return
    try:
        for name, info in _read(marker)["files"].items():
            if name.startswith(f"{MODEL}/"):
                _check(folder / Path(name).name, FileInfo(*info))
    except DataError as error:
        raise DataError(f"{error}; this model is not used, take that of another checkpoint") from None
