"""`chatmill show`: the episodes of a dataset in the terminal, what is trained in colour."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.text import Text

from chatmill.cli.options import AsJson, counting
from chatmill.errors import UsageError
from chatmill.records.shapes.decode import json_line
from chatmill.show.conversation import conversation_lines, place_name, title, token_lines
from chatmill.show.dataset import DatasetView, open_view, split_of
from chatmill.show.row_json import row_json
from chatmill.show.search import find, locate
from chatmill.show.turns import first_words

LISTED = 10

Dataset = Annotated[
    Path, typer.Argument(metavar="DIR", help="A dataset, or the cache of a source.", show_default=False)
]
Split = Annotated[str | None, typer.Option(help="train or val; the first that holds an episode if left out.")]
ItsTokenizer = Annotated[
    str | None,
    typer.Option(
        "--tokenizer", help="The tokenizer it was built with, if that lies neither in it, nor beside it, nor here."
    ),
]


def show(
    dataset: Dataset,
    episode: Annotated[
        int | None, typer.Argument(metavar="[EPISODE]", min=0, help="Its number. Left out, episodes are listed.")
    ] = None,
    split: Split = None,
    search: Annotated[
        str | None, typer.Option(metavar="TEXT", help="List the episodes that hold this text, whatever its case.")
    ] = None,
    decode: Annotated[
        bool, typer.Option("--decode", help="One line for each token: its id and what it stands for.")
    ] = False,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="Episodes that are listed at most.")] = LISTED,
    tokenizer: ItsTokenizer = None,
    as_json: AsJson = False,
) -> None:
    """Show an episode turn by turn: who speaks, what is trained, and what was cut or injected.

    Trained text is in colour, and where the output is piped in [brackets]; brackets of the text itself are then
    written \\[ and \\]. Packed rows, blocks and rollout targets are shown as they are stored. No control character,
    escape sequence or direction mark of a text reaches the terminal.

    \b
    Examples:
      chatmill show data/chat_sft
      chatmill show data/chat_sft 3
      chatmill show data/chat_sft 3 --decode
      chatmill show data/chat_sft --search "chemical symbol" --split val -n 5
      chatmill show data/chat_sft 3 --json
    """
    if episode is not None and search is not None:
        raise UsageError("an episode is named and a text to search for too; give one of them")
    if episode is None and decode:
        raise UsageError("--decode shows the tokens of one episode; name it")
    shown = open_view(dataset, tokenizer)
    name, episodes = split_of(shown, split)
    console = Console(highlight=False, soft_wrap=True)
    if shown.without_text is not None:
        typer.echo(f"chatmill: tokens are shown as ids: {shown.without_text}", err=True)
    if episode is not None:
        _show_one(shown, name, episode, console, decode=decode, as_json=as_json)
    elif search is None:
        count = _list(shown, name, range(min(limit, len(episodes))), None, console, as_json=as_json)
        if not as_json:
            typer.echo(f"{count:,} of {len(episodes):,} episodes of {name}")
    else:
        with counting("episodes") as advance:
            hits = islice(find(shown, name, search, progress=advance), limit + 1)
            count = _list(shown, name, hits, search, console, most=limit, as_json=as_json)
        if not as_json:
            of = f"{len(episodes):,} episodes of {name}"
            if count > limit:
                typer.echo(f"{limit:,} shown; more of {of} hold it")
            else:
                typer.echo(f"{count:,} of {of} hold it")


def _show_one(shown: DatasetView, split: str, episode: int, console: Console, *, decode: bool, as_json: bool) -> None:
    row = shown.row(split, episode)
    if as_json:
        said = {"split": split, "episode": episode, **row_json(row)}
        _write_json({**said, "tokens": shown.text.tokens(row.ids.tolist())})
        return
    _print([title(row, split, episode)], console)
    lines = token_lines(row, shown.text) if decode else conversation_lines(row, shown.text, plain=not _colours(console))
    _print(lines, console)


def _list(
    shown: DatasetView,
    split: str,
    numbers: Iterable[int],
    query: str | None,
    console: Console,
    *,
    most: int | None = None,
    as_json: bool,
) -> int:
    """One line for each episode, up to `most` of them; how many numbers there were."""
    count = 0
    for number in numbers:
        count += 1
        if most is not None and count > most:
            continue
        row = shown.row(split, number)
        trained = int(np.count_nonzero(row.mask()))
        place = place_name(row, 0) if len(row.origins) == 1 else f"{len(row.origins)} segments"
        words = _words(shown, row, query)
        if as_json:
            said: dict[str, Any] = {"split": split, "episode": number, "tokens": len(row.ids), "trained": trained}
            _write_json({**said, "place": place, "text": words.plain})
            continue
        share = trained / len(row.ids) if len(row.ids) else 0
        line = Text(f"{number:>7,}  {place}  {len(row.ids):,} tokens, {share:.0%} trained  ")
        _print([line.append_text(words)], console)
    return count


def _words(shown: DatasetView, row: Any, query: str | None) -> Text:
    """What a row is about, or where in it the text is that was searched for."""
    found = None if query is None else locate(row.ids.tolist(), shown.text, query)
    if found is not None:
        return Text(found.before, style="dim").append(found.found, style="bold yellow").append(found.after, style="dim")
    return Text(first_words(row, shown.text), style="dim")


def _colours(console: Console) -> bool:
    return console.is_terminal and console.color_system is not None and not console.no_color


def _print(lines: Iterable[Text], console: Console) -> None:
    """Lines for a person, in colour; for a pipe as they are, and quickly, however many there are."""
    if _colours(console):
        for line in lines:
            console.print(line)
    else:
        sys.stdout.writelines(_plain(lines))


def _plain(lines: Iterable[Text]) -> Iterator[str]:
    for line in lines:
        yield f"{line.plain}\n"


def _write_json(value: Any) -> None:
    sys.stdout.write(json_line(value).decode())
