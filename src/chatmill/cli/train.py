"""`chatmill train`: the command of train.py under another name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import typer

from chatmill.cli.options import AsJson
from chatmill.errors import ChatmillError
from chatmill.show.dataset import open_view

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

    main([*context.args, *["--json"] * as_json], prog="chatmill train", words=_words)


def _words(dataset: Path) -> Callable[[Sequence[int]], str] | None:
    """How the tokens of a dataset read, if its tokenizer is found."""
    try:
        shown = open_view(dataset)
    except ChatmillError:
        # A run does not end for words that are only looked at; it says that they are not shown.
        return None
    return None if shown.without_text else shown.text.text
