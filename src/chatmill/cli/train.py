"""`chatmill train`: `train.py` as a subcommand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from chatmill.cli.expand import text_flags
from chatmill.cli.options import AsJson, echo_line, print_table
from chatmill.cli.report_page import report_page
from chatmill.cli.tokenizer_hash import tokenizer_sha256
from chatmill.remote.urls import Place
from chatmill.show.dataset import dataset_text
from chatmill.train.config import FIRST_FLAG, RunFlags, TrainConfig, with_bare_switches

if TYPE_CHECKING:
    from chatmill.train.fitting import Fit


class TrainCommand(TyperCommand):
    """A command whose boolean flags can be given without a value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, with_bare_switches(args))


COMMAND = {"cls": TrainCommand, "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True}}
"""Passes unknown flags to the command, which reports them in one line."""


def train(
    context: typer.Context,
    flags: Annotated[dict[str, str], text_flags(RunFlags, TrainConfig, first=FIRST_FLAG)],
    as_json: AsJson = False,
) -> None:
    """Train a model on a dataset, an SFT cache, or a mix of caches.

    Writes checkpoints and metrics to OUT_DIR/MODEL_NAME. Every key of a config file is also a flag, such as
    --batch_size 8 or --batch-size 8. Flags override the config file, which overrides chatmill.toml in the current
    folder. Values are JSON or plain text; a boolean flag without a value is true. `python train.py` is the same
    command.

    \b
    Examples:
      chatmill train --model_name mine --config_file configs/sft1/150M.json --dataset_dir data/chat_sft
      chatmill train --model_name mine --resume auto --json
      chatmill train --config_file configs/sft1/600M.json --vocab_size 151936 --estimate --gpu_memory 24
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
            report_page=report_page,
            print_fit=_print_fit,
        )


def _decoder(dataset: Place) -> Callable[[Sequence[int]], str] | None:
    """Return a function that decodes the token ids of a dataset, or None if its tokenizer is not available."""
    text = dataset_text(dataset)
    return None if text.tokenizer is None else text.text


def _print_fit(fit: Fit) -> None:
    from chatmill.train.fitting import FIT_COLUMNS

    print_table(FIT_COLUMNS[:1], FIT_COLUMNS[1:], fit.rows())
    for line in fit.notes():
        echo_line(line)
