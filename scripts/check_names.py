"""Check names in src/chatmill and imports in the docs.

    python scripts/check_names.py [--root FOLDER]

The script prints one line for each problem, and fails if there is any problem.

Each class name must be defined only once; leading underscores are ignored. Variables and parameters must not have the
names `found`, `said`, `asked`, `told` or `rest`, which do not describe a value. Examples in README.md, CONTRIBUTING.md
and docs/ must import only from the public API: `chatmill`, `chatmill.<package>` and `chatmill.integrations.<library>`.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

VAGUE = frozenset({"found", "said", "asked", "told", "rest"})
PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
IMPORT = re.compile(r"^\s*(?:from|import)\s+(chatmill[\w.]*)", re.MULTILINE)


def main() -> int:
    parser = argparse.ArgumentParser(description="Check class names, variable names, and imports in the docs.")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[1], help="the repository")
    root = parser.parse_args().root
    sources = {path.relative_to(root): ast.parse(path.read_text("utf-8")) for path in sorted(root.glob("src/**/*.py"))}
    problems = [*repeated_classes(sources), *vague_variables(sources), *deep_imports(root)]
    print(*problems, sep="\n", end="\n" if problems else "")
    return 1 if problems else 0


def repeated_classes(sources: dict[Path, ast.Module]) -> Iterator[str]:
    places: dict[str, list[str]] = defaultdict(list)
    for path, tree in sources.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(f"{path}:{node.lineno}")
    for name, (first, *others) in places.items():
        for place in others:
            yield f"{place}: class {name} is also defined at {first}; rename one of them"


def vague_variables(sources: dict[Path, ast.Module]) -> Iterator[str]:
    for path, tree in sources.items():
        for node in ast.walk(tree):
            name = bound_name(node)
            if name in VAGUE:
                yield f'{path}:{getattr(node, "lineno", 1)}: "{name}" does not describe its value; rename it'


def bound_name(node: ast.AST) -> str | None:
    """Return the name that a node binds: a variable, a parameter, a function or an attribute."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return node.id
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        return node.attr.lstrip("_")
    if isinstance(node, ast.arg):
        return node.arg
    if isinstance(node, ast.FunctionDef):
        return node.name.lstrip("_")
    return None


def deep_imports(root: Path) -> Iterator[str]:
    """Yield a problem for every example in the docs that imports from a module inside a package."""
    pages = [root / "README.md", root / "CONTRIBUTING.md", *sorted((root / "docs").rglob("*.md"))]
    for page in pages:
        if not page.is_file():
            continue
        text = page.read_text("utf-8")
        for block in PYTHON_BLOCK.finditer(text):
            for match in IMPORT.finditer(block[1]):
                # The modules of `integrations` are public, because each needs a different library.
                parts = match[1].removeprefix("chatmill.integrations.").split(".")
                if len(parts) > (2 if parts[0] == "chatmill" else 1):
                    line = text.count("\n", 0, block.start(1) + match.start(1)) + 1
                    where = page.relative_to(root)
                    package = ".".join(match[1].split(".")[:2])
                    yield f"{where}:{line}: imports {match[1]}; export the name from chatmill or {package}"


if __name__ == "__main__":
    sys.exit(main())
