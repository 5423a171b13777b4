from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def check(root: Path) -> tuple[int, list[str]]:
    command = [sys.executable, ROOT / "scripts/check_names.py", "--root", root]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return done.returncode, done.stdout.splitlines()


def plant(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_the_tree_is_clean():
    assert check(ROOT) == (0, [])


@pytest.mark.parametrize(("first", "second"), [("Part", "Part"), ("Part", "_Part"), ("_Part", "__Part")])
def test_a_class_name_defined_twice_is_named_with_both_places(tmp_path, first, second):
    files = {"src/chatmill/a.py": f"class {first}: ...\n", "src/chatmill/b/c.py": f"\n\nclass {second}: ...\n"}
    line = "src/chatmill/b/c.py:3: class Part is also defined at src/chatmill/a.py:1; rename one of them"
    assert check(plant(tmp_path, files)) == (1, [line])


@pytest.mark.parametrize(
    "source",
    [
        "found = 1",
        "for said in []: ...",
        "def f(asked): ...",
        "def told(): ...",
        "x.rest = 1",
        "if (found := 1): ...",
        "a, *rest = [1]",
        "f = lambda found: 1",
    ],
)
def test_a_vague_name_is_a_fault(tmp_path, source):
    code, lines = check(plant(tmp_path, {"src/chatmill/a.py": f"\n{source}\n"}))
    assert code == 1
    assert [line.split(": ")[0] for line in lines] == ["src/chatmill/a.py:2"]


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/explanation/loading.md"])
@pytest.mark.parametrize("statement", ["from chatmill.load.order import Order", "import chatmill.load.order as o"])
def test_a_page_that_imports_from_inside_a_package_is_a_fault(tmp_path, page, statement):
    text = f"# Title\n\n```python\nimport json\n{statement}\n```\n"
    line = f"{page}:5: imports chatmill.load.order; export the name from chatmill or chatmill.load"
    assert check(plant(tmp_path, {page: text})) == (1, [line])


def test_imports_from_chatmill_and_its_packages_are_right(tmp_path):
    text = "```python\nfrom chatmill import Rows\nfrom chatmill.load import Batch\n```\n`from chatmill.a.b import c`\n"
    assert check(plant(tmp_path, {"docs/x.md": text})) == (0, [])


def test_imports_from_a_module_of_integrations_are_right_and_from_inside_one_are_not(tmp_path):
    text = "```python\nfrom chatmill.integrations.hf import TrainRows\nfrom chatmill.integrations.hf.a import b\n```\n"
    line = "docs/x.md:3: imports chatmill.integrations.hf.a; export the name from chatmill or chatmill.integrations"
    assert check(plant(tmp_path, {"docs/x.md": text})) == (1, [line])
