"""`chatmill train`: the command of train.py under another name."""

from __future__ import annotations

import typer

CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""Every flag, --help included, is for the parser that both commands share."""


def train(context: typer.Context) -> None:
    """Train a model on a dataset; see `chatmill train --help` for its flags."""
    from chatmill.train.command import main

    main(context.args, prog="chatmill train")
