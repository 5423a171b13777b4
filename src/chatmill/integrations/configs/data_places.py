"""Convert model and dataset locations in other trainers' configs: keep paths, and turn Hub names into URLs.

    tatsu-lab/alpaca, split train       hf://datasets/tatsu-lab/alpaca@refs/convert/parquet/default/train/*.parquet
    tatsu-lab/alpaca, file a.json       hf://datasets/tatsu-lab/alpaca/a.json

If a config does not name files, the URL points to the Hub's Parquet copy of the dataset.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from chatmill.errors import DataError, one_line
from chatmill.integrations.configs.report import TheirKeys, Translation
from chatmill.records.files import SUFFIXES

PARQUET = "refs/convert/parquet"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_URL = re.compile(r"[a-z][a-z0-9+.-]+://", re.IGNORECASE)
_SPLIT = re.compile(r"([\w.-]+)(?:\[(.*)\])?")
_UNREAD = (".csv", ".tsv", ".xml", ".pkl", ".pickle")


@dataclass(frozen=True)
class DataSplit:
    """A split of a dataset, and the number of rows to read from its start (None for all rows)."""

    name: str
    first: int | None
    note: str


def parse_split(text: str | None) -> DataSplit:
    """Parse a split such as `train[:500]`; for unsupported slices, return the whole split and a note."""
    match = _SPLIT.fullmatch(text or "train")
    if match is None:
        return DataSplit("train", None, f'"{one_line(str(text))}" is not supported; chatmill reads all of train')
    name, part = match[1], match[2]
    if part is None:
        return DataSplit(name, None, "")
    if (rows := re.fullmatch(r":(\d{1,9})", part.strip())) and int(rows[1]):
        return DataSplit(name, int(rows[1]), "chatmill reads the first rows that pass the filters")
    return DataSplit(
        name, None, f"chatmill does not support the slice [{one_line(part)}] and reads all of {name}; set max_samples"
    )


def is_local(path: str) -> bool:
    """Return whether a name is a local path rather than a repository on the Hub."""
    if path.startswith(("/", "./", "../", "~")) or "\\" in path:
        return True
    looks_like_file = path.lower().endswith((*SUFFIXES, *_UNREAD)) or "*" in path
    return looks_like_file or Path(path).exists() or _HUB_NAME.fullmatch(path) is None


def data_inputs(
    path: str, *, files: list[str] | None = None, config: str | None = None, split: str = "train", revision: str = ""
) -> list[str]:
    """Return the `inputs` of a recipe source; raise `DataError` for a file format that chatmill cannot read."""
    if path in ("json", "parquet", "arrow") and files:
        inputs = files
    elif _URL.match(path):
        inputs = [f"{path.rstrip('/')}/{name}" for name in files] if files else [path]
    elif is_local(path):
        inputs = [str(Path(path) / name) for name in files] if files else [path]
    elif files:
        at = f"@{revision}" if revision else ""
        inputs = [name if _URL.match(name) else f"hf://datasets/{path}{at}/{name}" for name in files]
    else:
        inputs = [f"hf://datasets/{path}@{PARQUET}/{config or 'default'}/{split}/*.parquet"]
    if path in ("csv", "text") or any(name.lower().endswith(_UNREAD) for name in inputs):
        name = path if path in ("csv", "text") else inputs[0]
        raise DataError(f"{one_line(name)}: chatmill reads JSON, Parquet and Arrow; convert the file to JSONL")
    return inputs


def source_name(path: str, taken: list[str]) -> str:
    """Return a unique name for a source, made from the last part of its path."""
    name = re.sub(r"[^\w.-]+", "-", path.rstrip("/").split("/")[-1]).strip("-.") or "data"
    for suffix in SUFFIXES:
        name = name.removesuffix(suffix)
    name, number = name or "data", 1
    while (numbered := name if number == 1 else f"{name}-{number}") in taken:
        number += 1
    return numbered


def take_model(translation: Translation, keys: TheirKeys, name: str, revision: str, *, tokenizer: str = "") -> None:
    """Set the base model in the recipe and the training config; for a model on the Hub, also add a download command."""
    model, at = keys.text(name), keys.text(revision)
    if model is None:
        if translation.model is not None:
            folder = translation.model
            translation.assume(
                f"chatmill uses --model, because the config has no {name}",
                recipe={"tokenizer": folder},
                train={"init_from_model": folder},
            )
        else:
            translation.faults.append(f"the config has no {name}; pass the model folder with --model")
    else:
        folder, command = _model_folder(translation, model, at)
        note = f"chatmill uses --model instead of {model}" if translation.model is not None else ""
        if command:
            note = "download the model first; chatmill reads models only from folders"
            translation.downloads.append(command)
        recipe, train = {"tokenizer": folder}, {"init_from_model": folder}
        translation.take(keys.path(name), model, recipe=recipe, train=train, note=note)
    if at is not None:
        note = "the download command selects this revision" if model else "the config does not name a model"
        translation.default(keys.path(revision), at, note=note)
    if tokenizer and (other := keys.text(tokenizer)) is not None:
        if other == model or translation.model is not None:
            translation.default(keys.path(tokenizer), other, note="chatmill uses the tokenizer in the model folder")
        else:
            folder, command = _model_folder(translation, other, None)
            if command:
                translation.downloads.append(f"{command} --exclude '*.safetensors' '*.bin'")
            note = "set check_tokenizer to false if the model folder contains another tokenizer"
            translation.take(keys.path(tokenizer), other, recipe={"tokenizer": folder}, note=note)


def _model_folder(translation: Translation, model: str, revision: str | None) -> tuple[str, str]:
    """Return the local folder of a model, and the command that downloads it ("" if the model is local)."""
    if translation.model is not None:
        return translation.model, ""
    if is_local(model):
        return model, ""
    folder = f"models/{model.split('/')[-1]}"
    at = f" --revision {shlex.quote(revision)}" if revision and revision != "main" else ""
    return folder, f"hf download {shlex.quote(model)}{at} --local-dir {shlex.quote(folder)}"
