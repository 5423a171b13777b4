"""`chatmill tokenizer`: train one on your conversations, or look at one."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Annotated

import typer

from chatmill.cli.expand import expanded
from chatmill.cli.options import AsJson, command_group, echo_json, echo_line, print_losses, progress
from chatmill.cli.record_options import AddTokens, Inputs, ReadOptions, print_rejects
from chatmill.errors import UsageError, one_line
from chatmill.format import load_format, record_texts
from chatmill.prepare.job import existing
from chatmill.records.files import local_files
from chatmill.store.files import refuse_existing, write_file
from chatmill.tokenizer import open_tokenizer, train_bpe

MOST_TOKENS = 2**24
"""More than any vocabulary has; the trainer allocates memory for all of --vocab-size."""

app = command_group("Train a tokenizer on your conversations, or look at one.")


@app.command("train")
@expanded
def train(
    inputs: Inputs,
    vocab_size: Annotated[
        int, typer.Option(max=MOST_TOKENS, help="Tokens in all: 256 bytes, the control tokens, and learned ones.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The tokenizer.json to write.")],
    *,
    format: Annotated[
        str, typer.Option(help="The format whose control tokens it gets: a preset, or a .toml file.")
    ] = "chatml",
    read: ReadOptions,
    as_json: AsJson = False,
) -> None:
    """Train a byte-level BPE on the texts of conversations, with the control tokens of a format.

    \b
    Example:
      chatmill tokenizer train data/conversations.jsonl --vocab-size 2000 -o tokenizer.json
    """
    reads = existing(format)
    refuse_existing(output, overwrite=read.overwrite, reads=[*local_files(inputs), *reads])
    control = load_format(format).tokens
    with read.records(inputs, reads=reads, output=output) as records:
        texts = chain.from_iterable(map(record_texts, progress(records, "records")))
        data = train_bpe(texts, vocab_size=vocab_size, control=list(control.values()))
        write_file(output, data, overwrite=read.overwrite)
    made = open_tokenizer(output, control=control)
    count = records.ledger.total("read").rows
    if as_json:
        echo_json({"path": str(output), "vocab_size": made.vocab_size, "sha256": made.sha256, "records": count})
    else:
        echo_line(f"{output}: {made.vocab_size:,} tokens, sha256 {made.sha256[:12]}…, from {count:,} records")
        if made.vocab_size < vocab_size:
            typer.echo(f"the texts gave no more than that; {vocab_size:,} were asked for")
    print_losses(records.ledger, err=True)
    print_rejects(records)


@app.command("info")
def info(
    tokenizer: Annotated[str, typer.Argument(help="As for --tokenizer of the other commands.")],
    format: Annotated[
        str | None,
        typer.Option("--format", help="A format whose control tokens it must have; without one, all that it has."),
    ] = None,
    add_tokens: AddTokens = False,
    as_json: AsJson = False,
) -> None:
    """Open a tokenizer and say what it is: size, hash, engine, and the control tokens of a format, or all it has.

    \b
    Examples:
      chatmill tokenizer info bytes
      chatmill tokenizer info tokenizer.json --format primer --add-tokens
    """
    if format is None and add_tokens:
        raise UsageError("--add-tokens without --format; name the format whose tokens are to be added")
    control = load_format(format).tokens if format is not None else {}
    opened = open_tokenizer(tokenizer, control=control, add_tokens=add_tokens)
    ids = opened.special_token_ids() if format is not None else dict(opened.control_ids)
    if as_json:
        about = {"name": opened.name, "vocab_size": opened.vocab_size, "sha256": opened.sha256}
        echo_json({**about, "engine": opened.engine, "special_token_ids": ids})
        return
    echo_line(f"{opened.name}: {opened.vocab_size:,} tokens, sha256 {opened.sha256}, encoded by {opened.engine}")
    for key, id in ids.items():
        typer.echo(f"  {key:<6} {id:>7}  {control[key]}" if format is not None else f"  {id:>7}  {one_line(key)}")
