"""Every example in a docstring of the package must produce the output that the docstring shows."""

from __future__ import annotations

import ast
import doctest
import importlib
import warnings
from pathlib import Path

import pytest

import chatmill

SOURCE = Path(__file__).resolve().parents[1] / "src"


def docstrings() -> list[tuple[str, str, str]]:
    """Return the module, name and text of each docstring with an example."""
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        module = ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node) or ""
                if ">>> " in text:
                    found.append((module, getattr(node, "name", "module"), text))
    return found


@pytest.mark.parametrize(
    ("module", "name", "text"), [pytest.param(*each, id=".".join(each[:2])) for each in docstrings()]
)
def test_an_example_in_a_docstring(module, name, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").symlink_to(SOURCE.parent / "data")
    try:
        names = vars(importlib.import_module(module)).copy()
    except ImportError as error:
        pytest.skip(str(error))
    names |= {"chatmill": chatmill, **{each: getattr(chatmill, each) for each in chatmill.__all__}}
    test = doctest.DocTestParser().get_doctest(text, names, f"{module}.{name}", None, None)
    output: list[str] = []
    with warnings.catch_warnings():
        # torchdata calls a deprecated function of torch.
        warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
        doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE).run(test, out=output.append)
    assert test.examples and not output, "".join(output)
