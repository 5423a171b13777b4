"""Build the Typer application `chatmill` from the commands in this folder."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib import import_module
from typing import Annotated, Any

import typer

from chatmill import __version__
from chatmill.cli.commands import ABOUT, COMMANDS
from chatmill.cli.expand import expanded
from chatmill.cli.guard import print_error

CLICK_ERROR: Any
[CLICK_ERROR] = (each for each in typer.BadParameter.__mro__ if each.__name__ == "ClickException")
"""`ClickException` from click, or from the copy of click inside typer."""


def app_of(names: Iterable[str] = COMMANDS) -> typer.Typer:
    """Build the application with the given commands. Importing all commands takes nearly a second, so the caller passes
    only the command to run.
    """
    app = typer.Typer(
        name="chatmill",
        help=ABOUT,
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )
    app.callback(invoke_without_command=True)(root)
    for name in names:
        file, attribute = COMMANDS[name][0].split(".")
        module = import_module(f"chatmill.cli.{file}")
        command = getattr(module, attribute)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(name, **getattr(module, "COMMAND", {}))(expanded(command))
    return app


def root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        typer.echo(f"chatmill {__version__}")
        raise typer.Exit


def run(app: typer.Typer) -> None:
    """Run the application, and print usage errors on one line that points to the command's `--help`.

    A command group without a command prints its whole help.
    """
    try:
        code = app(prog_name="chatmill", standalone_mode=False)
    except CLICK_ERROR as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show(sys.stderr)
        else:
            # Typer lists the choices of a missing option in several lines, and quotes pydantic's "Value error".
            message = error.format_message().replace("\n\t", " ").replace("Value error, ", "").rstrip(".")
            command = error.ctx.command_path if getattr(error, "ctx", None) else "chatmill"
            print_error(f"{message}; see {command} --help")
        code = error.exit_code
    except typer.Abort:
        sys.stderr.write("Aborted!\n")
        code = 1
    sys.exit(code)
