from __future__ import annotations

import re
import shlex

import click
import pytest
import typer.main

from chatmill.cli.app import app_of

ROOT = typer.main.get_command(app_of())


def leaves(group, path=("chatmill",)):
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from leaves(command, (*path, name))
        else:
            yield (*path, name), command


COMMANDS = dict(leaves(ROOT))


def examples(command) -> list[str]:
    _, _, below = re.sub(r"\\\n\s*", "", command.help or "").partition("Example")
    return [each.strip() for each in below.splitlines()[1:] if each.strip().startswith("chatmill ")]


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_example_in_a_help_parses_and_one_uses_the_command_itself(path):
    found = [shlex.split(re.split(r"\s[|>]\s?", example)[0]) for example in examples(COMMANDS[path])]
    assert any(words[: len(path)] == list(path) for words in found)
    for words in found:
        command, at = ROOT, 1
        while hasattr(command, "commands"):
            command, at = command.commands[words[at]], at + 1
        try:
            command.make_context(" ".join(words[:at]), words[at:])
        except click.exceptions.ClickException as error:
            pytest.fail(f"{' '.join(words)}: {error.format_message()}")
