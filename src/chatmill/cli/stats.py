"""`chatmill stats`: what a dataset holds, in numbers."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from chatmill.cli.options import AsJson, counting, echo_json, tell_ledger, tell_table
from chatmill.cli.show import Dataset
from chatmill.config import LONGEST
from chatmill.show.dataset import DatasetView, open_view
from chatmill.show.stats import BLOCK_SIZES, QUANTILES, SplitStats, survey
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
    dataset: Dataset,
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
    shown = open_view(dataset)
    surveys = surveys_of(shown, split, tuple(block_size or BLOCK_SIZES))
    if as_json:
        ledger = None if shown.ledger is None else shown.ledger.to_json()
        splits = {each.split: survey_json(each) for each in surveys}
        echo_json({"path": str(dataset), "sha256": shown.dataset.sha256, "splits": splits, "ledger": ledger})
        return
    for each in surveys:
        _tell(each)
    if shown.ledger is not None:
        typer.echo("ledger")
        tell_ledger(shown.ledger)


def surveys_of(shown: DatasetView, split: str | None, block_sizes: tuple[int, ...]) -> list[SplitStats]:
    """A survey of the split that is named, or of all that hold an episode."""
    names = [split] if split is not None else [name for name in shown.dataset.splits if len(shown.dataset[name])]
    with counting("rows") as advance:
        return [survey(shown.dataset[name], name, block_sizes=block_sizes, progress=advance) for name in names]


def survey_json(found: SplitStats) -> dict[str, Any]:
    return {
        "rows": found.rows,
        "segments": found.segments,
        "tokens": found.tokens,
        "trained": found.trained,
        "trained_share": found.share,
        "untrained_rows": found.untrained_rows,
        **{
            table: {name: {"tokens": count.tokens, "trained": count.trained} for name, count in counts.items()}
            for table, counts in (("roles", found.roles), ("parts", found.parts), ("rules", found.rules))
        },
        "sources": {name: asdict(count) for name, count in found.sources.items()},
        "length_quantiles": {f"{share:g}": found.quantile(share) for share in QUANTILES},
        "longest": [asdict(row) for row in found.longest],
        "fill": [asdict(fill) for fill in found.fills],
    }


def _tell(found: SplitStats) -> None:
    typer.echo(
        f"{found.split}: {found.rows:,} rows, {found.segments:,} segments, {found.tokens:,} tokens, "
        f"{found.trained:,} trained ({found.share:.1%})"
    )
    if found.untrained_rows:
        typer.echo(f"look: {found.untrained_rows:,} rows have no trained token")
    names = ("least", "5%", "25%", "median", "75%", "95%", "99%", "most")
    quantiles = ", ".join(f"{name} {found.quantile(q):,}" for name, q in zip(names, QUANTILES, strict=True))
    typer.echo(f"tokens of a row: {quantiles}\n")
    for what, counts in (("role", found.roles), ("source", found.sources), ("rule", found.rules)):
        tell_table(
            (what.ljust(16),),
            ("tokens", "share", "trained", "of them"),
            [
                (
                    visible(name),
                    f"{count.tokens:,}",
                    _share(count.tokens, found.tokens),
                    f"{count.trained:,}",
                    _share(count.trained, count.tokens),
                )
                for name, count in counts.items()
            ],
        )
        typer.echo()
    tell_table(
        ("block size".ljust(16),),
        ("fill alone", "fill packed", "packed rows", "rows cut"),
        [
            (f"{fill.block_size:,}", f"{fill.alone:.1%}", f"{fill.packed:.1%}", f"{fill.rows:,}", f"{fill.cut:,}")
            for fill in found.fills
        ],
    )
    typer.echo()
    tell_table(
        ("longest rows".ljust(16), "place"),
        ("tokens", "trained"),
        [
            (
                f"{found.split} {row.episode}",
                "-" if row.file is None else f"{visible(row.file, limit=200)}:{row.line}",
                f"{row.tokens:,}",
                _share(row.trained, row.tokens),
            )
            for row in found.longest[:5]
        ],
    )
    typer.echo()


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"
