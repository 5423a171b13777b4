"""What several commands share: their options, reading with rejects, and progress on standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from chatmill.errors import RecordError
from chatmill.ledger import Ledger
from chatmill.records import SHAPES, Record, Rejects, read_records

T = TypeVar("T")

Inputs = Annotated[
    list[str],
    typer.Argument(
        metavar="INPUT...", help="Files or globs: .jsonl .json .txt, each also .gz; .parquet.", show_default=False
    ),
]
Shape = Annotated[
    str | None,
    typer.Option(help=f"How the records look: {', '.join(SHAPES)}. Left out, it is told from the first records."),
]
OnError = Annotated[
    Literal["stop", "skip"],
    typer.Option(help="At a faulty record: stop with its line, or skip it and write it to the rejects."),
]
RejectsFile = Annotated[
    Path, typer.Option("--rejects", help="Where skipped records go, with their reasons. Only with --on-error skip.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
FormatName = Annotated[
    str,
    typer.Option(
        "--format",
        help="How conversations are written: a preset (see `chatmill formats`), a .toml file, or `template`.",
    ),
]
TokenizerName = Annotated[
    str,
    typer.Option(
        "--tokenizer",
        help="`bytes` (embedded), a tokenizer.json, a SentencePiece or tiktoken file, or a Hugging Face folder.",
    ),
]
ChatTemplate = Annotated[
    str | None,
    typer.Option(
        "--chat-template", metavar="FILE", help="With --format template: a Jinja file instead of the tokenizer's own."
    ),
]
TemplateArgs = Annotated[
    list[str] | None,
    typer.Option(
        "--template-arg",
        metavar="NAME=VALUE",
        help="What the template is given besides, such as enable_thinking=false.",
    ),
]
TemplateDate = Annotated[
    str | None,
    typer.Option(metavar="YYYY-MM-DD", help="The day that a template is told which asks for it. Today, if left out."),
]
MaskName = Annotated[
    Literal["derived", "tags"],
    typer.Option("--mask", help="With --format template: derive what is trained, or follow its generation tags."),
]
AddTokens = Annotated[
    bool, typer.Option("--add-tokens", help="Add the control tokens of the format that the tokenizer lacks.")
]
DEFAULT_REJECTS = Path("rejects.jsonl")


@contextmanager
def reading(
    inputs: list[str], *, shape: str | None, on_error: Literal["stop", "skip"], rejects: Path, ledger: Ledger
) -> Iterator[tuple[Iterator[Record], Rejects | None]]:
    """The records of the inputs, counted in the ledger; rejects go to their file if faults are skipped."""
    if on_error == "stop":
        yield _counted(read_records(inputs, shape=shape), ledger), None
        return
    with Rejects(rejects, inputs) as rejected:

        def reject(fault: RecordError) -> None:
            rejected(fault)
            ledger.add("read", rows=1)
            ledger.add("rejected", fault.kind, rows=1)

        yield _counted(read_records(inputs, shape=shape, on_error="skip", on_reject=reject), ledger), rejected


def _counted(records: Iterable[Record], ledger: Ledger) -> Iterator[Record]:
    for record in records:
        ledger.add("read", rows=1)
        yield record


def tell_rejects(ledger: Ledger, rejected: Rejects | None) -> None:
    """Say on standard error what was left out, why, and where it is."""
    if rejected is not None and (count := ledger.total("rejected").rows):
        reasons = ", ".join(f"{entry.rows} {reason}" for bucket, reason, entry in ledger if bucket == "rejected")
        typer.echo(f"rejected {count:,}: {reasons}; see {rejected.path}", err=True)


def tell_losses(ledger: Ledger, *, err: bool = False) -> None:
    """Say what was cut, dropped, repeated or deserves a look, a line for each reason."""
    for bucket, reason, entry in ledger:
        if bucket in ("repeated", "truncated", "dropped", "noted"):
            rows = f"{entry.rows:,} rows, " if entry.rows else ""
            typer.echo(f"  {bucket} {reason}: {rows}{entry.tokens:,} tokens", err=err)


def tell_ledger(ledger: Ledger) -> None:
    """Every bucket with its reason and counts, one below the other."""
    tell_table(
        ("", "reason"),
        ("rows", "tokens", "trained"),
        [
            (bucket, reason, f"{entry.rows:,}", f"{entry.tokens:,}", f"{entry.trained:,}")
            for bucket, reason, entry in ledger
        ],
    )


def tell_table(words: Sequence[str], numbers: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table of some columns of words and some of numbers; cells are text, whatever stands in them."""
    table = Table(*words, box=None, pad_edge=False, header_style="")
    for column in numbers:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*map(Text, row))
    Console(highlight=False).print(table)


def progress(things: Iterable[T], what: str) -> Iterator[T]:
    """The things themselves, counted on standard error where a person looks on."""
    with counting(what) as advance:
        for thing in things:
            yield thing
            advance(1)


@contextmanager
def counting(what: str) -> Iterator[Callable[[int], None]]:
    """What is told of so many things more, and counts them on standard error where a person looks on."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda count: None
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TextColumn("{task.completed:,}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda count: bar.advance(task, count)


def echo_json(value: Any) -> None:
    json.dump(value, sys.stdout, ensure_ascii=False)
    sys.stdout.write("\n")
