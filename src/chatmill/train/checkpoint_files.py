"""The files of runs and checkpoints, and checkpoint.json, which lists those of a checkpoint and holds its run's state.

Only listed files are read, and every value is checked before it is used: somebody else may have written it. This module
needs no torch.
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
"""The name of a run's link to its checkpoint with the lowest val loss."""
STATE_FILE = re.compile(r"state-(\d{5})-of-(\d{5})\.safetensors", re.ASCII)
STEP_FOLDER = re.compile(r"step_(\d{8,18})", re.ASCII)
LARGEST = 1 << 31
"""The largest vocabulary, and number of ranks."""
TOTALS = ("tokens", "trained", "untrained_rows", "cut_episodes", "cut_tokens", "answer_cut", "skipped_steps")
LATER_TOTALS = {"answer_cut"}
"""Counts that checkpoints of earlier versions do not have."""
CURSOR = ("step", "epoch", "window", "row")


def step_name(step: int) -> str:
    return f"{PREFIX}{step:08d}"


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run by their steps, oldest first; none is opened. A link is no checkpoint of the run."""
    try:
        # Not `glob`, which takes a folder that cannot be read for an empty one.
        named = [path for path in folder.iterdir() if STEP_FOLDER.fullmatch(path.name)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted((path for path in named if path.is_dir() and not path.is_symlink()), key=step_of)


def step_of(path: Path) -> int:
    """The step in the name of a checkpoint."""
    return int(path.name.removeprefix(PREFIX))


def named_checkpoint(path: str | Path) -> Path:
    """The checkpoint that the link `best` of a run points to; any other path unchanged."""
    folder = local_path(path)
    if folder.name == BEST and folder.is_symlink() and STEP_FOLDER.fullmatch(target := str(folder.readlink())):
        return folder.with_name(target)
    return folder


@lru_cache(maxsize=8)
def _copied(url: Url) -> Path:
    """A folder at a URL, copied once for each process."""
    return local_copy(url)


def model_folder(path: str | Place) -> Path:
    """The folder of a model: the one given, that of a checkpoint, or that of a run's newest checkpoint.

    One at a URL is copied to this machine.
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
    """The hash that checkpoint.json holds of all its other values."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def read_marker(path: Path) -> tuple[dict[str, Any], dict[str, FileInfo]]:
    """The state of a run, and the files of the checkpoint with size and hash, from its checkpoint.json."""
    try:
        state = json.loads(read_plain(path))
        stored_hash = state.pop("sha256")
        is_whole = self_sha256(state) == stored_hash
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, AttributeError, KeyError, RecursionError, TypeError):
        raise DataError(f"{path}: is damaged, it is no checkpoint's") from None
    if not is_whole:
        raise DataError(f"{path}: is damaged, it does not have the hash it names")
    if lacking := [name for name in ("version", "step", "files") if name not in state]:
        raise DataError(f"{path}: is damaged, it does not say {lacking[0]}")
    if type(state["version"]) is not int or state["version"] != VERSION:
        raise DataError(f"{path}: has version {one_line(str(state['version']))}; this chatmill reads {VERSION}")
    body = JsonObject(state, str(path))
    step = body.count("step")
    if (named := STEP_FOLDER.fullmatch(path.parent.name)) and int(named[1]) != step:
        raise DataError(f"{path}: is of step {step:,}, and its folder is {path.parent.name}; it was moved or changed")
    files = _files(body)
    if "config" in state or "stage" in state:
        body.table("config")
    if "stage" in state:
        _check_run(body, step)
    return state, files


def unlisted(folder: Path, files: Mapping[str, FileInfo]) -> Iterator[Path]:
    """What lies in a checkpoint as if it belonged to it and is not listed: tensors, and anything in its model folder.

    Other files beside them, such as notes, are no part of the checkpoint and are never read.
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
            raise listed.fault(name, value, f"state-…-of-….safetensors or {MODEL}/NAME as the name of a file")
        if matched:
            states.add((int(matched[1]), int(matched[2])))
        match value:
            case [int(size), str(sha256)] if 0 <= size < 1 << 62 and type(size) is int and len(sha256) == 64:
                files[name] = FileInfo(size, sha256)
            case _:
                raise listed.fault(name, value, "its size and its sha256")
    count = max((count for _, count in states), default=0)
    if not states or states != {(rank, count) for rank in range(count)}:
        raise body.fault("files", sorted(listed.value), "the state files of all ranks, 00000-of-N to N-1-of-N")
    return files


def _check_run(body: JsonObject, step: int) -> None:
    """Check the state of `chatmill train`: its types, and that its counters agree with each other."""
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
        raise cursors.fault("train.step", cursor["step"], f"{step - start}, the steps of the run since its data began")
    if body.value.get("audit") is not None:
        audit = body.table("audit")
        if (kept := _cursor(audit, "cursor")) != cursor:
            raise audit.fault("cursor", kept, f"{json.dumps(cursor)}, where the loader stands")


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
