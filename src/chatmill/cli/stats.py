"""`chatmill stats`: what a dataset holds, in numbers."""

from __future__ import annotations

from typing import Annotated

import typer

from chatmill.cli.options import AsJson, DatasetOrCache, counting, echo_json, print_ledger, print_table, share
from chatmill.config import LONGEST
from chatmill.show.dataset import DatasetView, open_view
from chatmill.show.stats import BLOCK_SIZES, QUANTILES, SplitStats, split_stats
from chatmill.show.text import visible

BlockSizes = Annotated[
    list[int] | None,
    typer.Option(
        "--block-size",
        min=1,
        max=LONGEST,
        help="A block size that packing is tried at; may be given several times.",
        show_default=", ".join(map(str, BLOCK_SIZES)),
    ),
]


def stats(
    dataset: DatasetOrCache,
    split: Annotated[str | None, typer.Option(help="train or val; all of them if left out.")] = None,
    block_size: BlockSizes = None,
    as_json: AsJson = False,
) -> None:
    """Count a dataset: rows, tokens, what is trained by role and source, lengths, packing, and its ledger.

    The fill says how much of rows of that size is not padding: with one episode a row, and packed as the loader
    packs them. Episodes that are longer lose their beginning there.

    \b
    Examples:
      chatmill stats data/chat_sft
      chatmill stats data/chat_sft --split train --block-size 2048 --block-size 4096
      chatmill stats data/chat_sft --json
    """
    view = open_view(dataset)
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


def stats_of(view: DatasetView, split: str | None, block_sizes: tuple[int, ...]) -> list[SplitStats]:
    """The statistics of the split that is named, or of all that have an episode."""
    names = [split] if split is not None else [name for name in view.dataset.splits if len(view.dataset[name])]
    with counting("rows") as advance:
        return [split_stats(view.dataset[name], name, block_sizes=block_sizes, progress=advance) for name in names]


def _print_stats(stats: SplitStats) -> None:
    typer.echo(
        f"{stats.split}: {stats.rows:,} rows, {stats.segments:,} segments, {stats.tokens:,} tokens, "
        f"{stats.trained:,} trained ({stats.share:.1%})"
    )
    if stats.untrained_rows:
        typer.echo(f"look: {stats.untrained_rows:,} rows have no trained token")
    names = ("least", "5%", "25%", "median", "75%", "95%", "99%", "most")
    quantiles = ", ".join(f"{name} {stats.quantile(q):,}" for name, q in zip(names, QUANTILES, strict=True))
    typer.echo(f"tokens of a row: {quantiles}\n")
    for what, counts in (("role", stats.roles), ("source", stats.sources), ("rule", stats.rules)):
        print_table(
            (what.ljust(16),),
            ("tokens", "share", "trained", "of them"),
            [
                (
                    visible(name),
                    f"{count.tokens:,}",
                    share(count.tokens, stats.tokens, of_nothing="-"),
                    f"{count.trained:,}",
                    share(count.trained, count.tokens, of_nothing="-"),
                )
                for name, count in counts.items()
            ],
        )
        typer.echo()
    print_table(
        ("block size".ljust(16),),
        ("fill alone", "fill packed", "packed rows", "rows cut"),
        [
            (f"{fill.block_size:,}", f"{fill.alone:.1%}", f"{fill.packed:.1%}", f"{fill.rows:,}", f"{fill.cut:,}")
            for fill in stats.fills
        ],
    )
    typer.echo()
    print_table(
        ("longest rows".ljust(16), "place"),
        ("tokens", "trained"),
        [
            (
                f"{stats.split} {row.episode}",
                "-" if row.file is None else f"{visible(row.file, limit=200)}:{row.line}",
                f"{row.tokens:,}",
                share(row.trained, row.tokens, of_nothing="-"),
            )
            for row in stats.longest[:5]
        ],
    )
    typer.echo()
