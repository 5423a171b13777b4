from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import typer
from typer.testing import CliRunner

from chatmill.cli.expand import expanded, key_options, text_flags
from chatmill.config import Config, integer, key


@dataclass(frozen=True)
class Common:
    shape: Annotated[str | None, typer.Option(help="Shape of the records.")] = None
    limit: Annotated[int, typer.Option(help="At most.")] = 3


@dataclass(frozen=True, kw_only=True)
class Settings(Config):
    max_tokens: int | None = key(None, "longest row", integer(1))
    fit: Literal["turns", "tail"] = key("turns", "how rows are cut")
    dedupe: bool = key(False, "drop duplicates")
    template_args: tuple[str, ...] = key((), "variables", flag="--template-arg", metavar="NAME=VALUE")


def invoke(command, *args: str):
    app = typer.Typer(rich_markup_mode=None)
    app.command()(expanded(command))
    return CliRunner().invoke(app, args, env={"COLUMNS": "120"})


def test_a_dataclass_expands_to_its_fields():
    got: list[Any] = []

    def command(name: str, *, common: Common, loud: Annotated[bool, typer.Option("--loud")] = False) -> None:
        got.append((name, common, loud))

    assert invoke(command, "x").exit_code == 0
    assert invoke(command, "y", "--limit", "7", "--loud", "--shape", "tool").exit_code == 0
    assert got == [("x", Common(), False), ("y", Common("tool", 7), True)]
    assert "Shape of the records." in invoke(command, "--help").output


def test_keys_of_a_configuration_are_options_of_their_types():
    got: list[Any] = []

    def command(keys: Annotated[dict[str, Any], key_options(Settings)]) -> None:
        got.append(keys)

    assert invoke(command).exit_code == 0
    given = ["--max-tokens", "9", "--fit", "tail", "--dedupe", "--template-arg", "a=1", "--template-arg", "b=2"]
    assert invoke(command, *given).exit_code == 0
    assert got == [
        {"max_tokens": None, "fit": "turns", "dedupe": False, "template_args": ()},
        {"max_tokens": 9, "fit": "tail", "dedupe": True, "template_args": ("a=1", "b=2")},
    ]
    assert invoke(command, "--fit", "best").exit_code == 2
    assert invoke(command, "--max-tokens", "many").exit_code == 2


def test_flags_as_text_have_both_spellings_and_show_their_defaults():
    got: list[Any] = []

    def command(flags: Annotated[dict[str, str], text_flags(Settings)]) -> None:
        got.append(flags)

    assert invoke(command, "--max_tokens", "9", "--fit", "x").exit_code == 0
    assert invoke(command, "--max-tokens", "[1]").exit_code == 0
    assert got == [{"max_tokens": "9", "fit": "x"}, {"max_tokens": "[1]"}]
    help = invoke(command, "--help").output
    assert "--max_tokens, --max-tokens VALUE" in help
    assert 'how rows are cut  [default: "turns"]' in help


def test_a_command_without_groups_is_unchanged():
    def command(name: str) -> None: ...

    assert expanded(command) is command
