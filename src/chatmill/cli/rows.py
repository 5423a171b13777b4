"""`chatmill rows`: which conversations a training step was made of, and what each of them cost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import numpy as np
import typer

from chatmill.cli.options import AsJson, echo_json, tell_table
from chatmill.errors import ChatmillError, DataError, UsageError, one_line
from chatmill.rows import NO_FILE, Rows
from chatmill.show.dataset import open_shown
from chatmill.show.text import TokenText
from chatmill.show.turns import first_words

if TYPE_CHECKING:
    from chatmill.train.journal import RowsData
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
    from chatmill.train.journal import read_rows, rows_data

    folder = run or newest_run(RUNS)
    losses = sorted(read_rows(folder, step), key=lambda row: (-row.loss, row.episode))
    episodes = StepEpisodes(rows_data(folder, step), dataset)
    weight = sum(row.weight for row in losses)
    mean = sum(row.loss * row.weight for row in losses) / weight if weight else 0.0
    listed = [(row, episodes.describe(row.episode)) for row in losses[:limit]]
    if as_json:
        said = {"run": str(folder), "step": step, "loss": mean, "episodes": len(losses)}
        echo_json({**said, "rows": [{**row._asdict(), **about._asdict()} for row, about in listed]})
        return
    typer.echo(f"{folder}, step {step:,}: {len(losses):,} episodes, loss {mean:.4f}")
    _tell(listed)


class About(NamedTuple):
    """Where an episode came from and how it begins."""

    places: list[str]
    """file:line of each of its conversations, as far as they are known."""
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
        self._path = path
        self._episodes = [source.episodes("train") for source in sources]
        self._first = np.cumsum([0, *map(len, self._episodes)])
        self._texts = [_text(source.path) for source in sources]

    def describe(self, number: int) -> About:
        """An episode by its number over all sources."""
        if not 0 <= number < self._first[-1]:
            raise DataError(f"{self._path}: has no episode {number}; the lines of the run are damaged")
        source = int(np.searchsorted(self._first, number, side="right")) - 1
        row = self._episodes[source].rows([number - int(self._first[source])])
        return About(_places(row), first_words(row, self._texts[source], WORDS))


def newest_run(folder: Path) -> Path:
    """The run that last wrote losses of conversations."""
    from chatmill.train.journal import ROWS

    found = {path.parent.parent: path.stat().st_mtime_ns for path in folder.glob(f"*/{ROWS}/rank_00000.jsonl")}
    if not found:
        raise UsageError(f"{folder}: holds no run with losses of conversations; name a run, or train with --log_rows")
    return max(found, key=lambda run: (found[run], str(run)))


def _text(dataset: Path) -> TokenText:
    """What the tokens of a dataset stand for; ids where its tokenizer is not found."""
    try:
        return open_shown(dataset).text
    except ChatmillError:
        return TokenText(None)


def _places(row: Rows) -> list[str]:
    return [
        f"{row.files[origin['file']].path}:{int(origin['line'])}" for origin in row.origins if origin["file"] != NO_FILE
    ]


def _tell(listed: list[tuple[RowLoss, About]]) -> None:
    def place(about: About) -> str:
        more = f" and {len(about.places) - 1} more" if len(about.places) > 1 else ""
        return one_line(about.places[0], 60) + more if about.places else "-"

    tell_table(
        ("loss", "episode", "from", ""),
        (),
        [(f"{row.loss:.4f}", str(row.episode), place(about), about.text) for row, about in listed],
    )
