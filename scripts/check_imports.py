"""Check that each part of src/chatmill imports only the parts and large libraries that are allowed for it.

    python scripts/check_imports.py [PACKAGE_FOLDER]

Prints one line per forbidden import, and exits with 1 if there are any. A part is a module or folder directly in
src/chatmill.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "chatmill"
BASE = {"errors", "rows", "ledger", "plain_file", "remote", "_exports"}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "_exports": set(),
    "plain_file": {"errors"},
    "remote": {"errors", "plain_file"},
    "_native": set(),
    "config": {"errors", "plain_file"},
    "rows": {"errors", "_native"},
    "ledger": {"errors"},
    "answers": {"rows", "ledger"},
    "records": BASE | {"_native"},
    "tokenizer": BASE | {"_native"},
    "fit": BASE | {"answers"},
    "store": BASE,
    "format": BASE | {"answers", "records", "tokenizer"},
    "prepare": BASE | {"answers", "config", "records", "tokenizer", "format", "fit", "store"},
    "load": BASE | {"_native", "config", "store", "fit"},
    "audit": BASE | {"load", "store"},
    "settings": BASE | {"config", "load"},
    "train": BASE | {"config", "settings", "audit", "load", "store", "fit"},
    "rollout": BASE | {"_native", "config", "records", "format", "fit", "tokenizer", "store", "load", "train"},
    "show": BASE | {"records", "tokenizer", "format", "fit", "store", "load", "audit"},
    "integrations": BASE | {"config", "records", "tokenizer", "format", "prepare", "load", "audit", "train", "show"},
    "sft": BASE | {"records", "tokenizer", "format", "fit", "load"},
    "__init__": {"_exports"},
    "__main__": {"cli"},
}
MAY_IMPORT["cli"] = MAY_IMPORT.keys() - {"__main__"}
# `chatmill` imports its exported names lazily, on first use.
MAY_IMPORT["__init__"] |= MAY_IMPORT.keys() - {"__init__", "__main__", "cli"}
MAY_IMPORT_BESIDES: dict[str, set[str]] = {
    "show/near.py": {"prepare"},
    "train/chat_model.py": {"records", "tokenizer", "format"},
    "train/run_dir.py": {"__init__"},
}
"""Additional parts that individual files may import.

near.py uses the MinHash signatures of prepare/, chat_model.py renders text, and run_dir.py records the version.
"""

HEAVY = {"torch", "transformers", "peft", "triton", "trl", "accelerate", "lightning", "torchdata", "torchtitan"}
HEAVY_AT_MODULE_LEVEL = {"load", "train", "rollout", "integrations"}
HEAVY_IN_FUNCTIONS = HEAVY_AT_MODULE_LEVEL | {"sft", "cli"}


@dataclass(frozen=True)
class Import:
    """One import in a source file: the absolute name of the imported module, and the line of the statement."""

    module: str
    line: int
    in_function: bool
    for_types: bool


def main() -> int:
    default = Path(__file__).resolve().parents[1] / "src" / PACKAGE
    package = Path(sys.argv[1]) if len(sys.argv) > 1 else default
    if not package.is_dir():
        print(f"{package}: no such folder; expected the folder of the package")
        return 1
    found = [line for path in sorted(package.rglob("*.py")) for line in violations(path, package)]
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


def violations(path: Path, package: Path) -> Iterator[str]:
    """Yield a message for each forbidden import in one file."""
    part = path.relative_to(package).parts[0].removesuffix(".py")
    place = path.relative_to(package.parent.parent).as_posix()
    if part not in MAY_IMPORT:
        yield f"{place}:1: {part} is not in the import order; add it to MAY_IMPORT in {Path(__file__).name}"
        return
    allowed = MAY_IMPORT[part] | MAY_IMPORT_BESIDES.get(path.relative_to(package).as_posix(), set())
    for found in imports(path, package):
        top, _, rest = found.module.partition(".")
        if top == PACKAGE:
            target = rest.partition(".")[0] or "__init__"
            if target != part and target not in allowed:
                shown = f"the package {PACKAGE} itself" if target == "__init__" else target
                may = f"only {listed(allowed)}" if allowed else f"no part of {PACKAGE}"
                yield f"{place}:{found.line}: {part} imports {shown}; it may import {may}"
        elif top in HEAVY and not found.for_types and part not in heavy_parts(found):
            yield (
                f"{place}:{found.line}: {part} imports {top}; only {listed(HEAVY_AT_MODULE_LEVEL)} may import it at "
                "module level; sft and cli may import it inside a function, and every part may import it under "
                "TYPE_CHECKING"
            )


def heavy_parts(found: Import) -> set[str]:
    return HEAVY_IN_FUNCTIONS if found.in_function else HEAVY_AT_MODULE_LEVEL


def imports(path: Path, package: Path) -> Iterator[Import]:
    """Yield every import in a file, with absolute module names."""
    above = (PACKAGE, *path.relative_to(package).parts[:-1])

    def walk(node: ast.AST, in_function: bool, for_types: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, in_function, for_types)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join((*above[: len(above) - node.level + 1], node.module or "")) if node.level else node.module
            base = (base or "").rstrip(".")
            for alias in node.names:
                # `from chatmill import fit` imports the part `fit`; `from chatmill import pack` imports only the
                # package.
                is_part = base == PACKAGE and alias.name in MAY_IMPORT
                yield Import(f"{base}.{alias.name}" if is_part else base, node.lineno, in_function, for_types)
        elif isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for child in node.body:
                yield from walk(child, in_function, True)
            for child in node.orelse:
                yield from walk(child, in_function, for_types)
        else:
            inside = in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            for child in ast.iter_child_nodes(node):
                yield from walk(child, inside, for_types)

    yield from dict.fromkeys(walk(ast.parse(path.read_text("utf-8"), str(path)), False, False))


def listed(names: set[str]) -> str:
    *head, last = sorted(names)
    return f"{', '.join(head)} and {last}" if head else last


if __name__ == "__main__":
    sys.exit(main())
