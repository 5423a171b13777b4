"""`chatmill recipe snippet`: recipe sources for well-known datasets."""

from __future__ import annotations

from typing import Annotated

import typer

from chatmill.cli.options import AsJson, argument, echo_json
from chatmill.prepare.snippets import known_sets, snippet


def snippet_command(
    names: Annotated[list[str] | None, argument("[NAME]...", "Datasets. Default: list all datasets.")] = None,
    as_json: AsJson = False,
) -> None:
    """Print recipe sources for well-known datasets, with the shape and columns of each.

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
