"""Checkpoints: all that a run needs to go on, in safetensors and JSON, there whole or not at all.

step_00000500/
  model/                             a model, ready for use
  state-00000-of-00001.safetensors   weights and moments: all by rank 0, or a file by each rank
  checkpoint.json                    where the run stands; size and hash of all files, and of itself; written last
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from chatmill.errors import ChatmillError, DataError, UsageError, one_line
from chatmill.store import files
from chatmill.store.publish import publish, recover
from chatmill.train.distributed import World, is_sharded, local, rows_of, whole
from chatmill.train.model import CausalModel
from chatmill.train.sharded_tensors import (
    FileHash,
    ShardedTensors,
    TensorEntry,
    TensorRows,
    file_info,
    named,
    write_tensors,
)

VERSION = 1
MARKER = "checkpoint.json"
MODEL = "model"
PREFIX = "step_"
LEFT = ".left"
"""What the name of a checkpoint ends in that a run has gone back behind."""
WEIGHTS, OPTIMIZER = "weights", "optimizer"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files are as they were written."""

    path: Path
    said: Mapping[str, Any]
    """What the run said of itself."""

    @property
    def step(self) -> int:
        return int(self.said["step"])

    @property
    def model(self) -> Path:
        return self.path / MODEL


# The tensors of a run.


