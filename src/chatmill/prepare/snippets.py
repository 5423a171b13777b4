"""Sources of recipes for well-known data sets, as YAML that a recipe can begin from."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from importlib import resources

from chatmill.errors import UsageError, one_line


def known_sets() -> dict[str, str]:
    """The name of each data set, and what it is."""
    return {name: table["about"] for name, table in _tables().items()}


def snippet(names: Sequence[str]) -> str:
    """A recipe with these data sets as its sources."""
    tables = _tables()
    for name in names:
        if name not in tables:
            raise UsageError(f'no snippet "{one_line(name)}"; there are {", ".join(tables)}')
    # Two sources of one name would be refused.
    return "sources:\n" + "".join(tables[name]["yaml"] for name in dict.fromkeys(names))


def _tables() -> dict[str, dict[str, str]]:
    return tomllib.loads(resources.files("chatmill.prepare").joinpath("snippets.toml").read_text("utf-8"))
