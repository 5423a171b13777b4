"""`chatmill rows`: which conversations a training step was made of, and what each of them cost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from chatmill.cli.options import AsJson, echo_json, tell_table
from chatmill.errors import ChatmillError, DataError, UsageError, one_line
from chatmill.show.dataset import open_view
from chatmill.show.row_view import preview
from chatmill.show.text import TokenText

if TYPE_CHECKING:
    from chatmill.train.metrics_log import RowsData
    from chatmill.train.step import RowLoss

RUNS = Path("checkpoints")
WORDS = 60


def rows(
    run: Annotated[
        Path | None,
        typer.Argument(
            metavar="[RUN]", help="The folder of a run; of those in checkpoints/ the newest.", show_default=False
        ),
    ] = None,
    step: Annotated[int, typer.Option(min=1, help="Which step.", show_default=False)] = ...,  # type: ignore[assignment]
    limit: Annotated[
        int | None, typer.Option("--limit", "-n", min=1, help="Conversations to list at most; all if left out.")
    ] = None,
    dataset: Annotated[
        Path | None, typer.Option(help="What it was trained on, if that was moved since.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Name the conversations of a training step by file and line, those with the highest loss first.

    Needs a run that was trained with --log_rows.

    \b
    Examples:
      chatmill rows --step 812
      chatmill rows checkpoints/my_sft_model --step 812 -n 5
      chatmill rows checkpoints/my_sft_model --step 812 --json
    """
    from chatmill.train.metrics_log import read_rows, rows_data

    folder = run or newest_run(RUNS)
    losses = sorted(read_rows(folder, step), key=lambda row: (-row.loss, row.episode, row.segment))
    episodes = StepEpisodes(rows_data(folder, step), dataset)
    weight = sum(row.weight for row in losses)
    mean = sum(row.loss * row.weight for row in losses) / weight if weight else 0.0
    listed = [(row, episodes.describe(row)) for row in losses[:limit]]
    if as_json:
        said = {"run": str(folder), "step": step, "loss": mean, "conversations": len(losses)}
        echo_json({**said, "rows": [{**row._asdict(), **about._asdict()} for row, about in listed]})
        return
    typer.echo(f"{folder}, step {step:,}: {len(losses):,} conversations, loss {mean:.4f}")
    _tell(listed)


class About(NamedTuple):
    """Where a conversation came from and how it begins."""

    place: str | None
    """file:line, if it is known."""
    text: str


class StepEpisodes:
    """The episodes that a step was trained on, by the numbers the run knows them by."""

    def __init__(self, data: RowsData, dataset: Path | None) -> None:
        from chatmill.load.config import LoadConfig
        from chatmill.load.plan import datasets_hash
        from chatmill.load.source import open_sources

        path = dataset or Path(data.dataset_dir)
        sources, _ = open_sources(path, LoadConfig(pad_token_id=0, mix_sft=data.mix_sft))
        if (found := datasets_hash(sources)) != data.dataset_sha256:
            raise DataError(
                f"{path}: is {found[:12]}…, the step was trained on {data.dataset_sha256[:12]}…; "
                "name that data with --dataset"
            )
        self._path, self._sources = path, sources
        self._texts = {source.path: _text(source.path) for source in sources}

    def describe(self, row: RowLoss) -> About:
        """Where a conversation came from and how it begins."""
        from chatmill.load.source import conversation

        found = conversation(self._sources, "train", row.episode, row.segment)
        if found is None:
            raise DataError(f"{self._path}: has no episode {row.episode}; the lines of the run are damaged")
        return About(found.place, preview(found.row, self._texts[found.source.path], WORDS))


def newest_run(folder: Path) -> Path:
    """The run that last wrote losses of conversations."""
    from chatmill.train.metrics_log import ROWS

    found = {path.parent.parent: path.stat().st_mtime_ns for path in folder.glob(f"*/{ROWS}/rank_00000.jsonl")}
    if not found:
        raise UsageError(f"{folder}: holds no run with losses of conversations; name a run, or train with --log_rows")
    return max(found, key=lambda run: (found[run], str(run)))


def _text(dataset: Path) -> TokenText:
    """What the tokens of a dataset stand for; ids where its tokenizer is not found."""
    try:
        return open_view(dataset).text
    except ChatmillError:
        return TokenText(None)


def _tell(listed: list[tuple[RowLoss, About]]) -> None:
    tell_table(
        ("loss", "episode", "from", ""),
        (),
        [(f"{row.loss:.4f}", str(row.episode), one_line(about.place or "-", 60), about.text) for row, about in listed],
    )