def tensors_of(model: CausalModel, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The trained weights and what the optimizer remembers of each, by name."""
    kinds: dict[str, dict[str, Tensor]] = {WEIGHTS: {}}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        kinds[WEIGHTS][name] = parameter
        for kind, tensor in sorted(optimizer.state.get(parameter, {}).items()):
            kinds.setdefault(f"{OPTIMIZER}/{kind}", {})[name] = tensor
    return named(kinds)


def restore(checkpoint: Checkpoint, model: CausalModel, optimizer: torch.optim.Optimizer) -> None:
    """Put the weights and moments of a checkpoint into a model and its optimizer, at any number of ranks."""
    pieces = ShardedTensors(sorted(checkpoint.path.glob("state-*.safetensors")))
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    need = {f"{WEIGHTS}/{name}": tuple(parameter.shape) for name, parameter in parameters.items()}
    have = {name: pieces.shape(name) for name in pieces.names if name.startswith(f"{WEIGHTS}/")}
    if need != have:
        wrong = sorted(name for name in need.keys() | have.keys() if need.get(name) != have.get(name))
        theirs, mine = have.get(wrong[0], "not there"), need.get(wrong[0], "none")
        raise UsageError(
            f"{checkpoint.path}: {wrong[0].removeprefix(WEIGHTS + '/')} is {theirs}, the model has {mine} "
            f"({len(wrong)} weights differ); a run goes on with the model it began with"
        )
    with torch.no_grad():
        for name, parameter in parameters.items():
            local(parameter).copy_(pieces.read(f"{WEIGHTS}/{name}", *rows_of(parameter)))
            state = {}
            for kind in sorted({full.split("/")[1] for full in pieces.names if full.startswith(f"{OPTIMIZER}/")}):
                full = f"{OPTIMIZER}/{kind}/{name}"
                if full not in pieces.names:
                    continue
                if pieces.shape(full) == ():
                    state[kind] = pieces.read(full, 0, 1).to(parameter.device)
                else:
                    state[kind] = torch.zeros_like(parameter)
                    local(state[kind]).copy_(pieces.read(full, *rows_of(parameter)))
            if state:
                optimizer.state[parameter] = state


# Writing.


def save(
    folder: Path,
    said: Mapping[str, Any],
    model: CausalModel,
    optimizer: torch.optim.Optimizer,
    world: World,
    *,
    sharded: bool,
    keep: int,
    about: Mapping[str, bytes] | None,
) -> Path:
    """Write a checkpoint of what is `said`, publish it, and remove all but the last `keep`; all ranks call this.

    `sharded`: every rank writes its shards. `about` are small files that go into the model's folder; with None
    there is no such folder.
    """
    target = folder / step_name(said["step"])
    staging = target.with_name(f".{target.name}.saving")
    tensors = tensors_of(model, optimizer)

    def begin() -> None:
        if world.is_first:
            files.make_folder(folder)
            clean(folder)
            files.disk.make_folder(staging)

    world.together(begin)
    written = world.together(lambda: _write_state(staging, tensors, world, sharded=sharded))
    weights = {} if about is None else _for_use(model, world)

    def finish() -> None:
        if not world.is_first:
            return
        infos = {name: info for part in all_written for name, info in part.items()}
        if about is not None:
            files.disk.make_folder(staging / MODEL)
            _save_model(model, staging / MODEL, weights)
            for name, data in about.items():
                with files.create(staging / MODEL / name) as file:
                    file.write(data)
            for path in sorted((staging / MODEL).iterdir()):
                infos[f"{MODEL}/{path.name}"] = file_info(path)
        text = _text({**said, "version": VERSION, "files": {name: list(info) for name, info in infos.items()}})
        with files.create(staging / MARKER) as file:
            file.write(text)
        publish(staging, target, overwrite=True, marker=MARKER)
        for old in found(folder)[:-keep]:
            files.remove_tree(old, first=MARKER)

    all_written = world.gather({name: list(info) for name, info in written.items()})
    world.together(finish)
    return target


def _save_model(model: CausalModel, folder: Path, weights: dict[str, Tensor]) -> None:
    try:
        model.save(folder, weights)
    except SafetensorError as error:
        # A full disk, as safetensors says it.
        raise ChatmillError(f"{folder}: the model cannot be written ({one_line(str(error))})") from None


def _write_state(staging: Path, tensors: Mapping[str, Tensor], world: World, *, sharded: bool) -> dict[str, FileHash]:
    name = f"state-{world.rank:05d}-of-{world.size:05d}.safetensors" if sharded else "state-00000-of-00001.safetensors"
    if sharded and not world.is_first:
        # What every rank has whole is rank 0's to write.
        tensors = {full: tensor for full, tensor in tensors.items() if is_sharded(tensor)}
    entries = [_entry(name, tensor, sharded=sharded) for name, tensor in tensors.items()]
    values: Iterator[Tensor] = (local(tensor) if sharded else whole(tensor) for tensor in tensors.values())
    if sharded or world.is_first:
        return {name: write_tensors(staging / name, entries, values)}
    for _ in values:
        # The other ranks give their parts of what rank 0 writes.
        pass
    return {}


def _entry(name: str, tensor: Tensor, *, sharded: bool) -> TensorEntry:
    if not sharded or not is_sharded(tensor):
        return TensorEntry(name, tuple(tensor.shape), tensor.dtype)
    start, _ = rows_of(tensor)
    return TensorEntry(name, tuple(local(tensor).shape), tensor.dtype, TensorRows(start, len(tensor)))


def _for_use(model: CausalModel, world: World) -> dict[str, Tensor]:
    """What the model's folder is to hold, on rank 0: all weights, or adapters where only they are trained."""
    adapted = not all(parameter.requires_grad for parameter in model.parameters())
    state = model.trained_state() if adapted else model.state_dict(keep_vars=True)
    taken: dict[int, Tensor] = {}
    for tensor in state.values():
        # Tied weights are one tensor, and stay one.
        if id(tensor) not in taken:
            full = whole(tensor.detach())
            taken[id(tensor)] = full.cpu() if world.is_first else torch.empty(0)
    return {name: taken[id(tensor)] for name, tensor in state.items()}


def step_name(step: int) -> str:
    return f"{PREFIX}{step:08d}"


def clean(folder: Path) -> None:
    """Remove what a killed run has not finished."""
    for path in folder.glob(f".{PREFIX}*.saving"):
        files.remove_tree(path, first=MARKER)
    for path in folder.glob(f".{PREFIX}*.replaced"):
        recover(path.with_name(path.name.removeprefix(".").removesuffix(".replaced")))


# Reading.


def found(folder: Path) -> list[Path]:
    """The checkpoints of a run, oldest first, looked at no further."""
    names = sorted(path.name for path in folder.glob(f"{PREFIX}*") if path.name.removeprefix(PREFIX).isdigit())
    return [folder / name for name in names]


def choose(folder: Path, resume: str) -> Path | None:
    """The checkpoint that `resume` means: `auto` the newest of the run, if it has one, else the folder it names."""
    if resume == "auto":
        return found(folder)[-1] if found(folder) else None
    path = Path(resume)
    if not path.is_dir():
        there = ", ".join(map(str, found(folder)))
        right = f"auto or one of {there}" if there else f"auto; {folder} holds no checkpoint yet"
        raise UsageError(f"{resume}: no such checkpoint; expected {right}")
    return path


def open_checkpoint(path: Path, world: World) -> Checkpoint:
    """A checkpoint all of whose bytes are as written; `DataError` else, which names the one before it."""

    def check() -> Checkpoint:
        try:
            said = _read(path / MARKER)
            names = sorted(said["files"])
            for name in names[world.rank :: world.size]:
                _check(path / name, FileHash(*said["files"][name]))
            return Checkpoint(path, said)
        except DataError as error:
            before = [each for each in found(path.parent) if each.name < path.name]
            offer = f"the one before it: --resume {before[-1]}" if before else "there is none before it"
            raise DataError(f"{error}; this checkpoint is not used; {offer}") from None

    return world.together(check)


def _check(path: Path, info: FileHash) -> None:
    try:
        size = path.stat().st_size
    except OSError:
        raise DataError(f"{path}: is missing") from None
    if size != info.size:
        raise DataError(f"{path}: has {size:,} bytes, it was written with {info.size:,}")
    if file_info(path) != info:
        raise DataError(f"{path}: is damaged, its bytes do not have the hash they were written with")


def _text(said: Mapping[str, Any]) -> bytes:
    body = json.dumps(said, sort_keys=True)
    return (json.dumps({**said, "sha256": hashlib.sha256(body.encode()).hexdigest()}, sort_keys=True) + "\n").encode()


def _read(path: Path) -> dict[str, Any]:
    try:
        said = json.loads(path.read_bytes())
        named_hash = said.pop("sha256")
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, AttributeError, KeyError, RecursionError, TypeError):
        raise DataError(f"{path}: is damaged, it is no checkpoint's") from None
    if hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest() != named_hash:
        raise DataError(f"{path}: is damaged, it does not have the hash it names")
    if lacking := [name for name in ("version", "step", "files") if name not in said]:
        raise DataError(f"{path}: is damaged, it does not say {lacking[0]}")
    if said["version"] != VERSION:
        raise DataError(f"{path}: has version {one_line(str(said['version']))}; this chatmill reads {VERSION}")
    return dict(said)


