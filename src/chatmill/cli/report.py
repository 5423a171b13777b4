"""`chatmill report`: a page about a dataset, to open, print or send."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from chatmill import __version__
from chatmill.cli.options import AsJson, DatasetOrCache, echo_json
from chatmill.cli.show import ItsTokenizer, warn_without_text
from chatmill.cli.stats import stats_of
from chatmill.show.dataset import open_view
from chatmill.show.report import BLOCK_SIZES, report_html
from chatmill.store.files import refuse_existing, write_file


def report(
    dataset: DatasetOrCache,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file of the page.")] = Path("report.html"),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it is there.")] = False,
    tokenizer: ItsTokenizer = None,
    as_json: AsJson = False,
) -> None:
    """Write one self-contained page: lengths, what is trained, what was lost and why, packing, sources, samples.

    It loads nothing and runs nothing, reads well in the dark, on paper and by keyboard, and the same dataset always
    gives the same bytes.

    \b
    Examples:
      chatmill report data/chat_sft -o report.html
      chatmill report data/chat_sft --tokenizer tokenizer.json -o report.html --overwrite --json
    """
    view = open_view(dataset, tokenizer)
    refuse_existing(output, overwrite=overwrite)
    splits = stats_of(view, None, BLOCK_SIZES)
    page = report_html(view, splits, version=__version__).encode()
    write_file(output, page, overwrite=overwrite)
    if as_json:
        episodes = {each.split: each.rows for each in splits}
        echo_json({"path": str(output), "bytes": len(page), "episodes": episodes, "sha256": view.dataset.sha256})
        return
    counts = ", ".join(f"{each.rows:,} episodes of {each.split}" for each in splits)
    typer.echo(f"{output}: {len(page):,} bytes, {counts}")
    warn_without_text(view)
