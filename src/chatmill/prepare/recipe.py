"""Recipes: YAML or TOML files that describe a job with several sources, each with its own settings.

tokenizer: tokenizer.json
max_tokens: 2048
near_dedupe: 0.8
filters: {min_turns: 2}
sources:
  - inputs: chat/*.jsonl
    weight: 3
  - inputs: [tools.jsonl]
    shape: tool
    name: tools
    weight: 1
    columns: {messages: conversations, role: from, content: value}
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from chatmill.config import keys_of, misfits, read_toml
from chatmill.errors import DataError, UsageError, one_line
from chatmill.plain_file import check_plain, read_plain
from chatmill.prepare.job import Filters, InputSource, Job
from chatmill.records import SHAPES
from chatmill.records.files import SUFFIXES as RECORD_SUFFIXES
from chatmill.records.files import source_name
from chatmill.records.shapes.column_map import parse_columns
from chatmill.records.standard_input import NAME as STANDARD_INPUT
from chatmill.remote.named_files import local_file
from chatmill.remote.urls import place

SUFFIXES = (".toml", ".yaml", ".yml")
LIMIT = 1 << 20
"""Maximum size of a recipe in bytes."""
EXPECTED = "a recipe is a YAML or TOML file"
_GLOB = re.compile(r"[*?\[]")


def load_recipe(path: str | Path) -> Job:
    """Load a recipe from a file or URL and return its job; all errors in the recipe are reported together in one line.

    Relative paths are relative to the current folder, not to the folder of the recipe.
    """
    name = str(place(path))
    data = _read(local_file(path, limit=LIMIT), name)
    faults: list[str] = []
    tables = _source_tables(data, faults)
    sources = [_source(table, f"source {number}", faults) for number, table in enumerate(tables)]
    values = _values(Job, data, "the recipe", faults)
    if not faults and len(sources) > 1:
        sources = named(sources, faults)
    if faults:
        raise DataError(f"{name}: " + "; ".join(faults))
    job = Job(tuple(sources), **values)
    try:
        job.check()
    except UsageError as error:
        raise DataError(f"{name}: {_without_flags(str(error))}") from None
    return job


def _without_flags(text: str) -> str:
    """Replace command-line flags in an error message with the corresponding recipe keys."""
    return re.sub(r"--([a-z]+(?:-[a-z]+)*)", lambda flag: flag[1].replace("-", "_"), text).replace(
        "val_file", "only_val"
    )


def named(sources: Sequence[InputSource], faults: list[str]) -> list[InputSource]:
    """Name each unnamed source after its first input; add an error to `faults` if the input has no usable name."""
    for number, source in enumerate(sources):
        if source.name is None and not _input_name(source.inputs[0]):
            faults.append(f'source {number} ("{one_line(source.inputs[0])}") has no name; give it a `name`')
    return [replace(source, name=source.name or _input_name(source.inputs[0])) for source in sources]


def _input_name(text: str) -> str:
    """Return a source name for a file, folder or glob: its last path component without wildcards, with file suffixes
    removed, or an empty string.

    `data/chat.jsonl.gz` -> `chat`, `data/chat` -> `chat`, `data/chat/*.jsonl` -> `chat`, `*.jsonl` -> ``
    """
    where = place("stdin" if text == STANDARD_INPUT else text)
    while _GLOB.search(where.name) and where.name != where.parent.name:
        where = where.parent
    return source_name(where) if where.name.lower().endswith(RECORD_SUFFIXES) else where.name


# Files.


def _read(path: Path, name: str) -> dict[str, Any]:
    try:
        if (size := check_plain(path)) > LIMIT:
            raise DataError(f"{name}: is {size:,} bytes; expected at most {LIMIT:,}")
        if name.lower().endswith(".toml"):
            return read_toml(path, what=EXPECTED, name=name)
        data = _parse_yaml(read_plain(path, LIMIT), name)
    except OSError as error:
        raise DataError(f"{name}: cannot be read ({error.strerror}); {EXPECTED}") from None
    if not isinstance(data, dict):
        raise DataError(f"{name}: is not a mapping; expected `sources` and the settings of the dataset")
    return data


def _parse_yaml(data: bytes, name: str) -> Any:
    """Parse a YAML file of tables, lists, strings, numbers, true, false and null, by the rules of YAML 1.2."""
    try:
        from chatmill.prepare.yaml_loader import parse_yaml
    except ImportError:
        raise DataError(
            f"{name}: YAML needs PyYAML; pip install 'chatmill[recipe]', or write the recipe as .toml"
        ) from None
    return parse_yaml(data, name)


# Values.


def _source_tables(data: dict[str, Any], faults: list[str]) -> list[Any]:
    """Remove the source tables from `data` and return them."""
    if "source" in data and "sources" in data:
        faults.append("source and sources are the same key; use only one of them")
    one, several = data.pop("source", None), data.pop("sources", None)
    tables = several if one is None else one
    if not isinstance(tables, list) or not tables:
        faults.append("no sources; expected a list of mappings ([[sources]] in TOML), each with its files as `inputs`")
        return []
    return tables


def _source(table: Any, where: str, faults: list[str]) -> InputSource:
    if isinstance(table, dict):
        table = dict(table)
        if isinstance(table.get("inputs"), str):
            table["inputs"] = [table["inputs"]]
        if isinstance(table.get("columns"), dict):
            table["columns"] = _columns_text(table["columns"], where, faults)
    before = len(faults)
    values = _values(InputSource, table, where, faults)
    if not values.get("inputs"):
        if len(faults) == before:
            faults.append(f"{where} has no inputs; expected a list of files, globs, folders or URLs")
        values["inputs"] = ()
    for text in values["inputs"]:
        _add_fault(place, text, where, faults)
    if (shape := values.get("shape")) is not None and shape not in SHAPES:
        faults.append(f'{where}: unknown shape "{one_line(shape)}"; expected {", ".join(SHAPES)}')
    if values.get("columns") is not None:
        _add_fault(parse_columns, values["columns"], where, faults)
    return InputSource(**values)


def _add_fault(check: Any, value: str, where: str, faults: list[str]) -> None:
    try:
        check(value)
    except UsageError as error:
        faults.append(f"{where}: {_without_flags(str(error))}")


def _columns_text(table: dict[Any, Any], where: str, faults: list[str]) -> str | None:
    """Convert the table of columns to the syntax of `--columns`; the value of a role can be a list of names."""
    pairs = []
    for ours, theirs in table.items():
        for each in theirs if isinstance(theirs, list) else [theirs]:
            if not isinstance(each, str) or not each.strip() or "," in each or each != each.strip():
                faults.append(f"{where}: columns: {one_line(str(ours))} must be the name of a column, as a string")
                return None
            pairs.append(f"{ours}={each}")
    if not pairs:
        faults.append(f"{where}: columns is empty; remove the key")
    return ",".join(pairs) or None


def _values(config: type[Any], table: Any, where: str, faults: list[str]) -> dict[str, Any]:
    """Return the valid values of a table, converted to the types of the config; add errors to `faults`."""
    if not isinstance(table, dict):
        faults.append(f"{where} must be a mapping of keys to values")
        return {}
    keys = keys_of(config)
    known = ", ".join(sorted(keys))
    faults += [
        f'{where} has unknown key "{one_line(str(name))}" (known: {known})' for name in table if name not in keys
    ]
    if isinstance(table.get("filters"), dict) and "filters" in keys:
        table = table | {"filters": Filters(**_values(Filters, table["filters"], f"{where}: filters", faults))}
    wrong = misfits(keys, table)
    for each in wrong:
        # In a recipe, a key is omitted instead of set to null, so the error does not mention null.
        expected = each.expected.removesuffix(", or null").replace('" or "', '", "')
        faults.append(f"{where}: {each.name} must be {expected}")
    refused = {each.name for each in wrong}
    return {
        name: _held(value, keys[name].type) for name, value in table.items() if name in keys and name not in refused
    }


def _held(value: Any, hint: Any) -> Any:
    """Convert a value to the type of its field in the job, so that 1 and 1.0 give the same hash."""
    if isinstance(value, list):
        return tuple(value)
    if type(value) is int and float in (hint, *get_args(hint)):
        return float(value)
    return value