def leave_later(folder: Path, step: int) -> list[Path]:
    """Put checkpoints of a run that come after a step out of the way, and say under which names they stay."""
    left = []
    for path in found(folder):
        if path.name > step_name(step):
            aside = path.with_name(path.name + LEFT)
            if aside.exists():
                files.remove_tree(aside, first=MARKER)
            files.disk.rename_new(path, aside)
            left.append(aside)
    if left:
        files.disk.sync(folder)
    return left


def model_folder(path: str | Path) -> Path:
    """The folder of a model: the one given, that of a checkpoint, or that of a run's newest checkpoint."""
    folder = Path(path)
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder; expected a model, a checkpoint, or a run with checkpoints")
    if (folder / MODEL).is_dir():
        return folder / MODEL
    checkpoints = [each for each in found(folder) if (each / MODEL).is_dir()]
    return checkpoints[-1] / MODEL if checkpoints else folder


def check_model(folder: Path) -> None:
    """Raise `DataError` unless the model of a checkpoint is as it was written; other folders name no hashes."""
    place = folder.resolve()
    marker = place.parent / MARKER
    if place.name != MODEL or not marker.is_file():
        return
    try:
        for name, info in _read(marker)["files"].items():
            if name.startswith(f"{MODEL}/"):
                _check(folder / Path(name).name, FileHash(*info))
    except DataError as error:
        raise DataError(f"{error}; this model is not used, take that of another checkpoint") from None
