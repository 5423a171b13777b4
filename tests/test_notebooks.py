from __future__ import annotations

import sys
from pathlib import Path

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError
from test_docs import links

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "scripts"))

import run_notebooks  # noqa: E402

NOTEBOOKS = sorted(path.name for path in run_notebooks.FOLDER.glob("*.ipynb"))
# zmq closes its sockets only when they are garbage collected.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")


def one_cell(source: str, output: str, **metadata: object) -> object:
    cell = nbformat.v4.new_code_cell(source, metadata=metadata)
    cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text=output)]
    return nbformat.v4.new_notebook(cells=[cell])


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs_and_prints_what_it_shows(name):
    stored = run_notebooks.read(run_notebooks.FOLDER / name)
    assert run_notebooks.differences(stored, run_notebooks.run(stored)) == []


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_links_of_a_notebook_resolve_and_cells_that_print_have_an_output(name):
    notebook = run_notebooks.read(run_notebooks.FOLDER / name)
    prose = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    targets = [run_notebooks.FOLDER / link.partition("#")[0] for link in links(prose)]
    assert targets and [target for target in targets if not target.is_file()] == []
    printing = [cell for cell in notebook.cells if cell.cell_type == "code" and "\nprint(" in f"\n{cell.source}"]
    assert printing and all(run_notebooks.printed(cell) for cell in printing)


def test_both_notebooks_are_there():
    assert NOTEBOOKS == ["lora.ipynb", "mask.ipynb"]


@pytest.mark.parametrize(
    ("shown", "tags", "count"), [("2\n", [], 0), ("3\n", [], 1), ("3\n", ["varies"], 0), ("", [], 1)]
)
def test_a_cell_that_prints_something_else_is_a_difference_unless_it_varies(shown, tags, count):
    stored = one_cell("print(1 + 1)", shown, tags=tags)
    executed = one_cell("print(1 + 1)", "2\n", tags=tags)
    assert len(run_notebooks.differences(stored, executed)) == count


def test_a_notebook_that_fails_is_an_error_and_only_standard_output_is_kept():
    source = "import sys\nprint('kept')\nprint('noise', file=sys.stderr)\n1 + 1"
    executed = run_notebooks.run(one_cell(source, ""))
    assert [output.text for output in executed.cells[0].outputs] == ["kept\n"]
    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        run_notebooks.run(one_cell("1 / 0", ""))
