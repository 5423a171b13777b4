from __future__ import annotations

import re
import shutil
from importlib import import_module
from pathlib import Path

import pytest
from fuzz_compiled import fuzz

ROOT = Path(__file__).resolve().parents[1]
PARTS = sorted(path for path in (ROOT / "src").rglob("_*.c"))


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler is installed")
@pytest.mark.parametrize("source", PARTS, ids=lambda path: path.stem)
def test_each_part_is_compiled(source):
    name = ".".join(source.relative_to(ROOT / "src").with_suffix("").parts)
    assert name in (ROOT / "pyproject.toml").read_text()
    assert Path(str(import_module(name).__file__)).parent == source.parent


def test_random_and_hostile_calls_give_what_python_gives_or_are_refused():
    folder = Path(str(import_module("chatmill._native").__file__)).parent
    if shutil.which("cc") is None and not [*folder.glob("*.so")]:
        pytest.skip("no C compiler is installed")
    assert fuzz(folder, rounds=3, seed=2) == 477


def test_there_are_six():
    names = ["_batch.c", "_bpe.c", "_columns.c", "_copy.c", "_positions.c", "_rollout.c"]
    assert [path.name for path in PARTS] == names


@pytest.mark.parametrize("source", PARTS, ids=lambda path: path.stem)
def test_a_part_compiled_with_a_newer_python_works_in_an_older_one(source):
    """In a source tree, all Python versions load the same compiled file.

    With the headers of Python 3.13, `PyArg_Parse` with `#` in its format calls a function that Python 3.11 lacks, and
    `Py_RETURN_NONE` does not increment the reference count, which later crashes Python 3.11.
    """
    code = source.read_text()
    assert not re.search(r'Py(?:Arg_Parse\w*|_BuildValue)\([^"]*"[^"]*#', code)
    assert not re.search(r"Py_RETURN_(?:NONE|TRUE|FALSE)", code)
