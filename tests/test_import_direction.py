import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def check(*folder: Path) -> tuple[int, list[str]]:
    command = [sys.executable, ROOT / "scripts/check_imports.py", *folder]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return done.returncode, done.stdout.splitlines()


def plant(folder: Path, file: str, source: str) -> Path:
    package = folder / "src/chatmill"
    path = package / file
    path.parent.mkdir(parents=True)
    path.write_text(source)
    return package


def test_the_tree_keeps_the_direction():
    assert check() == (0, [])


@pytest.mark.parametrize(
    "statement",
    [
        "from chatmill.format import render",
        "import chatmill.format.render as render",
        "from chatmill import format",
        "from ..format import render",
        "from .. import format",
    ],
)
@pytest.mark.parametrize("before", ["", "def read():\n    ", "if TYPE_CHECKING:\n    "])
def test_a_planted_import_against_the_direction_is_named_with_its_line(tmp_path, statement, before):
    package = plant(tmp_path, "records/jsonl.py", "import json\n" + before + statement + "\n")
    line = 3 if before else 2
    what = "records imports format; it may import only _exports, _native, errors, ledger, plain_file, remote and rows"
    assert check(package) == (1, [f"src/chatmill/records/jsonl.py:{line}: {what}"])


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("format/render.py", "from chatmill.records import record\nfrom . import template\n"),
        ("load/batch.py", "import torch\n"),
        ("sft.py", "def collate():\n    import torch\n"),
        ("fit/bins.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from torch import Tensor\n"),
    ],
)
def test_imports_along_the_direction_pass(tmp_path, file, source):
    assert check(plant(tmp_path, file, source)) == (0, [])


@pytest.mark.parametrize(
    ("file", "source", "line"),
    [
        ("sft.py", "import torch\n", 1),
        ("fit/bins.py", "def pack():\n    from torch.nn import Module\n", 2),
        ("tokenizer/hf.py", "try:\n    import transformers\nexcept ImportError:\n    pass\n", 2),
    ],
)
def test_torch_outside_its_parts_is_found(tmp_path, file, source, line):
    status, lines = check(plant(tmp_path, file, source))
    assert status == 1
    assert [text.split(": ")[0] for text in lines] == [f"src/chatmill/{file}:{line}"]


def test_a_part_the_table_does_not_know_is_a_violation(tmp_path):
    what = "src/chatmill/extra.py:1: extra is not in the import order; add it to MAY_IMPORT in check_imports.py"
    assert check(plant(tmp_path, "extra.py", "")) == (1, [what])
