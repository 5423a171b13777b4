from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import sentences  # noqa: E402

MODULE = '''"""Read the first file. Then write the second one."""

LIMIT = 3
# Bounded, because files
# may be large.
raise ValueError(f"{path}: expected at most {LIMIT} lines")
'''
PAGE = """# How to train

Train the model
with a mask. `x` is not trained.

| key | what it does |
|---|---|
| `n` | number of layers |

```python
this is code, not prose
```
"""


@pytest.fixture
def repository(tmp_path):
    (tmp_path / "page.md").write_text(PAGE)
    (tmp_path / "module.py").write_text(MODULE)
    (tmp_path / "part.c").write_text("int a; /* Nothing is\n * nowhere outside. */\n// An empty range is in bounds.\n")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    return tmp_path


def test_sentences_of_every_kind_are_listed_with_their_places(repository):
    assert list(sentences.sentences(repository, [])) == [
        ("module.py", 1, "docstring", "Read the first file."),
        ("module.py", 1, "docstring", "Then write the second one."),
        ("module.py", 4, "comment", "Bounded, because files may be large."),
        ("module.py", 6, "string", "{path}: expected at most {LIMIT} lines"),
        ("page.md", 1, "docs", "How to train"),
        ("page.md", 3, "docs", "Train the model with a mask."),
        ("page.md", 3, "docs", "`x` is not trained."),
        ("page.md", 6, "docs", "what it does"),
        ("page.md", 8, "docs", "number of layers"),
        ("part.c", 1, "comment", "Nothing is nowhere outside."),
        ("part.c", 3, "comment", "An empty range is in bounds."),
    ]


def test_only_the_given_paths_are_read(repository):
    assert {each.path for each in sentences.sentences(repository, ["page.md"])} == {"page.md"}


def test_a_phrase_of_the_list_is_refused_with_what_to_write(repository):
    listing = "# comment\n\nnothing is nowhere -> an empty range is always in bounds\nno such words -> nothing\n"
    assert list(sentences.phrases_to_avoid(repository, [], listing)) == [
        'part.c:1: "Nothing is nowhere"; write an empty range is always in bounds'
    ]


@pytest.mark.parametrize(
    "phrase",
    [
        "one pass, what nothing in is trained is skipped",
        "the longest gradient; 0: of any length",
        "Every so-manieth batch",
        "The rate of a step; the first is 0.",
        "What a control token that eats space eats",
        '"x" is no day',
        "Come to life: the parent alone answers Ctrl-C",
        "Nothing is nowhere outside.",
        "Only null is null",
    ],
)
def test_the_list_holds_sentences_that_were_once_written_here(phrase, tmp_path):
    (tmp_path / "page.md").write_text(phrase + "\n")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    assert len(list(sentences.phrases_to_avoid(tmp_path, [], sentences.PHRASES.read_text("utf-8")))) == 1
