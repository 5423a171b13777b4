"""Report which chat format a command chose."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

import typer

from chatmill.errors import ChatmillError, one_line
from chatmill.format import TEMPLATE, has_template, resolve_format
from chatmill.remote.urls import Url, place

BYTES = "bytes"


def print_format(
    name: str | None, tokenizer: str, chat_template: str | None = None, *, is_default_tokenizer: bool = False
) -> None:
    """Print the chosen format on standard error, unless the user named the format or the tokenizer `bytes`. If the
    user named no tokenizer, also print a note about the default.
    """
    if name is None and (chat_template is not None or is_default_tokenizer or _is_model(tokenizer)):
        _print_choice(tokenizer, chat_template)
    if is_default_tokenizer and tokenizer == BYTES:
        print(
            f"note: no tokenizer was given, so {tokenizer} is used, with one token per byte; to use the tokenizer of a "
            "model, pass --tokenizer FOLDER",
            file=sys.stderr,
        )


def is_default(context: typer.Context, name: str) -> bool:
    """Whether the user left out an option."""
    source = context.get_parameter_source(name)
    return source is None or source.name != "COMMANDLINE"


def _print_choice(tokenizer: str, chat_template: str | None) -> None:
    # A folder that cannot be read is reported later, when it is opened.
    with suppress(ChatmillError):
        shown = one_line(str(place(tokenizer)), 300)
        chosen = resolve_format(None, tokenizer, chat_template=chat_template)
        if chosen == TEMPLATE:
            print(
                f"format: template, the chat template of {one_line(str(place(chat_template or tokenizer)), 300)}",
                file=sys.stderr,
            )
        elif Path(tokenizer).is_file() and has_template(str(Path(tokenizer).parent)):
            print(f"format: {chosen}, because {shown} is a file and not a model folder", file=sys.stderr)
            folder = one_line(str(Path(tokenizer).parent), 300)
            print(f"note: to use the chat template of {folder}, pass --tokenizer {folder}", file=sys.stderr)
        else:
            what = "the tokenizer bytes" if tokenizer == BYTES else shown
            print(f"format: {chosen}, because {what} has no chat template", file=sys.stderr)
            if tokenizer != BYTES and not Path(tokenizer).is_file():
                # A model folder usually has the chat template that the model was trained with.
                print(
                    "note: the rows may not match the format that the model was trained with; pass its chat template "
                    "with --chat-template FILE, or choose a format with --format",
                    file=sys.stderr,
                )


def _is_model(tokenizer: str) -> bool:
    """Whether the tokenizer is a URL, or a file or folder that exists."""
    if tokenizer == BYTES:
        return False
    path = place(tokenizer)
    return isinstance(path, Url) or path.exists()
