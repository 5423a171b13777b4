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

from pathlib import Path
from typing import Any

from chatmill.config import keys_of, misfits, read_toml
from chatmill.errors import DataError, one_line
from chatmill.prepare.job import InputSource, Job


def load_recipe(path: Path) -> Job:
    """The job that a recipe describes; all faults of the file are reported together, in one line."""
    data = read_toml(path, what="a recipe is a TOML file")
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
    values = _values(Job, data, "the recipe", faults)
    if faults:
        raise DataError(f"{path}: " + "; ".join(faults))
    return Job(tuple(InputSource(**source) for source in sources), **values)


def _values(config: type[Any], table: Any, where: str, faults: list[str]) -> dict[str, Any]:
    """The values of a table that are right; all others are faults."""
    if not isinstance(table, dict):
        faults.append(f"{where} must be a table")
        return {}
    keys = keys_of(config)
    known = ", ".join(sorted(keys))
    faults += [f'{where} has unknown key "{one_line(name)}" (known: {known})' for name in table if name not in keys]
    wrong = misfits(keys, table)
    for each in wrong:
        # TOML has no null, and lists options with commas.
        expected = each.expected.removesuffix(", or null").replace('" or "', '", "')
        faults.append(f"{where}: {each.name} must be {expected}")
    refused = {each.name for each in wrong}
    right = {name: value for name, value in table.items() if name in keys and name not in refused}
    # As Job holds them: its hash names the build.
    return {
        name: tuple(value) if isinstance(value, list) else float(value) if keys[name].type is float else value
        for name, value in right.items()
    }
