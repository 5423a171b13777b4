"""`chatmill train`: the command of train.py under another name."""

from __future__ import annotations

import typer

from chatmill.cli.options import AsJson

CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""Every flag, --help included, is for the parser that both commands share."""


def train(context: typer.Context, as_json: AsJson = False) -> None:
    """Train a model on a dataset; `chatmill train --help` lists every flag.

    \b
    Examples:
      chatmill train --model_name mine --config_file configs/sft1/150M.json --dataset_dir data/chat_sft
      chatmill train --model_name mine --resume auto --json
    """
    from chatmill.train.command import main

    main([*context.args, *["--json"] * as_json], prog="chatmill train")
