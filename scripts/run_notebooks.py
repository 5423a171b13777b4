"""Run the notebooks in docs/tutorials and compare their output with the stored output.

    python scripts/run_notebooks.py                       run all of them; exit 1 at the first difference
    python scripts/run_notebooks.py mask.ipynb --write    run one and store its outputs

The output of a cell with the tag `varies` is not compared, because it differs between processors. Only standard output
is stored, because warnings and progress bars differ between versions of libraries.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "tutorials"
CELL_TIMEOUT = 600
"""Time limit for a cell, in seconds."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="names of the notebooks to run (default: all notebooks)")
    parser.add_argument("--write", action="store_true", help="store the outputs in the notebooks")
    args = parser.parse_args()
    for name in args.names or [path.name for path in sorted(FOLDER.glob("*.ipynb"))]:
        stored = read(FOLDER / name)
        executed = run(stored)
        if args.write:
            nbformat.write(executed, FOLDER / name)
        elif problems := differences(stored, executed):
            print(name, *problems, sep="\n", file=sys.stderr)
            return 1
    return 0


def read(path: Path) -> Any:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return notebook


def run(notebook: Any) -> Any:
    """Execute a copy of a notebook; return the copy, in which cells have only their standard output.

    An exception in a cell is raised as `CellExecutionError`.
    """
    executed = nbformat.from_dict(notebook)
    with tempfile.TemporaryDirectory() as folder:
        environment = {"IPYTHONDIR": folder, "JUPYTER_CONFIG_DIR": folder, "JUPYTER_RUNTIME_DIR": folder}
        client = NotebookClient(
            executed, timeout=CELL_TIMEOUT, kernel_name="python3", resources={"metadata": {"path": str(FOLDER)}}
        )
        client.execute(env=os.environ | environment)
    executed.metadata.language_info = {"name": "python"}
    for cell in executed.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.execution_count = None
            text = "".join(output.text for output in cell.outputs if output.get("name") == "stdout")
            cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text=text)] if text else []
    return executed


def differences(stored: Any, executed: Any) -> list[str]:
    """Describe each cell that prints something other than its stored output."""
    return [
        f"cell {number}: prints\n{printed(new)}\nwhere the notebook shows\n{printed(old)}"
        for number, (old, new) in enumerate(zip(stored.cells, executed.cells, strict=True))
        if old.cell_type == "code" and "varies" not in old.metadata.get("tags", []) and printed(old) != printed(new)
    ]


def printed(cell: Any) -> str:
    return "".join(output.text for output in cell.outputs)


if __name__ == "__main__":
    sys.exit(main())
