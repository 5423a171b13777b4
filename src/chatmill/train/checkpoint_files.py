"""File names of runs and checkpoints, and the reader of checkpoint.json.

checkpoint.json lists the files of a checkpoint and stores the state of the run. A checkpoint may come from an untrusted
source. Only files listed in checkpoint.json are read, and every value is checked before use. This module does not
import torch.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from chatmill.errors import DataError, UsageError, one_line
from chatmill.plain_file import local_path, read_plain
from chatmill.remote.cache import local_copy
from chatmill.remote.urls import Place, Url, place
from chatmill.store.hashed import FileInfo, JsonObject

VERSION = 1
MARKER = "checkpoint.json"
MODEL = "model"
PREFIX = "step_"
BEST = "best"
"""Name of the link to the checkpoint with the lowest val loss."""
STATE_FILE = re.compile(r"state-(\d{5})-of-(\d{5})\.safetensors", re.ASCII)
STEP_FOLDER = re.compile(r"step_(\d{8,18})", re.ASCII)
LARGEST = 1 << 31
"""The largest allowed vocabulary size and number of ranks."""
TOTALS = ("tokens", "trained", "untrained_rows", "cut_episodes", "cut_tokens", "answer_cut", "skipped_steps")
LATER_TOTALS = {"answer_cut"}
"""Counts that checkpoints from earlier versions may lack."""
CURSOR = ("step", "epoch", "window", "row")


def step_name(step: int) -> str:
    return f"{PREFIX}{step:08d}"


def list_checkpoints(folder: Path) -> list[Path]:
    """List the checkpoints of a run, oldest first, without opening them. Symbolic links are ignored."""
    try:
        # Do not use `glob`, which treats an unreadable folder as empty.
        named = [path for path in folder.iterdir() if STEP_FOLDER.fullmatch(path.name)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted((path for path in named if path.is_dir() and not path.is_symlink()), key=step_of)


def step_of(path: Path) -> int:
    return int(path.name.removeprefix(PREFIX))


def named_checkpoint(path: str | Path) -> Path:
    """Resolve a run's link `best` to the checkpoint it points to; return any other path unchanged."""
    folder = local_path(path)
    if folder.name == BEST and folder.is_symlink() and STEP_FOLDER.fullmatch(target := str(folder.readlink())):
        return folder.with_name(target)
    return folder


@lru_cache(maxsize=8)
def _copied(url: Url) -> Path:
    """Download a folder from a URL, once per process."""
    return local_copy(url)


def model_folder(path: str | Place) -> Path:
    """Return the model folder of a checkpoint or of a run's newest checkpoint. A folder that is neither a run nor a
    checkpoint is returned unchanged.

    If the path is a URL, the folder is downloaded first.
    """
    where = place(path)
    folder = _copied(where) if isinstance(where, Url) else named_checkpoint(where)
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder; expected a model, a checkpoint, or a run with checkpoints")
    for each in [folder, *reversed(list_checkpoints(folder))]:
        if (each / MODEL).is_dir():
            return each / MODEL
    return folder


