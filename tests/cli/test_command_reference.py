from __future__ import annotations

import importlib.util
from dataclasses import fields
from pathlib import Path

import typer.main

from chatmill.cli.app import app_of
from chatmill.train.config import TrainConfig

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "commands.md"


def script():
    path = ROOT / "scripts" / "command_reference.py"
    spec = importlib.util.spec_from_file_location("command_reference", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def words(group, path=("chatmill",)):
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from words(command, (*path, name))
        else:
            yield " ".join((*path, name)), [flag for each in command.params for flag in each.opts if flag[:1] == "-"]


def test_the_committed_page_matches_the_help_of_the_commands():
    assert PAGE.read_text("utf-8") == script().page(), "run .venv/bin/python scripts/command_reference.py --write"


def test_no_command_and_no_flag_is_missing_from_the_page():
    sections = dict(part.split("\n", 1) for part in PAGE.read_text("utf-8").split("\n## ")[1:])
    commands = dict(words(typer.main.get_command(app_of())))
    keys = {f"--{each.name}" for each in fields(TrainConfig)}
    assert keys | {"--model_name", "--resume"} <= set(commands["chatmill train"])
    assert list(sections) == list(commands)
    missing = {f"{name} {flag}" for name, flags in commands.items() for flag in flags if flag not in sections[name]}
    assert missing == set()
    assert [
        name for name in commands if f"\n{name} " not in sections[name] and f"\n{name}\n" not in sections[name]
    ] == []
