"""The folder of a run: its config, its metrics line by line, its checkpoints, and its loss curve.

checkpoints/NAME/config.json  metrics.jsonl  loss.svg  rows/  step_00000500/

The training loop and the rollout loop begin, resume and write their runs with the same functions.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from chatmill.errors import UsageError
from chatmill.store import files
from chatmill.train import checkpoint as checkpoints
from chatmill.train.checkpoint import Checkpoint
from chatmill.train.distributed import World
from chatmill.train.metrics_log import (
    METRICS,
    ROWS,
    MetricsLog,
    RowsData,
    TensorBoardLog,
    read_metrics,
    rewind,
    rows_file,
    rows_line,
)
from chatmill.train.plot import loss_plot
from chatmill.train.progress import TrainProgress
from chatmill.train.step import RowLoss

CONFIG, PLOT = "config.json", "loss.svg"


def open_resumed(folder: Path, resume: str | None, world: World, *, otherwise: str) -> Checkpoint | None:
    """The checkpoint that a run resumes from; None for a new run, whose folder must not hold a run yet.

    `otherwise` is what the error suggests instead of `--resume auto`. All ranks call this.
    """

    def choose() -> Path | None:
        if resume is not None:
            return checkpoints.choose(folder, resume)
        if checkpoints.list_checkpoints(folder) or (folder / METRICS).exists():
            raise UsageError(f"{folder}: holds a run already; --resume auto goes on with it, or give {otherwise}")
        return None

    path = world.together(choose)
    return None if path is None else checkpoints.open_checkpoint(path, world)


def config_changes(checkpoint: Checkpoint, config: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """What differs in these keys between the config of a checkpoint and that of the run."""
    old, new = checkpoint.state["config"], json.loads(json.dumps(config))
    return [
        f"{name} was {json.dumps(old.get(name))}, now it is {json.dumps(new[name])}"
        for name in names
        if new[name] != old.get(name)
    ]


class RunDir:
    """The line logs and the progress of a run, written by rank 0; every rank writes its own rows."""

    def __init__(
        self,
        folder: Path,
        config: Mapping[str, Any],
        world: World,
        *,
        step: int,
        total: int,
        log_interval: int,
        quiet: bool = False,
        tensorboard: bool = False,
        rows: RowsData | None = None,
        rewinds: Mapping[str, int] | None = None,
    ) -> None:
        """Make the folder, or rewind it to `step`; all ranks call this.

        `rows` is the data of per-conversation losses, if they are logged; `rewinds` are further line logs, each with
        the last step that is kept.
        """
        self.folder, self._first = folder, world.is_first
        self._progress: TrainProgress | None = None
        self._metrics: list[MetricsLog | TensorBoardLog] = []
        self._rows: MetricsLog | None = None
        self._data = rows
        self.set_aside: list[Path] = []
        """Checkpoints later than `step`, under the names that they were given."""

        def begin() -> None:
            if tensorboard:
                # First: if it is not installed, nothing has been changed.
                self._metrics.append(TensorBoardLog(folder))
            files.make_folder(folder)
            checkpoints.clean(folder)
            self.set_aside = checkpoints.set_aside_later(folder, step)
            for path in [folder / METRICS, *(folder / ROWS).glob("rank_*.jsonl")]:
                rewind(path, step)
            for name, last in (rewinds or {}).items():
                rewind(folder / name, last)
            files.write_file(folder / CONFIG, (json.dumps(config, indent=1) + "\n").encode(), overwrite=True)
            if rows is not None:
                files.make_folder(folder / ROWS)
            self._metrics.append(MetricsLog(folder / METRICS))

        try:
            world.together(lambda: begin() if world.is_first else None)
            if rows is not None:
                self._rows = MetricsLog(rows_file(folder, world.rank))
        except BaseException:
            self.close()
            raise
        if world.is_first and not quiet:
            self._progress = TrainProgress(step, total, every=log_interval)

    def print(self, text: str) -> None:
        """Print a line on standard error."""
        if self._progress is not None:
            self._progress.say(text)

    def log(self, line: Mapping[str, Any]) -> None:
        """Add a line to the metrics."""
        for each in self._metrics:
            each.add(line)

    def log_rows(self, step: int, rows: Sequence[RowLoss] | None) -> None:
        """Add the losses of a step's conversations, if they are logged."""
        if self._rows is not None and self._data is not None:
            self._rows.add(rows_line(step, rows or [], self._data))

    def show_step(self, step: int, *, loss: float | None, seconds: float, tokens: float, trained: float) -> None:
        """Show the progress of a finished step."""
        if self._progress is not None:
            self._progress.step(step, loss=loss, seconds=seconds, tokens=tokens, trained=trained)

    def plot(self) -> None:
        """Draw the loss curve."""
        if self._first:
            picture = loss_plot(read_metrics(self.folder), title=self.folder.name)
            files.write_file(self.folder / PLOT, picture.encode(), overwrite=True)

    def close(self) -> None:
        for each in [*self._metrics, self._rows, self._progress]:
            if each is not None:
                each.close()
