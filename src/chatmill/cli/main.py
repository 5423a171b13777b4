"""The command `chatmill`: it joins the commands of this folder, and reports errors in one line."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable
from importlib import import_module
from typing import Annotated, Any

import typer

from chatmill import __version__
from chatmill.cli.expand import expanded
from chatmill.cli.guard import guarded
from chatmill.errors import one_line

CLICK_ERROR: Any
[CLICK_ERROR] = (each for each in typer.BadParameter.__mro__ if each.__name__ == "ClickException")
"""click's, or typer's own copy of it."""

COMMANDS = {
    "check": "check.check",
    "render": "render.render_command",
    "formats": "formats.formats",
    "certify": "certify.certify_command",
    "compare": "compare.compare",
    "recipe": "recipe.app",
    "import": "import_config.app",
    "prepare": "prepare.prepare_command",
    "verify": "verify.verify",
    "reweigh": "reweigh.reweigh",
    "removed": "removed.removed",
    "clean": "clean.clean",
    "diff": "diff.diff",
    "order": "order.order",
    "show": "show.show",
    "explain": "show.explain",
    "stats": "stats.stats",
    "report": "stats.report",
    "view": "view.view",
    "doctor": "doctor.doctor",
    "train": "train.train",
    "chat": "chat.chat",
    "eval": "eval.eval_command",
    "merge": "merge.merge",
    "rows": "rows.rows_command",
    "build-sft-primer": "build.build_sft_primer",
    "build-sft-oasst1": "build.build_sft_oasst1",
    "build-sft-dolly15k": "build.build_sft_dolly15k",
    "audit": "audit.app",
    "tokenizer": "tokenizer.app",
    "export": "export.app",
    "rollout": "rollout.app",
}
"""The file of each command in this folder, and its name there."""


def app_of(names: Iterable[str] = COMMANDS) -> typer.Typer:
    """The application with these commands. Importing all of them takes most of a second, and a run needs one."""
    app = typer.Typer(
        name="chatmill",
        help="Conversations in, exact training batches out.",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )
    app.callback(invoke_without_command=True)(root)
    for name in names:
        file, attribute = COMMANDS[name].split(".")
        module = import_module(f"chatmill.cli.{file}")
        command = getattr(module, attribute)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(name, **getattr(module, "COMMAND", {}))(expanded(command))
    return app


def root(version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False) -> None:
    if version:
        typer.echo(f"chatmill {__version__}")
        raise typer.Exit


def main() -> None:
    """Run the command that sys.argv names."""
    named = sys.argv[1] if len(sys.argv) > 1 else ""
    only = () if named == "--version" else (named,) if named in COMMANDS else COMMANDS
    guarded(lambda: run(app_of(only)))


def run(app: typer.Typer) -> None:
    """Run the application; what is wrong with its arguments is printed without their control characters."""
    try:
        code = app(standalone_mode=False)
    except CLICK_ERROR as error:
        shown = io.StringIO()
        error.show(shown)
        sys.stderr.write(one_line(shown.getvalue(), None, keep="\n"))
        code = error.exit_code
    except typer.Abort:
        sys.stderr.write("Aborted!\n")
        code = 1
    sys.exit(code)
