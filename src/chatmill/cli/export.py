"""`chatmill export`: write conversations and datasets for other tools."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from chatmill.cli.expand import expanded
from chatmill.cli.options import (
    AsJson,
    Dataset,
    TokenDtype,
    command_group,
    counted,
    echo_json,
    echo_line,
    print_losses,
    progress,
    share,
)
from chatmill.cli.record_options import AddTokens, Inputs, ReadOptions, TokenizerName, print_rejects
from chatmill.format import TurnRenderer, load_format
from chatmill.prepare.job import existing
from chatmill.prepare.transcripts import WEIGHTS_LEFT_OUT, transcript_lines
from chatmill.records.files import local_files
from chatmill.store.files import refuse_existing, writing
from chatmill.store.parquet import export_parquet
from chatmill.tokenizer import open_tokenizer

app = command_group("Export conversations or datasets for other tools.")


@app.command("transcripts")
@expanded
def transcripts(
    inputs: Inputs,
    output: Annotated[Path, typer.Option("--output", "-o", help="Text file to write, one conversation per line.")],
    context_length: Annotated[int, typer.Option(min=1, help="Context length of the model in tokens.")],
    *,
    tokenizer: TokenizerName = "bytes",
    add_tokens: AddTokens = False,
    read: ReadOptions,
    as_json: AsJson = False,
) -> None:
    """Write conversations as text transcripts (<|USER|>…<|END|><|ASSISTANT|>…<|END|>) that fit in a context length.

    Writes one conversation per line, each ending with <|EOS|>. The first exchange must fit in the context together with
    the system turn; each later exchange only has to fit on its own. A conversation is cut before the first exchange
    that does not fit. A conversation with line breaks or other control characters is written as a JSON string, so
    reading the file with `--shape transcript` gives the same text. Transcripts cannot store weights or train_ranges;
    the output reports how many conversations lose them. Records with weight 0 are dropped.

    \b
    Example:
      chatmill export transcripts data/conversations.jsonl -o chat.txt --context-length 512
    """
    reads = existing(tokenizer)
    refuse_existing(output, overwrite=read.overwrite, reads=[*local_files(inputs), *reads])
    format = load_format("post-training")
    renderer = TurnRenderer(format, open_tokenizer(tokenizer, control=format.tokens, add_tokens=add_tokens))
    with (
        read.records(inputs, reads=reads, output=output) as records,
        writing(output, overwrite=read.overwrite) as file,
    ):
        ledger = records.ledger
        for line in transcript_lines(progress(records, "records"), renderer, context_length, ledger):
            file.write(line.encode() + b"\n")
    ledger.check()
    if as_json:
        echo_json({"path": str(output), "ledger": ledger.to_json()})
    else:
        stored = ledger.total("stored")
        echo_line(f"{output}: {counted(stored.rows, 'conversation')}, {stored.tokens:,} tokens")
        print_losses(ledger)
        if weighted := ledger.entries.get(("noted", WEIGHTS_LEFT_OUT)):
            conversations = counted(weighted.rows, "conversation")
            typer.echo(
                f"note: the weights or train_ranges of {conversations} are left out, "
                "because transcripts cannot store them"
            )
    print_rejects(records)


@app.command("parquet")
def parquet(
    dataset: Dataset,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="OUT", help="Folder to write.")],
    split: Annotated[
        list[str] | None, typer.Option(help="Split to export; may be repeated. Default: all splits.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT if it is an earlier export.")] = False,
    token_dtype: TokenDtype = None,
    as_json: AsJson = False,
) -> None:
    """Write a dataset as Parquet files for other trainers, with a dataset card.

    The columns are input_ids, labels, position_ids and seq_lengths. Labels are not shifted; they are -100 for untrained
    tokens and for the first token of each conversation. Position ids start at 0 in each conversation. seq_lengths lists
    the lengths of the conversations in a row. Load the export with `datasets.load_dataset("OUT")`.

    \b
    Examples:
      chatmill export parquet data/v1 -o data/v1-parquet
      chatmill export parquet data/v1 -o data/v1-train --split train --json
    """
    done = export_parquet(dataset, output, splits=split or (), overwrite=overwrite, token_dtype=token_dtype)
    if as_json:
        echo_json({"path": str(output), "splits": {name: asdict(counts) for name, counts in done.items()}})
        return
    for name, counts in done.items():
        echo_line(
            f"{output}/{name}: {counted(counts.rows, 'row')}, {counts.tokens:,} tokens, "
            f"{share(counts.trained, counts.tokens)} trained, "
            f"{counted(counts.files, 'file')}"
        )
    if weighted := sum(counts.weighted for counts in done.values()):
        typer.echo(f"{weighted:,} trained tokens have a weight other than 1, which labels cannot represent", err=True)
