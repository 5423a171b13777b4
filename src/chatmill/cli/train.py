"""`chatmill train`: the command of train.py, under the other commands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from chatmill.cli.expand import text_flags
from chatmill.cli.options import AsJson
from chatmill.cli.tokenizer_hash import tokenizer_sha256
from chatmill.show.dataset import dataset_text
from chatmill.train.config import FIRST_FLAG, RunFlags, TrainConfig, with_bare_switches


class TrainCommand(TyperCommand):
    """A command whose true-or-false flags may stand without a value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, with_bare_switches(args))


COMMAND = {"cls": TrainCommand, "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True}}
"""Unknown flags reach the command, so that their error is one line."""


def train(
    context: typer.Context,
    flags: Annotated[dict[str, str], text_flags(RunFlags, TrainConfig, first=FIRST_FLAG)],
    as_json: AsJson = False,
) -> None:
    """Train a model on a dataset, a cache, or a folder of caches that are mixed.

    `python train.py` is the same command. Every key of a config file is a flag, as --batch_size 8 or --batch-size 8.
    Flags override the config file, which overrides chatmill.toml in the current folder, the settings that caches are
    built with. Values are JSON or plain text, and a flag of a true-or-false key without a value is true.

    \b
    Examples:
      chatmill train --model_name mine --config_file configs/sft1/150M.json --dataset_dir data/chat_sft
      chatmill train --model_name mine --resume auto --json
    """
    from chatmill.train.command import errors_of_first_rank, run_and_print

    with errors_of_first_rank():
        run_and_print(
            flags,
            context.args,
            prog="chatmill train",
            as_json=as_json,
            open_text=_decoder,
            tokenizer_sha256=tokenizer_sha256,
        )


def _decoder(dataset: Path) -> Callable[[Sequence[int]], str] | None:
    """How to decode the tokens of a dataset, if its tokenizer is there; else sample answers are not shown."""
    text = dataset_text(dataset)
    return None if text.tokenizer is None else text.text
