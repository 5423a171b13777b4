"""Write the pages of the public API in docs/reference/api/; `make docs` adds the docstrings with mkdocstrings.

    python scripts/api_pages.py --write    write the pages
    python scripts/api_pages.py --check    exit 1 if a page is out of date

A name that both `chatmill` and a package export is on the page of `chatmill`; the page of the package links to it.
"""

from __future__ import annotations

import argparse
import ast
import sys
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
API = ROOT / "docs" / "reference" / "api"
PACKAGES = {
    "chatmill": "Import the names that most programs need, from reading messages to training a model.",
    "chatmill.records": "Read conversations of any supported shape from files into `Record` objects.",
    "chatmill.tokenizer": "Open or train a tokenizer that never encodes text as control tokens.",
    "chatmill.format": "Render conversations to token ids and a loss mask, with chat formats or chat templates.",
    "chatmill.fit": "Fit rows into a context length by truncating, packing, or splitting into blocks.",
    "chatmill.prepare": "Build a dataset from files of conversations, in one or more processes.",
    "chatmill.store": "Read, write, verify and compare datasets on disk.",
    "chatmill.load": "Load the batches of each rank in a reproducible order.",
    "chatmill.audit": "Write and verify audit logs, which record the rows of every training step.",
    "chatmill.train": "Train models, save checkpoints, and generate text.",
    "chatmill.rollout": "Train on the model's own answers with rollout matching.",
    "chatmill.show": "Show a dataset in the terminal, in a report, or in a browser.",
}
LIBRARIES = ("hf", "trl", "accelerate", "lightning", "torchdata", "torchtitan")
INTEGRATIONS = "Use chatmill's batches in other trainers; each module needs the library that it is named after."
NOTE = "<!-- Made by scripts/api_pages.py --write: change that, not this page. -->"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", action="store_true", help="write the pages")
    action.add_argument("--check", action="store_true", help="exit 1 if a page is out of date")
    args = parser.parse_args()
    pages = all_pages()
    written = {path.name: path.read_text("utf-8") for path in API.glob("*.md")}
    stale = sorted(name for name in pages.keys() | written.keys() if pages.get(name) != written.get(name))
    if args.check:
        for name in stale:
            print(f"docs/reference/api/{name}: out of date; run scripts/api_pages.py --write", file=sys.stderr)
        return 1 if stale else 0
    API.mkdir(exist_ok=True)
    for name in stale:
        if name in pages:
            (API / name).write_text(pages[name], "utf-8")
        else:
            (API / name).unlink()
    return 0


def all_pages() -> dict[str, str]:
    pages = {page_name(package): package_page(package) for package in PACKAGES}
    pages["integrations.md"] = integrations_page()
    rows = [f"| [`{package}`]({page_name(package)}) | {does} |" for package, does in PACKAGES.items()]
    rows.append(f"| [`chatmill.integrations`](integrations.md) | {INTEGRATIONS} |")
    pages["index.md"] = "\n".join(
        [
            "# Python API",
            "",
            NOTE,
            "",
            "All public functions and classes, by package. Names that are not listed here are private and may change",
            "without notice.",
            "",
            "| package | |",
            "|---|---|",
            *rows,
            "",
        ]
    )
    return pages


def page_name(package: str) -> str:
    return package.rpartition(".")[2] + ".md"


def package_page(package: str) -> str:
    names = import_module(package).__all__
    shared = [] if package == "chatmill" else sorted(set(names) & set(import_module("chatmill").__all__))
    lines = [f"# {package}", "", NOTE, "", PACKAGES[package]]
    if shared:
        links = ", ".join(f"[`{name}`][chatmill.{name}]" for name in shared)
        lines += ["", f"The package `chatmill` also exports {links}."]
    return entries(lines, [f"{package}.{name}" for name in names if name not in shared])


def integrations_page() -> str:
    text = "\n".join(["# chatmill.integrations", "", NOTE, "", INTEGRATIONS, ""])
    for library in LIBRARIES:
        module = f"chatmill.integrations.{library}"
        names = [f"{module}.{name}" for name in library_exports(library)]
        text += "\n" + entries([f"## {module}"], names)
    return text


def library_exports(library: str) -> list[str]:
    """Parse the source of an integration to find its public names, because its library may not be installed."""
    tree = ast.parse((ROOT / "src/chatmill/integrations" / f"{library}.py").read_text("utf-8"))
    names = set()
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__":
            return sorted(ast.literal_eval(node.value))
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            names.update(alias.name for alias in node.names if alias.asname == alias.name)
    return sorted(name for name in names if not name.startswith("_"))


def entries(lines: list[str], names: list[str]) -> str:
    """Return a page or section: `lines`, followed by a directive for each name."""
    return "\n".join([*lines, *(f"\n::: {name}" for name in names), ""])


if __name__ == "__main__":
    sys.exit(main())