def self_sha256(body: Mapping[str, Any]) -> str:
    """Return the hash of all values in checkpoint.json except the hash itself."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def read_marker(path: Path) -> tuple[dict[str, Any], dict[str, FileInfo]]:
    """Read checkpoint.json; return the state of the run, and the size and hash of each file."""
    try:
        state = json.loads(read_plain(path))
        stored_hash = state.pop("sha256")
        is_whole = self_sha256(state) == stored_hash
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, AttributeError, KeyError, RecursionError, TypeError):
        raise DataError(f"{path}: is damaged; expected the state of a checkpoint") from None
    if not is_whole:
        raise DataError(f"{path}: is damaged; its hash differs from the recorded hash")
    if lacking := [name for name in ("version", "step", "files") if name not in state]:
        raise DataError(f"{path}: is damaged; {lacking[0]} is missing")
    if type(state["version"]) is not int or state["version"] != VERSION:
        version = one_line(str(state["version"]))
        raise DataError(f"{path}: has version {version}; this version of chatmill reads only version {VERSION}")
    body = JsonObject(state, str(path))
    step = body.count("step")
    if (named := STEP_FOLDER.fullmatch(path.parent.name)) and int(named[1]) != step:
        raise DataError(
            f"{path}: is for step {step:,}, but its folder is {path.parent.name}; the checkpoint was moved or changed"
        )
    files = _files(body)
    if "config" in state or "stage" in state:
        body.table("config")
    if "stage" in state:
        _check_run(body, step)
    return state, files


def unlisted(folder: Path, files: Mapping[str, FileInfo]) -> Iterator[Path]:
    """Yield the tensor files and the files in the model folder that checkpoint.json does not list.

    Other unlisted files, such as notes, are ignored and never read.
    """
    inside = [path for path in folder.iterdir() if path.name.startswith("state-") or path.suffix == ".safetensors"]
    model = folder / MODEL
    inside += model.iterdir() if model.is_dir() else [model] if model.exists() else []
    yield from (path for path in sorted(inside) if path.relative_to(folder).as_posix() not in files)


def _files(body: JsonObject) -> dict[str, FileInfo]:
    listed = body.table("files")
    files, states = {}, set()
    for name, value in listed.value.items():
        matched = STATE_FILE.fullmatch(name)
        folder, _, file = name.rpartition("/")
        if not matched and (folder != MODEL or file in ("", ".", "..") or "\0" in file):
            raise listed.fault(name, value, f"state-…-of-….safetensors or {MODEL}/NAME as the file name")
        if matched:
            states.add((int(matched[1]), int(matched[2])))
        match value:
            case [int(size), str(sha256)] if 0 <= size < 1 << 62 and type(size) is int and len(sha256) == 64:
                files[name] = FileInfo(size, sha256)
            case _:
                raise listed.fault(name, value, "the size and the sha256 of the file")
    count = max((count for _, count in states), default=0)
    if not states or states != {(rank, count) for rank in range(count)}:
        raise body.fault("files", sorted(listed.value), "the state files of all ranks, 00000-of-N to N-1-of-N")
    return files


def _check_run(body: JsonObject, step: int) -> None:
    """Check the types of the values that `chatmill train` stores, and that the stored counters are consistent."""
    stage, totals, config, loader = (body.table(name) for name in ("stage", "totals", "config", "loader"))
    start = stage.count("start", most=step)
    stage.sha256("dataset_sha256")
    stage.check("post_training", type(post_training := stage.value.get("post_training")) is bool, "true or false")
    config.equal("post_training", post_training)
    known = set(TOTALS) - LATER_TOTALS <= totals.value.keys() <= set(TOTALS)
    totals.check("", known, f"the counts {', '.join(TOTALS)}")
    for name in totals.value:
        totals.count(name)
    seed = body.count("seed")
    config.equal("seed", seed)
    body.count("vocab_size", least=1, most=LARGEST)
    body.count("world_size", least=1, most=LARGEST)
    tokenizer = body.value.get("tokenizer_sha256")
    body.check("tokenizer_sha256", tokenizer is None or isinstance(tokenizer, str), "a hash or null")
    if body.value.get("base") is not None:
        base = body.table("base")
        base.sha256("sha256")
        base.check("folder", isinstance(base.value.get("folder"), str), "the name of a folder")
    if body.value.get("best") is not None:
        _check_best(body.table("best"), step)
    cursors = loader.table("cursors")
    cursor = _cursor(cursors, "train") if "train" in cursors.value else dict.fromkeys(CURSOR, 0)
    if cursor["step"] != step - start:
        raise cursors.fault("train.step", cursor["step"], f"{step - start}, the number of steps on the current data")
    if body.value.get("audit") is not None:
        audit = body.table("audit")
        if (kept := _cursor(audit, "cursor")) != cursor:
            raise audit.fault("cursor", kept, f"{json.dumps(cursor)}, the position of the loader")


def _check_best(best: JsonObject, step: int) -> None:
    for name in ("loss", "reference"):
        value = best.value.get(name)
        right = value is None or (type(value) is float and math.isfinite(value))
        best.check(name, right, "a finite number or null")
    best.count("step", most=step)
    best.count("waited")
    best.check("", best.value.keys() == {"loss", "step", "reference", "waited"}, "loss, step, reference and waited")


def _cursor(table: JsonObject, name: str) -> dict[str, int]:
    cursor = table.table(name)
    return {each: cursor.count(each) for each in CURSOR}
