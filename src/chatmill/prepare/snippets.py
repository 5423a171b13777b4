"""YAML recipe sources for well-known datasets, as a starting point for a recipe."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from importlib import resources

from chatmill.errors import UsageError, one_line


def known_sets() -> dict[str, str]:
    """Return a dict from the name of each well-known dataset to its description."""
    return {name: table["about"] for name, table in _tables().items()}


def snippet(names: Sequence[str]) -> str:
    """Return a recipe with the named datasets as sources."""
    tables = _tables()
    for name in names:
        if name not in tables:
            raise UsageError(f'no snippet "{one_line(name)}"; expected {", ".join(tables)}')
    # Omit repeated names, because a recipe cannot have two sources with the same name.
    return "sources:\n" + "".join(tables[name]["yaml"] for name in dict.fromkeys(names))


def _tables() -> dict[str, dict[str, str]]:
    return tomllib.loads(resources.files("chatmill.prepare").joinpath("snippets.toml").read_text("utf-8"))
