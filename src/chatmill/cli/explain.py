"""`chatmill explain`: one token, and why it is trained or is not."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Annotated

import typer

from chatmill.cli.options import AsJson, DatasetOrCache, argument, echo_json
from chatmill.cli.show import ItsTokenizer, Split, warn_without_text
from chatmill.errors import UsageError, one_line
from chatmill.show.dataset import open_view
from chatmill.show.explain import explain_token


def explain(
    dataset: DatasetOrCache,
    token: Annotated[str, argument("EPISODE:TOKEN", "An episode, and a token of it, from 0.")],
    split: Split = None,
    tokenizer: ItsTokenizer = None,
    as_json: AsJson = False,
) -> None:
    """Say in one sentence what a token is, where it came from, and which rule decided whether it is trained.

    \b
    Examples:
      chatmill explain data/chat_sft 3:17
      chatmill explain data/chat_sft 3:17 --split val --json
    """
    numbers = re.fullmatch(r"(\d{1,18}):(\d{1,18})", token, re.ASCII)
    if numbers is None:
        raise UsageError(f'"{one_line(token)}" is no token; expected EPISODE:TOKEN, such as 3:17')
    view = open_view(dataset, tokenizer)
    explanation = explain_token(view, view.split_named(split)[0], int(numbers[1]), int(numbers[2]))
    if as_json:
        echo_json(asdict(explanation))
        return
    typer.echo(explanation.sentence)
    warn_without_text(view)
