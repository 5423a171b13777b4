"""`chatmill show` and `chatmill explain`: print episodes with their loss mask, and explain individual tokens."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import asdict
from itertools import chain, islice
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from chatmill.cli.guard import print_error
from chatmill.cli.options import (
    AsJson,
    DatasetOrCache,
    TokenDtype,
    argument,
    console_on_stdout,
    counted,
    counting,
    echo_json,
    echo_line,
)
from chatmill.cli.viewed import PreviewOptions, Viewed, open_data
from chatmill.errors import UsageError, one_line
from chatmill.records.shapes.decode import json_line
from chatmill.rows import Rows
from chatmill.show.dataset import DatasetView, open_view
from chatmill.show.explain import explain_token
from chatmill.show.row_view import place_name, preview, row_json, trained_tokens
from chatmill.show.terminal import conversation_lines, conversation_title, token_lines
from chatmill.show.text import find, locate

LISTED = 10

Split = Annotated[str | None, typer.Option(help="Split: train or val. Default: the first split that has episodes.")]
ItsTokenizer = Annotated[
    str | None,
    typer.Option(
        "--tokenizer",
        help="Tokenizer of the dataset, if it is not found in or next to the dataset or at its original path. For "
        "records: the tokenizer to render them with (default: bytes).",
    ),
]


def show(
    dataset: Viewed,
    episode: Annotated[
        int | None, typer.Argument(metavar="[EPISODE]", min=0, help="Episode, counted from 0. Default: list episodes.")
    ] = None,
    split: Split = None,
    search: Annotated[
        str | None, typer.Option(metavar="TEXT", help="List the episodes that contain this text, ignoring case.")
    ] = None,
    decode: Annotated[bool, typer.Option("--decode", help="Print one line per token: its id and text.")] = False,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="Maximum number of episodes to list.")] = LISTED,
    tokenizer: ItsTokenizer = None,
    *,
    preview: PreviewOptions,
    token_dtype: TokenDtype = None,
    as_json: AsJson = False,
) -> None:
    """Show an episode turn by turn: roles, text, loss mask, and what was truncated or injected.

    Without EPISODE, lists episodes. Trained text is colored, or in [brackets] if the output is piped; brackets in the
    text are then written as \\[ and \\]. Packed rows, blocks and rollout targets are shown as stored. Control
    characters, escape sequences and direction marks in texts are not sent to the terminal.

    \b
    Examples:
      chatmill show data/chat_sft
      chatmill show data/chat_sft 3
      chatmill show data/chat_sft 3 --decode
      chatmill show data/chat_sft --search "chemical symbol" --split val -n 5
      chatmill show data/chat_sft 3 --json
      chatmill show chat.jsonl 3 --tokenizer Qwen3-4B
    """
    if episode is not None and search is not None:
        raise UsageError("EPISODE and --search cannot be used together")
    if episode is None and decode:
        raise UsageError("--decode requires EPISODE")
    with open_data(dataset, tokenizer, preview, token_dtype=token_dtype) as opened:
        _show(opened.view, split, episode, search, limit, decode=decode, as_json=as_json)


def _show(
    view: DatasetView,
    split: str | None,
    episode: int | None,
    search: str | None,
    limit: int,
    *,
    decode: bool,
    as_json: bool,
) -> None:
    name, episodes = view.split_named(split)
    console = console_on_stdout(soft_wrap=True)
    warn_about(view)
    of = f"{counted(len(episodes), 'episode')} in {name}"
    if episode is not None:
        _show_one(view, name, episode, console, decode=decode, as_json=as_json)
        return
    if search is None:
        count = _list(view, name, range(min(limit, len(episodes))), None, console, as_json=as_json)
        summary = f"{count:,} of {of}"
    else:
        with counting("episodes") as advance:
            hits = find(episodes, view.text, search, progress=advance)
            count = _list(view, name, islice(hits, limit), search, console, as_json=as_json)
            has_more = next(hits, None) is not None
        summary = f"{count:,} of {of} match"
        if has_more:
            summary = f"stopped at --limit {limit:,}; more than {summary}"
    if not as_json:
        echo_line(summary if (format := view.format_name) is None else f"{summary}; format {format}")


def explain(
    dataset: DatasetOrCache,
    token: Annotated[str, argument("EPISODE:TOKEN", "Episode and token, both counted from 0.")],
    split: Split = None,
    tokenizer: ItsTokenizer = None,
    token_dtype: TokenDtype = None,
    as_json: AsJson = False,
) -> None:
    """Explain in one sentence what a token is, where it came from, and why it is trained or not.

    \b
    Examples:
      chatmill explain data/chat_sft 3:17
      chatmill explain data/chat_sft 3:17 --split val --json
    """
    numbers = re.fullmatch(r"(\d{1,18}):(\d{1,18})", token, re.ASCII)
    if numbers is None:
        raise UsageError(f'"{one_line(token)}" is not a token position; expected EPISODE:TOKEN, such as 3:17')
    view = open_view(dataset, tokenizer, token_dtype=token_dtype)
    explanation = explain_token(view, view.split_named(split)[0], int(numbers[1]), int(numbers[2]))
    if as_json:
        echo_json(asdict(explanation))
        return
    typer.echo(explanation.sentence)
    warn_about(view)


def warn_about(view: DatasetView) -> None:
    """Print the warnings about a dataset or preview on standard error."""
    if view.preview is not None:
        print_error(view.preview.note)
        for fault in view.preview.faults:
            print_error(fault)
    if view.without_text is not None:
        print_error(f"tokens are shown as ids: {view.without_text}")


def _show_one(view: DatasetView, split: str, episode: int, console: Console, *, decode: bool, as_json: bool) -> None:
    row = view.row(split, episode)
    if as_json:
        tokens = view.text.tokens(row.ids.tolist())
        sys.stdout.write(json_line({"split": split, "episode": episode, **row_json(row), "tokens": tokens}).decode())
        return
    if decode:
        lines = token_lines(row, view.text)
    else:
        lines = conversation_lines(row, view.text, plain=not _colours(console), unrolled=view.unrolled)
    _print(chain([conversation_title(row, split, episode, unrolled=view.unrolled)], lines), console)


def _list(
    view: DatasetView, split: str, numbers: Iterable[int], query: str | None, console: Console, *, as_json: bool
) -> int:
    count = 0
    for number in numbers:
        count += 1
        row = view.row(split, number)
        tokens, trained, place = len(row.ids), trained_tokens(row), place_name(row, unrolled=view.unrolled)
        text = _excerpt(view, row, query)
        if as_json:
            counts = {"split": split, "episode": number, "tokens": tokens, "trained": trained}
            sys.stdout.write(json_line({**counts, "place": place, "text": text.plain}).decode())
        else:
            share = trained / tokens if tokens else 0
            line = Text(f"{number:>7,}  {place}  {tokens:,} tokens, {share:.0%} trained  ")
            _print([line.append_text(text)], console)
    return count


def _excerpt(view: DatasetView, row: Rows, query: str | None) -> Text:
    """Return the beginning of the row, or the text around the first match of the query."""
    match = None if query is None else locate(row.ids.tolist(), view.text, query)
    if match is None:
        return Text(preview(row, view.text), style="dim")
    return Text(match.before, style="dim").append(match.match, style="bold yellow").append(match.after, style="dim")


def _colours(console: Console) -> bool:
    return console.is_terminal and console.color_system is not None and not console.no_color


def _print(lines: Iterable[Text], console: Console) -> None:
    """Print with rich if the console shows colors; otherwise write plain text, which is faster."""
    if _colours(console):
        for line in lines:
            console.print(line)
    else:
        sys.stdout.writelines(f"{line.plain}\n" for line in lines)
