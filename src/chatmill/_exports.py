"""Lazy exports: a package names what it exports once, as imports for type checkers, and imports a name when it is used.

from typing import TYPE_CHECKING as _TYPE_CHECKING

from chatmill._exports import lazy_exports as _lazy_exports

if _TYPE_CHECKING:
    from chatmill.load.batch import Batch as Batch, collate as collate

__all__, __getattr__, __dir__ = _lazy_exports(__name__)
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any


def lazy_exports(package: str) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """`__all__`, `__getattr__` and `__dir__` of a package, from the imports under its `if _TYPE_CHECKING:`."""
    spec = find_spec(package)
    source = getattr(spec.loader, "get_source", lambda name: "")(package) if spec else ""
    homes = {
        alias.asname or alias.name: (str(node.module), alias.name)
        for block in ast.parse(source or "").body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "_TYPE_CHECKING"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, attribute = homes[name]
        value = getattr(import_module(module), attribute)
        setattr(sys.modules[package], name, value)
        return value

    names = sorted(homes)
    return names, get, lambda: [*names, *(("__version__",) if package == "chatmill" else ())]
