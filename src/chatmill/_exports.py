"""Lazy exports: a package lists its exports once, as imports for type checkers, and imports each name on first use.

from typing import TYPE_CHECKING as _TYPE_CHECKING

from chatmill._exports import lazy_exports as _lazy_exports

if _TYPE_CHECKING:
    from chatmill.load.batch import Batch as Batch, collate as collate

__all__, __getattr__, __dir__ = _lazy_exports(__name__)
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

_IMPORT = re.compile(r"^    from ([\w.]+) import \(?\s*(\w+) as (\w+)", re.MULTILINE)
"""Matches an import of one name, as formatted by ruff. A regular expression is faster than importing `ast`."""


def lazy_exports(package: str) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__all__`, `__getattr__` and `__dir__` for a package, from the imports under its `if _TYPE_CHECKING:`."""
    spec = sys.modules[package].__spec__
    source = getattr(spec.loader, "get_source", lambda name: "")(package) if spec else ""
    _, _, exports = (source or "").partition("\nif _TYPE_CHECKING:\n")
    homes = {name: (module, attribute) for module, attribute, name in _IMPORT.findall(exports)}

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, attribute = homes[name]
        value = getattr(import_module(module), attribute)
        setattr(sys.modules[package], name, value)
        return value

    names = sorted(homes)
    return names, get, lambda: [*names, *(("__version__",) if package == "chatmill" else ())]
