"""`chatmill recipe snippet`: sources for well-known data sets."""

from __future__ import annotations

from typing import Annotated

import typer

from chatmill.cli.options import AsJson, argument, echo_json
from chatmill.prepare.snippets import known_sets, snippet


def snippet_command(
    names: Annotated[list[str] | None, argument("[NAME]...", "Data sets; left out, all are listed.")] = None,
    as_json: AsJson = False,
) -> None:
    """Print a recipe of well-known data sets, with the shape and the columns of each.

    \b
    Examples:
      chatmill recipe snippet
      chatmill recipe snippet oasst dolly > recipe.yaml
    """
    if names:
        text = snippet(names)
        if as_json:
            echo_json({"names": names, "yaml": text})
        else:
            typer.echo(text, nl=False)
    elif as_json:
        echo_json(known_sets())
    else:
        for name, about in known_sets().items():
            typer.echo(f"{name:<12} {about}")
