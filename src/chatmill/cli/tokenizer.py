"""`chatmill tokenizer`: train a tokenizer on conversations, or inspect one."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Annotated

import typer

from chatmill.cli.expand import expanded
from chatmill.cli.options import AsJson, command_group, counted, echo_json, echo_line, print_losses, progress
from chatmill.cli.record_options import AddTokens, Inputs, ReadOptions, print_rejects
from chatmill.errors import UsageError, one_line
from chatmill.format import load_format, record_texts
from chatmill.prepare.job import existing
from chatmill.records.files import local_files
from chatmill.store.files import refuse_existing, write_file
from chatmill.tokenizer import open_tokenizer, train_bpe

MOST_TOKENS = 2**24
"""Upper limit of --vocab-size, larger than any real vocabulary. Tokenizer training allocates memory for the whole
vocabulary."""

app = command_group("Train a tokenizer, or inspect one.")


@app.command("train")
@expanded
def train(
    inputs: Inputs,
    vocab_size: Annotated[
        int,
        typer.Option(max=MOST_TOKENS, help="Vocabulary size, including the 256 byte tokens and the control tokens."),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="tokenizer.json to write.")],
    *,
    format: Annotated[
        str, typer.Option(help="Chat format that defines the control tokens to add: a preset or a .toml file.")
    ] = "chatml",
    read: ReadOptions,
    as_json: AsJson = False,
) -> None:
    """Train a byte-level BPE tokenizer on conversations, with the control tokens of a chat format.

    Writes a tokenizer.json that `tokenizers` and transformers can load.

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
        echo_line(f"{output}: {made.vocab_size:,} tokens, sha256 {made.sha256[:12]}…, from {counted(count, 'record')}")
        if made.vocab_size < vocab_size:
            typer.echo(f"the texts are too short or too repetitive to learn {vocab_size:,} tokens")
    print_losses(records.ledger, err=True)
    print_rejects(records)


@app.command("info")
def info(
    tokenizer: Annotated[str, typer.Argument(help="Tokenizer, as in the --tokenizer option of other commands.")],
    format: Annotated[
        str | None,
        typer.Option(
            "--format", help="Chat format whose control tokens must be present. Default: list all control tokens."
        ),
    ] = None,
    add_tokens: AddTokens = False,
    as_json: AsJson = False,
) -> None:
    """Print the vocabulary size, hash, encoding engine and control tokens of a tokenizer.

    \b
    Examples:
      chatmill tokenizer info bytes
      chatmill tokenizer info tokenizer.json --format primer --add-tokens
    """
    if format is None and add_tokens:
        raise UsageError("--add-tokens requires --format, which determines the tokens to add")
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
