"""Entry point of `chatmill`."""

from __future__ import annotations

import sys

from chatmill.cli.commands import COMMANDS, help_text
from chatmill.cli.guard import guarded


def main() -> None:
    guarded(_run)


def _run() -> None:
    named = sys.argv[1] if len(sys.argv) > 1 else ""
    if named in ("", "-h", "--help"):
        # Print the help without importing typer and all commands, which would take a second.
        (sys.stdout if named else sys.stderr).write(help_text())
        sys.exit(0 if named else 2)
    from chatmill.cli.app import app_of, run

    run(app_of([named] if named in COMMANDS else []))
