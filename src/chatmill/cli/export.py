"""`chatmill export`: conversations and datasets for other tools."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from chatmill.cli.options import (
    DEFAULT_REJECTS,
    AddTokens,
    AsJson,
    Inputs,
    OnError,
    RejectsFile,
    Shape,
    TokenizerName,
    echo_json,
    progress,
    reading,
    tell_losses,
    tell_rejects,
)
from chatmill.errors import RecordError
from chatmill.fit.length_filter import turns_that_fit
from chatmill.format import TurnRenderer, load_format, transcript_turns
from chatmill.ledger import Ledger
from chatmill.records import Record
from chatmill.store.files import refuse_existing, writing
from chatmill.store.parquet import export_parquet
from chatmill.tokenizer import open_tokenizer

app = typer.Typer(help="Write conversations or datasets for other tools.", no_args_is_help=True, rich_markup_mode=None)
CHUNK = 1024


@app.callback()
def root() -> None:
    """Write conversations or datasets for other tools."""


@app.command("transcripts")
def transcripts(
    inputs: Inputs,
    output: Annotated[Path, typer.Option("--output", "-o", help="The text file to write, one conversation a line.")],
    context_length: Annotated[int, typer.Option(min=1, help="Tokens that a model's context holds.")],
    tokenizer: TokenizerName = "bytes",
    add_tokens: AddTokens = False,
    shape: Shape = None,
    on_error: OnError = "stop",
    rejects: RejectsFile = DEFAULT_REJECTS,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it is there.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write transcripts (<|USER|>…<|END|><|ASSISTANT|>…<|END|>), as long as a context can hold them.

    The first exchange must fit together with the system turn, each later one by itself; the first that does not
    fit ends the conversation. A line that holds line breaks or other control characters is written as a JSON
    string, so that reading the file with `--shape transcript` gives the same text again.

    \b
    Example:
      chatmill export transcripts data/conversations.jsonl -o chat.txt --context-length 512
    """
    refuse_existing(output, overwrite=overwrite)
    format = load_format("post-training")
    renderer = TurnRenderer(format, open_tokenizer(tokenizer, control=format.tokens, add_tokens=add_tokens))
    ledger = Ledger()
    with (
        reading(inputs, shape=shape, on_error=on_error, rejects=rejects, ledger=ledger) as (records, rejected),
        writing(output, overwrite=overwrite) as file,
    ):
        for line in _lines(progress(records, "records"), renderer, context_length, ledger):
            file.write(line.encode() + b"\n")
    ledger.check()
    _tell(output, ledger, as_json=as_json)
    tell_rejects(ledger, rejected)


@app.command("parquet")
def parquet(
    dataset: Annotated[Path, typer.Argument(metavar="DIR", help="A dataset.", show_default=False)],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="OUT", help="The folder to write.")],
    split: Annotated[
        list[str] | None, typer.Option(help="Only this split; may be given twice. Left out, all of them.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT if it is an export.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a dataset as Parquet for other trainers, with a dataset card.

    Columns are input_ids, labels (-100 where nothing is trained and at the first token of every conversation, not
    shifted), position_ids (from 0 in every conversation) and seq_lengths (of the conversations of a row).
    `datasets.load_dataset("OUT")` reads it.

    \b
    Examples:
      chatmill export parquet data/v1 -o data/v1-parquet
      chatmill export parquet data/v1 -o data/v1-train --split train --json
    """
    done = export_parquet(dataset, output, splits=split or (), overwrite=overwrite)
    if as_json:
        echo_json({"path": str(output), "splits": {name: asdict(counts) for name, counts in done.items()}})
        return
    for name, counts in done.items():
        share = counts.trained / counts.tokens if counts.tokens else 0
        typer.echo(
            f"{output}/{name}: {counts.rows:,} rows, {counts.tokens:,} tokens, {share:.1%} trained, "
            f"{counts.files:,} {'file' if counts.files == 1 else 'files'}"
        )
    if weighted := sum(counts.weighted for counts in done.values()):
        typer.echo(f"{weighted:,} trained tokens have a weight other than 1, which labels cannot say", err=True)


def _lines(records: Iterable[Record], renderer: TurnRenderer, context_length: int, ledger: Ledger) -> Iterator[str]:
    """The line of every conversation that is kept, whole or in part; all of them are counted."""
    stream = iter(records)
    while chunk := list(islice(stream, CHUNK)):
        rows = renderer.render(chunk)
        ledger.add("rendered", rows=len(rows), tokens=len(rows.ids))
        fitting = (column.tolist() for column in (*turns_that_fit(rows, context_length), rows.lengths))
        for record, count, stored, length in zip(chunk, *fitting, strict=True):
            try:
                turns = transcript_turns(record, renderer.format)
            except RecordError as fault:
                ledger.add("dropped", fault.kind, rows=1, tokens=length)
                continue
            if not count:
                answered = any(message.role == "assistant" for message in record.messages)
                ledger.add("dropped", "first_pair_over_context" if answered else "no_pair", rows=1, tokens=length)
                continue
            ledger.add("stored", rows=1, tokens=stored)
            if stored < length:
                ledger.add("truncated", "pair_over_context", tokens=length - stored)
            text = "".join(turns[:count])
            plain = text.isprintable() and all(message.complete for message in record.messages)
            yield text if plain else json.dumps(text, ensure_ascii=False)


def _tell(output: Path, ledger: Ledger, *, as_json: bool) -> None:
    if as_json:
        echo_json({"path": str(output), "ledger": ledger.to_json()})
        return
    stored = ledger.total("stored")
    typer.echo(f"{output}: {stored.rows:,} conversations, {stored.tokens:,} tokens")
    tell_losses(ledger)
