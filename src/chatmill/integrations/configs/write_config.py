"""Write a config imported from another trainer as a recipe, a train config, an optional chat template, and a report on
its keys.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from chatmill.errors import ChatmillError, DataError, UsageError, one_line
from chatmill.integrations.configs.report import STATUSES, Assumption, KeyResult, Translation
from chatmill.plain_file import local_path
from chatmill.prepare.recipe import load_recipe
from chatmill.train.config import TrainConfig

RECIPE, TRAIN, TEMPLATE, KEYS = "recipe.yaml", "train.json", "chat_template.jinja", "keys.txt"
TITLES = {
    "taken": "taken",
    "default": "no change needed",
    "none": "without counterpart",
    "unknown": "unknown and not used",
}


@dataclass(frozen=True)
class ImportedConfig:
    """Another trainer's config, converted to a recipe and a train config."""

    trainer: str
    place: str
    results: Sequence[KeyResult]
    """The report on each key, in the order of the imported file."""
    assumptions: Sequence[Assumption]
    recipe: dict[str, Any]
    train: dict[str, Any]
    origins: dict[str, str]
    chat_template: str | None
    downloads: Sequence[str]
    run_name: str

    @classmethod
    def of(cls, translation: Translation, order: Sequence[str]) -> ImportedConfig:
        """Return the result of a conversion; raise a `DataError` that lists all faults, if there are any."""
        translation.settle()
        translation.check()
        return cls(
            translation.trainer,
            translation.place,
            translation.ordered(order),
            translation.assumptions,
            {**translation.recipe, "sources": translation.sources},
            translation.train,
            translation.origins,
            translation.chat_template,
            translation.downloads,
            translation.run_name or "imported",
        )

    def with_status(self, status: str) -> list[KeyResult]:
        return [result for result in self.results if result.status == status]

    def commands(self, folder: Path) -> list[str]:
        """Return the commands to run next: downloads, then `chatmill prepare` and `chatmill train`."""
        recipe, data, train = (shlex.quote(str(folder / name)) for name in (RECIPE, "data", TRAIN))
        return [
            *dict.fromkeys(self.downloads),
            f"chatmill prepare {recipe} -o {data}",
            f"chatmill train --config_file {train} --model_name {shlex.quote(self.run_name)}",
        ]

    def lines(self) -> list[str]:
        out = [f"{self.trainer} config {self.place}: {len(self.results)} keys"]
        for status in STATUSES:
            if results := self.with_status(status):
                out += [
                    "",
                    f"{TITLES[status]} ({len(results)}):",
                    *(f"  {one_line(str(each), None)}" for each in results),
                ]
        if self.assumptions:
            out += ["", "assumptions:", *(f"  {one_line(str(each), None)}" for each in self.assumptions)]
        return out

    def to_json(self, folder: Path) -> dict[str, Any]:
        keys = [
            {"key": each.key, "value": each.value, "status": each.status, "ours": dict(each.ours), "note": each.note}
            for each in self.results
        ]
        return {
            "trainer": self.trainer,
            "config": self.place,
            "recipe": str(folder / RECIPE),
            "train_config": str(folder / TRAIN),
            "keys": keys,
            "assumed": [{"ours": dict(each.ours), "note": each.note} for each in self.assumptions],
            "commands": self.commands(folder),
        }


def write_import(imported: ImportedConfig, folder: str | Path, *, overwrite: bool = False) -> list[Path]:
    """Write the converted config files to a folder; `overwrite` replaces existing files.

    The files are written only if `prepare` and `train` can load them.
    """
    target = local_path(folder)
    texts = _texts(imported, target)
    _check_target(target, texts, overwrite)
    made = [parent for parent in (target, *target.parents) if not parent.exists()]
    target.mkdir(parents=True, exist_ok=True)
    try:
        with TemporaryDirectory(prefix=".import-", dir=target) as name:
            aside = Path(name)
            for file, text in texts.items():
                with (aside / file).open("w", encoding="utf-8") as out:
                    out.write(text)
                    out.flush()
                    os.fsync(out.fileno())
            _check_files(imported, aside, target)
            for file in texts:
                (aside / file).replace(target / file)
    except BaseException:
        for parent in made:
            if parent.exists() and not any(parent.iterdir()):
                parent.rmdir()
        raise
    return [target / file for file in texts]


def _check_target(target: Path, texts: dict[str, str], overwrite: bool) -> None:
    if target.exists() and not target.is_dir():
        raise UsageError(f"{target}: is not a folder; give the folder to write to")
    there = [file for file in texts if (target / file).exists() or (target / file).is_symlink()]
    if there and not overwrite:
        raise UsageError(f"{target / there[0]}: already exists; add --overwrite, or give another folder")
    if folders := [file for file in there if (target / file).is_dir()]:
        raise UsageError(f"{target / folders[0]}: is a folder, so no file can be written there; give another folder")


def _texts(imported: ImportedConfig, target: Path) -> dict[str, str]:
    recipe, train = dict(imported.recipe), dict(imported.train)
    texts = {}
    if imported.chat_template is not None:
        recipe |= {"format": "template", "chat_template": str(target / TEMPLATE)}
        texts[TEMPLATE] = imported.chat_template
    train = {"dataset_dir": str(target / "data"), **train}
    return {
        RECIPE: _recipe_text(imported, recipe),
        TRAIN: json.dumps(train, indent=2, ensure_ascii=False) + "\n",
        KEYS: "\n".join(imported.lines()) + "\n",
        **texts,
    }


def _recipe_text(imported: ImportedConfig, recipe: dict[str, Any]) -> str:
    lines = [
        f"# Converted from the {imported.trainer} config {one_line(imported.place)} by `chatmill import`.",
        f"# See {KEYS} for a report on each key.",
    ]
    lines += [_pair(name, value, imported.origins.get(name)) for name, value in recipe.items() if name != "sources"]
    lines.append("sources:")
    for number, source in enumerate(recipe["sources"]):
        for place, (name, value) in enumerate(source.items()):
            indent = "  - " if place == 0 else "    "
            lines.append(indent + _pair(name, value, imported.origins.get(f"sources[{number}].{name}")))
    return "\n".join(lines) + "\n"


def _pair(name: str, value: Any, origin: str | None) -> str:
    comment = f"  # {one_line(origin, 100)}" if origin else ""
    # Escape characters that YAML rejects or reads as line breaks.
    text = "".join(
        character if character.isprintable() else f"\\U{ord(character):08x}"
        for character in json.dumps(value, ensure_ascii=False)
    )
    return f"{name}: {text}{comment}"


def _check_files(imported: ImportedConfig, aside: Path, target: Path) -> None:
    try:
        load_recipe(aside / RECIPE)
    except ChatmillError as error:
        _raise(imported, str(error).removeprefix(f"{aside / RECIPE}: "), "recipe")
    try:
        TrainConfig.from_file(aside / TRAIN)
    except ChatmillError as error:
        _raise(imported, str(error).removeprefix(f"{aside / TRAIN}: "), "train config")


def _raise(imported: ImportedConfig, reason: str, what: str) -> None:
    raise DataError(f"{imported.place}: cannot be converted to a {what}: {reason}") from None
