"""`chatmill formats`: list the preset chat formats, or print one as TOML."""

from __future__ import annotations

from importlib import resources
from typing import Annotated

import typer

from chatmill.cli.options import AsJson, echo_json
from chatmill.errors import UsageError, one_line
from chatmill.format import PRESETS, load_format


def formats(
    name: Annotated[str | None, typer.Argument(help="Preset to print as TOML.", show_default=False)] = None,
    as_json: AsJson = False,
) -> None:
    """List the preset chat formats, or print one as TOML, as a starting point for your own format.

    \b
    Examples:
      chatmill formats
      chatmill formats chatml > mine.toml
    """
    if name is not None:
        if name not in PRESETS:
            raise UsageError(f'no preset "{one_line(name)}"; expected {", ".join(PRESETS)}')
        text = resources.files("chatmill.format").joinpath("presets", f"{name}.toml").read_text("utf-8")
        if as_json:
            echo_json({"name": name, "toml": text})
        else:
            typer.echo(text, nl=False)
        return
    presets = [load_format(preset) for preset in PRESETS]
    if as_json:
        echo_json([{"name": f.name, "tokens": dict(f.tokens), "trained": list(f.trained)} for f in presets])
        return
    for format in presets:
        typer.echo(f"{format.name:<14} {' '.join(format.tokens.values())}")
        typer.echo(f"{'':<14} trained in an assistant turn: {', '.join(format.trained)}")
    typer.echo(f"{'text':<14} plain text, or a prompt and its completion, without turns")
    typer.echo(f"{'template':<14} the chat template of the tokenizer folder")
