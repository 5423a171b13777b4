"""Recipes: a job as a TOML file, with several sources, each read in its own way.

tokenizer = "tokenizer.json"
max_tokens = 2048
val_split = 0.05

[[source]]
inputs = ["chat/*.jsonl"]

[[source]]
inputs = ["tools.jsonl"]
shape = "tool"
name = "tools"
train_on = "last"
"""

from __future__ import annotations

import tomllib
import types
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from chatmill.errors import DataError
from chatmill.prepare.job import InputSource, Job


def load_recipe(path: Path) -> Job:
    """The job that a recipe describes; all faults of the file are reported together, in one line."""
    try:
        data = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); a recipe is a TOML file") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise DataError(f"{path}: not TOML: {error}") from None
    faults: list[str] = []
    tables = data.pop("source", [])
    if not isinstance(tables, list) or not tables:
        faults.append("no [[source]]; name the files of each in `inputs`")
        tables = []
    sources = []
    for number, table in enumerate(tables):
        values = _values(InputSource, table, f"source {number}", faults)
        if not values.get("inputs"):
            faults.append(f"source {number} has no inputs; give a list of files or globs")
        sources.append(values)
    values = _values(Job, data, "the recipe", faults, besides=("sources",))
    if faults:
        raise DataError(f"{path}: " + "; ".join(faults))
    return Job(tuple(InputSource(**source) for source in sources), **values)


def _values(kind: type, table: Any, where: str, faults: list[str], besides: tuple[str, ...] = ()) -> dict[str, Any]:
    """The entries of a table that are fields of `kind` and of the right type; everything else is a fault."""
    if not isinstance(table, dict):
        faults.append(f"{where} must be a table")
        return {}
    hints = get_type_hints(kind)
    known = {field.name for field in fields(kind)} - set(besides)
    out = {}
    for key, value in table.items():
        if key not in known:
            faults.append(f'{where} has unknown key "{key}" (known: {", ".join(sorted(known))})')
            continue
        if isinstance(value, list):
            value = tuple(value)
        if isinstance(value, int) and not isinstance(value, bool) and hints[key] is float and abs(value) < 2**53:
            value = float(value)
        if _fits(value, hints[key]):
            out[key] = value
        else:
            faults.append(f"{where}: {key} must be {_named(hints[key])}")
    return out


def _fits(value: Any, hint: Any) -> bool:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, option) for option in get_args(hint))
    if origin is Literal:
        return value in get_args(hint) and not isinstance(value, bool)
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(item, get_args(hint)[0]) for item in value)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def _named(hint: Any) -> str:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(_named(option) for option in get_args(hint) if option is not type(None))
    if origin is Literal:
        return ", ".join(f'"{option}"' for option in get_args(hint))
    if origin is tuple:
        return "a list of texts"
    return {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}[hint]
