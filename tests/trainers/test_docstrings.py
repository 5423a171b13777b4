from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState, GradientState
from page_sections import ROOT

import chatmill

MODULES = ["accelerate", "columns", "hf", "torchdata", "train_rows"]


@pytest.mark.filterwarnings("ignore:'set_vital':UserWarning")
@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("data").symlink_to(ROOT / "data")
    module = importlib.import_module(f"chatmill.integrations.{name}")
    names = {**vars(module), "chatmill": chatmill, "Path": Path}
    tests = [test for test in doctest.DocTestFinder().find(module, globs=names) if test.examples]
    assert tests
    runner, output = doctest.DocTestRunner(), list[str]()
    for test in tests:
        runner.run(test, out=output.append)
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    assert output == []
