"""Report which chat format a command chose."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

from chatmill.errors import ChatmillError, one_line
from chatmill.format import TEMPLATE, has_template, resolve_format
from chatmill.remote.urls import Url, place


def print_format(name: str | None, tokenizer: str, chat_template: str | None = None) -> None:
    """Print the chosen format on standard error, unless the user named it or the tokenizer is `bytes`."""
    if name is not None or (chat_template is None and (tokenizer == "bytes" or not _exists(tokenizer))):
        return
    # A folder that cannot be read is reported later, when it is opened.
    with suppress(ChatmillError):
        shown = one_line(str(place(tokenizer)), 300)
        chosen = resolve_format(name, tokenizer, chat_template=chat_template)
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
            print(f"format: {chosen}, because {shown} has no chat template", file=sys.stderr)


def _exists(tokenizer: str) -> bool:
    path = place(tokenizer)
    return isinstance(path, Url) or path.exists()
