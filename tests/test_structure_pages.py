from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DESIGN = (ROOT / "docs/design.md").read_text("utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
STOPS = re.findall(r"^\| \d+ \| `(chatmill[\w.]+)`", DESIGN, re.MULTILINE)


def resolve(dotted: str) -> object:
    parts = dotted.split(".")
    for count in range(len(parts), 0, -1):
        try:
            value: object = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for name in parts[count:]:
            value = getattr(value, name)
        return value
    raise AssertionError(f"{dotted} is not a module")


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(chatmill(?:\.\w+)+)`", DESIGN))))
def test_every_name_of_the_design_page_exists(name):
    assert resolve(name) is not None


def test_one_conversation_goes_from_jsonl_to_loss_in_ten_stops():
    assert len(STOPS) == 10


def test_each_recipe_names_at_most_three_steps_and_files_that_exist():
    recipes = re.split(r"^\*\*… ", CONTRIBUTING, flags=re.MULTILINE)[1:]
    assert [recipe.partition("?")[0] for recipe in recipes] == [
        "a record shape",
        "a fit rule",
        "a tokenizer backend",
        "a loss",
        "a model family",
        "a command",
    ]
    for recipe in recipes:
        assert len(re.findall(r"^\d\. ", recipe, re.MULTILINE)) == 3
        paths = re.findall(r"`((?:src|tests)/[\w/.]+)`", recipe)
        assert len(paths) >= 3
        assert [path for path in paths if not (ROOT / path).exists()] == []
