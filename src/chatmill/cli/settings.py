"""`chatmill.toml`: settings of the commands that build caches, for what no flag gives.

data.primer.val_frac = 0.2       in the file, or as tables: [data.primer] val_frac = 0.2
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from chatmill.cli.expand import OptionGroup
from chatmill.config import keys_of, read_toml
from chatmill.errors import UsageError, one_line
from chatmill.prepare.primer import SHAPES, CacheConfig

FILE = Path("chatmill.toml")
NAMES = {
    "path": "data.{source}.path",
    "val_frac": "data.{source}.val_frac",
    "out_dir": "data.caches.sft_token_cache",
    "seed": "training.seed",
    "t_max": "model.T",
}
"""What the keys of `CacheConfig` are called in the file."""
DEFAULT_PATHS = {"primer": "data/primer.jsonl"}


class SettingFlags(OptionGroup):
    """Marks a parameter that gets the flags that win over the file, None where none is given."""

    def options(self) -> Iterator[inspect.Parameter]:
        for name, each in keys_of(CacheConfig).items():
            if name != "path":
                otherwise = f"[{NAMES[name].format(source='SOURCE')}, else {each.default}]"
                kind: Any = each.type | None
                yield self.parameter(name, Annotated[kind, typer.Option(help=f"{each.help} {otherwise}")], None)


def cache_config(source: str, flags: Mapping[str, Any], *, input_flag: str, file: Path = FILE) -> CacheConfig:
    """The configuration of a source: a flag wins over the file, the file over the default; all faults are one line.

    `flags` are the keys of `CacheConfig`, None where no flag is given.
    """
    keys = keys_of(CacheConfig)
    stored, faults = _read(file)
    for name, value in flags.items():
        if value is not None and not keys[name].check.accepts(value):
            flag = input_flag if name == "path" else f"--{name.replace('_', '-')}"
            faults.append(f"{flag} is {one_line(str(value))}, expected {keys[name].check.expected}")
    of_file = {name: stored.get(dotted.format(source=source)) for name, dotted in NAMES.items()}
    values: dict[str, Any] = {"path": DEFAULT_PATHS.get(source)}
    values |= {name: value for layer in (of_file, flags) for name, value in layer.items() if value is not None}
    if values["path"] is None:
        faults.append(f"no input; give {input_flag}, or data.{source}.path in {file}")
    if faults:
        raise UsageError("; ".join(faults))
    return CacheConfig(**values)


def _read(file: Path) -> tuple[dict[str, Any], list[str]]:
    """The settings of the file, if there is one, by their dotted names; and what is wrong with them."""
    if not file.exists():
        return {}, []
    keys = keys_of(CacheConfig)
    known = {dotted.format(source=source): keys[name] for name, dotted in NAMES.items() for source in SHAPES}
    stored, faults = {}, []
    for dotted, value in _flat(read_toml(file, what="expected a TOML file", error=UsageError)):
        if dotted not in known:
            faults.append(f'{file}: unknown key "{one_line(dotted)}" (known: {", ".join(sorted(known))})')
        elif not known[dotted].check.accepts(value):
            faults.append(f"{file}: {dotted} is {one_line(repr(value))}, expected {known[dotted].check.expected}")
        else:
            stored[dotted] = value
    return stored, faults


def _flat(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value that is no table, by its dotted name; an empty table is a value, so that its name is checked."""
    for name, value in table.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
