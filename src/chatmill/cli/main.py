"""The command `chatmill`: one file a command; this one joins them and turns errors into one line."""

from __future__ import annotations

import os
import sys
import warnings
from typing import Annotated

import typer

from chatmill import __version__
from chatmill.cli import build, check, export, formats, render, reweigh, tokenizer, verify
from chatmill.errors import ChatmillError, one_line

app = typer.Typer(
    name="chatmill",
    help="Conversations in, exact training batches out.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
app.command("check")(check.check)
app.command("render")(render.render_command)
app.command("formats")(formats.formats)
app.command("verify")(verify.verify)
app.command("reweigh")(reweigh.reweigh)
app.command("build-sft-primer")(build.build_sft_primer)
app.command("build-sft-oasst1")(build.build_sft_oasst1)
app.command("build-sft-dolly15k")(build.build_sft_dolly15k)
app.add_typer(tokenizer.app, name="tokenizer")
app.add_typer(export.app, name="export")


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False) -> None:
    if version:
        typer.echo(f"chatmill {__version__}")
        raise typer.Exit


def main() -> None:
    """Run a command; what the user can mend is one line on standard error and exit code 1, or 2 for usage."""
    warnings.showwarning = _show_warning  # type: ignore[assignment]  # it takes what it is given and more
    try:
        app()
    except ChatmillError as error:
        fail(str(error), error.exit_code)
    except BrokenPipeError:
        # Whoever read our output has gone, which is not our fault and not worth a word.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except OSError as error:
        fail(f"{one_line(str(error.filename or 'input or output'))}: {error.strerror or error}", 1)
    except KeyboardInterrupt:
        fail("stopped", 130)


def fail(line: str, code: int) -> None:
    print(f"chatmill: {line}", file=sys.stderr)
    sys.exit(code)


def _show_warning(message: Warning | str, *_: object) -> None:
    print(f"chatmill: warning: {message}", file=sys.stderr)
