"""`chatmill stats` and `chatmill report`: statistics of a dataset in the terminal, or as an HTML page."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from chatmill import __version__
from chatmill.cli.options import (
    AsJson,
    DatasetOrCache,
    OverwriteFile,
    TokenDtype,
    counted,
    counting,
    echo_json,
    echo_line,
    print_ledger,
    print_table,
    share,
)
from chatmill.cli.show import ItsTokenizer, warn_about
from chatmill.cli.viewed import PreviewOptions, Viewed, open_data
from chatmill.config import LONGEST
from chatmill.errors import one_line
from chatmill.prepare.job import existing
from chatmill.show.dataset import DatasetView, open_view
from chatmill.show.report import BLOCK_SIZES as REPORT_BLOCK_SIZES
from chatmill.show.report import report_html
from chatmill.show.stats import BLOCK_SIZES, QUANTILES, SplitStats, split_stats
from chatmill.store.files import refuse_existing, write_file

BlockSizes = Annotated[
    list[int] | None,
    typer.Option(
        "--block-size",
        min=1,
        max=LONGEST,
        help="Block size to report packing for; may be repeated.",
        show_default=", ".join(map(str, BLOCK_SIZES)),
    ),
]


def stats(
    dataset: DatasetOrCache,
    split: Annotated[str | None, typer.Option(help="Split: train or val. Default: all.")] = None,
    block_size: BlockSizes = None,
    token_dtype: TokenDtype = None,
    as_json: AsJson = False,
) -> None:
    """Print statistics of a dataset: rows, tokens, trained tokens by role and source, lengths, packing, and the ledger.

    For each block size, `fill` is the share of tokens that are not padding, with one episode per row and with packing.
    Episodes that are too long for a row of this size are truncated at the start.

    \b
    Examples:
      chatmill stats data/chat_sft
      chatmill stats data/chat_sft --split train --block-size 2048 --block-size 4096
      chatmill stats data/chat_sft --json
    """
    view = open_view(dataset, token_dtype=token_dtype)
    splits = stats_of(view, split, tuple(block_size or BLOCK_SIZES))
    if as_json:
        ledger = None if view.ledger is None else view.ledger.to_json()
        counts = {each.split: each.to_json() for each in splits}
        echo_json({"path": str(dataset), "sha256": view.dataset.sha256, "splits": counts, "ledger": ledger})
        return
    for each in splits:
        _print_stats(each)
    if view.ledger is not None:
        typer.echo("ledger")
        print_ledger(view.ledger)


def report(
    dataset: Viewed,
    output: Annotated[Path, typer.Option("--output", "-o", help="HTML file to write.")] = Path("report.html"),
    overwrite: OverwriteFile = False,
    tokenizer: ItsTokenizer = None,
    *,
    preview: PreviewOptions,
    token_dtype: TokenDtype = None,
    as_json: AsJson = False,
) -> None:
    """Write an HTML report about a dataset: trained, truncated and dropped tokens, lengths, packing and samples.

    The page is a single file without scripts or external resources, and supports dark mode, printing and keyboard
    navigation. The same dataset always produces the same file.

    \b
    Examples:
      chatmill report data/chat_sft -o report.html
      chatmill report data/chat_sft --tokenizer tokenizer.json -o report.html --overwrite --json
      chatmill report recipe.yaml -o report.html
    """
    refuse_existing(output, overwrite=overwrite, reads=[dataset, *existing(tokenizer)])
    with open_data(dataset, tokenizer, preview, token_dtype=token_dtype) as opened:
        view = opened.view
        splits = stats_of(view, None, REPORT_BLOCK_SIZES)
        page = report_html(view, splits, version=__version__).encode()
    write_file(output, page, overwrite=overwrite)
    if as_json:
        episodes = {each.split: each.rows for each in splits}
        echo_json({"path": str(output), "bytes": len(page), "episodes": episodes, "sha256": view.dataset.sha256})
        return
    counts = ", ".join(f"{counted(each.rows, 'episode')} in {each.split}" for each in splits)
    echo_line(f"{output}: {len(page):,} bytes, {counts}")
    warn_about(view)


def stats_of(view: DatasetView, split: str | None, block_sizes: tuple[int, ...]) -> list[SplitStats]:
    """Return the statistics of one split or, if `split` is None, of all splits that are not empty."""
    names = [split] if split is not None else [name for name in view.dataset.splits if len(view.dataset[name])]
    with counting("rows") as advance:
        return [split_stats(view.dataset[name], name, block_sizes=block_sizes, progress=advance) for name in names]


def _print_stats(stats: SplitStats) -> None:
    typer.echo(
        f"{stats.split}: {counted(stats.rows, 'row')}, {counted(stats.segments, 'segment')}, {stats.tokens:,} tokens, "
        f"{stats.trained:,} trained ({stats.share:.1%})"
    )
    if stats.untrained_rows:
        typer.echo(f"note: {stats.untrained_rows:,} rows have no trained tokens")
    names = ("min", "5%", "25%", "median", "75%", "95%", "99%", "max")
    quantiles = ", ".join(f"{name} {stats.quantile(q):,}" for name, q in zip(names, QUANTILES, strict=True))
    typer.echo(f"tokens per row: {quantiles}\n")
    of = partial(share, of_nothing="-")
    for what, counts in (("role", stats.roles), ("source", stats.sources), ("rule", stats.rules)):
        rows = [
            (name, each.tokens, of(each.tokens, stats.tokens), each.trained, of(each.trained, each.tokens))
            for name, each in counts.items()
        ]
        print_table((what.ljust(16),), ("tokens", "share", "trained", "of them"), rows)
        typer.echo()
    fills = [(each.block_size, f"{each.alone:.1%}", f"{each.packed:.1%}", each.rows, each.cut) for each in stats.fills]
    print_table(("block size".ljust(16),), ("fill alone", "fill packed", "packed rows", "rows cut"), fills)
    typer.echo()
    longest = [
        (
            f"{stats.split} {row.episode}",
            "-" if row.file is None else f"{one_line(row.file, 200)}:{row.line}",
            row.tokens,
            of(row.trained, row.tokens),
        )
        for row in stats.longest[:5]
    ]
    print_table(("longest rows".ljust(16), "place"), ("tokens", "trained"), longest)
    typer.echo()
