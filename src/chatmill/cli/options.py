"""Command-line options, summaries and progress displays that several commands use."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer
from rich.console import Console
from rich.progress import Progress, ProgressColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text

from chatmill.errors import UsageError, one_line
from chatmill.ledger import OTHER_NAMES, UNREAD_KEY, Ledger
from chatmill.remote.urls import Place, Url, place

T = TypeVar("T")


def argument(metavar: str, help: str, parser: Callable[[str], Any] | None = None) -> Any:
    """Return a positional command-line argument; its help text does not show a default."""
    return typer.Argument(metavar=metavar, help=help, show_default=False, parser=parser)


def command_group(help: str) -> typer.Typer:
    return typer.Typer(help=help, no_args_is_help=True, rich_markup_mode=None)


def dataset_place(name: str) -> Place:
    """Parse a command-line argument that is the folder or URL of a dataset."""
    from chatmill.store.layout import METADATA

    where = place(name)
    if where.name == METADATA and not (isinstance(where, Path) and where.is_dir()):
        raise UsageError(f"{one_line(str(where), 1000)}: is a file inside a dataset; pass its folder, {where.parent}")
    return Url(where.address.rstrip("/")) if isinstance(where, Url) and where.is_folder else where


if TYPE_CHECKING:
    GivenPlace = Place
else:
    # typer does not support unions and shows the name of this class in the help; `dataset_place` creates the value.
    GivenPlace = type("path or URL", (), {})
Dataset = Annotated[GivenPlace, argument("DIR", "A dataset.", dataset_place)]
DatasetOrCache = Annotated[GivenPlace, argument("DIR", "Dataset, or the SFT cache of a source.", dataset_place)]
DatasetOrCaches = Annotated[GivenPlace, argument("DIR", "Dataset, SFT cache, or folder of caches.", dataset_place)]
DatasetFolder = Annotated[
    GivenPlace,
    typer.Option("--output", "-o", metavar="DIR", help="Folder or URL of the dataset.", parser=dataset_place),
]
TokenDtype = Annotated[
    Literal["uint16", "uint32"] | None,
    typer.Option(
        "--token-dtype", help="Token dtype of a dataset written by another program, if it cannot be detected."
    ),
]
Workers = Annotated[int | None, typer.Option(min=1, help="Number of worker processes. Default: one per core.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
OverwriteFile = Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")]


# Summaries.


def print_losses(ledger: Ledger, *, err: bool = False) -> None:
    """Print how many rows and tokens the ledger lists as repeated, truncated, dropped or noted, one line per reason."""
    for bucket, reason, entry in ledger:
        if reason.startswith(UNREAD_KEY):
            typer.echo(f"note: {unread_key(reason, entry.rows)}", err=err)
        elif bucket in ("repeated", "truncated", "dropped", "noted"):
            rows = f"{counted(entry.rows, 'row')}, " if entry.rows else ""
            typer.echo(f"  {bucket} {reason}: {rows}{entry.tokens:,} tokens", err=err)


def unread_key(reason: str, rows: int) -> str:
    if reason.endswith(OTHER_NAMES):
        return f"records have other keys that are not read ({rows:,} occurrences); these keys are not listed"
    noun = "record has" if rows == 1 else "records have"
    return f'{rows:,} {noun} the key "{reason.removeprefix(UNREAD_KEY)}", which is not read'


def print_ledger(ledger: Ledger) -> None:
    rows = [(bucket, reason, entry.rows, entry.tokens, entry.trained) for bucket, reason, entry in ledger]
    print_table(("", "reason"), ("rows", "tokens", "trained"), rows)


def print_table(texts: Sequence[str], numbers: Sequence[str], rows: Iterable[Sequence[str | int]]) -> None:
    """Print a table of text columns and right-aligned number columns. Long texts are wrapped, not truncated."""
    table = Table(*(Column(name, overflow="fold") for name in texts), box=None, pad_edge=False, header_style="")
    for column in numbers:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*(Text(f"{cell:,}" if isinstance(cell, int) else one_line(cell, None)) for cell in row))
    console_on_stdout().print(table)


def console_on_stdout(*, soft_wrap: bool = False) -> Console:
    """Return a console for styled text on standard output; callers must escape control characters."""
    output: Any = sys.stdout
    console = Console(file=getattr(output, "styled", output), highlight=False, soft_wrap=soft_wrap)
    if not console.is_terminal:
        console.file = output
    return console


def counted(number: int, noun: str) -> str:
    """Format a number with a noun, which is in the plural unless the number is 1.

    >>> counted(1, "record"), counted(2500, "record")
    ('1 record', '2,500 records')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def share(part: int, whole: int, *, of_nothing: str = "0.0%") -> str:
    return f"{part / whole:.1%}" if whole else of_nothing


def echo_line(line: str) -> None:
    """Print one line, with control characters escaped."""
    typer.echo(one_line(line, None))


def echo_json(value: Any) -> None:
    json.dump(value, sys.stdout, ensure_ascii=False)
    sys.stdout.write("\n")


# Progress.


def progress_on_stderr(*columns: ProgressColumn) -> Progress:
    """Return a progress display on standard error, hidden if standard error is not a terminal."""
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


@contextmanager
def counting(what: str) -> Iterator[Callable[[int], None]]:
    """Show a counter on standard error, and yield a function that increases the counter."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TextColumn("{task.completed:,}"), TimeElapsedColumn())
    with progress_on_stderr(*columns) as bar:
        task = bar.add_task(what, total=None)
        # Do not update a hidden display, because each update takes time.
        yield (lambda count: None) if bar.disable else (lambda count: bar.advance(task, count))


@contextmanager
def counting_after_fork(what: str) -> Iterator[Callable[[int], None]]:
    """Like `counting`, but start the display at the first count, because the display uses a thread, and worker
    processes must be forked before any thread starts.
    """
    with ExitStack() as display:
        add: Callable[[int], None] | None = None

        def count(number: int) -> None:
            nonlocal add
            add = add or display.enter_context(counting(what))
            add(number)

        yield count


def progress(items: Iterable[T], what: str) -> Iterator[T]:
    """Yield the items, and show on standard error how many items have been processed."""
    with counting(what) as advance:
        for item in items:
            yield item
            advance(1)
