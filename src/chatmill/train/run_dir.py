"""The folder of a run: what it was started with, its metrics line by line, its progress, and its loss as a picture.

checkpoints/NAME/config.json  metrics.jsonl  loss.svg  rows/  step_00000500/
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from chatmill.store import files
from chatmill.train import checkpoint as checkpoints
from chatmill.train.evaluate import Evaluation
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
from chatmill.train.preflight import about_model
from chatmill.train.progress import TrainProgress
from chatmill.train.setup import RunState
from chatmill.train.step import RowLoss

CONFIG, PLOT = "config.json", "loss.svg"


class StepRecord(NamedTuple):
    """What one step was."""

    step: int
    """Steps of the run, this one included."""
    loss: float | None
    """The mean over the trained tokens of the global batch; None if there were none."""
    grad_norm: float
    lr: float
    tokens: int
    """Tokens that were read, without padding."""
    trained: int
    untrained_rows: int
    seconds: float
    """From the end of the step before to its own."""
    data_wait: float
    """Seconds in which its batch was waited for."""


class RunDir:
    """What rank 0 writes, and every rank of its own rows. Opened by all ranks together."""

    def __init__(self, folder: Path, dataset_dir: Path, opened: RunState, *, quiet: bool) -> None:
        self.folder, self._opened = folder, opened
        config, world = opened.config, opened.world
        self._first = world.is_first
        self._progress: TrainProgress | None = None
        self._metrics: list[MetricsLog | TensorBoardLog] = []
        self._rows: MetricsLog | None = None
        self._data = RowsData(str(dataset_dir), opened.stage.dataset_sha256, opened.loader.config.mix_sft)
        try:
            world.together(lambda: self._begin(dataset_dir) if self._first else None)
            if config.log_rows:
                self._rows = MetricsLog(rows_file(folder, world.rank))
        except BaseException:
            self.close()
            raise
        if self._first and not quiet:
            self._progress = TrainProgress(opened.step, opened.stage.stop, every=config.log_interval)
        for note in opened.notes:
            self.say(note)

    def _begin(self, dataset_dir: Path) -> None:
        """Make the folder as it was when the run stood where it goes on, and open what is written line by line."""
        opened, folder = self._opened, self.folder
        if opened.config.tensorboard:
            # First: where it is not installed, nothing was done.
            self._metrics.append(TensorBoardLog(folder))
        files.make_folder(folder)
        checkpoints.clean(folder)
        for left in checkpoints.leave_later(folder, opened.step):
            opened.notes.append(f"a later checkpoint stays as {left}; it is not used any more")
        for path in [folder / METRICS, *(folder / ROWS).glob("rank_*.jsonl")]:
            rewind(path, opened.step)
        said = {**opened.config.to_json(), "dataset_dir": str(dataset_dir)}
        files.write_file(folder / CONFIG, (json.dumps(said, indent=1) + "\n").encode(), overwrite=True)
        if opened.config.log_rows:
            files.make_folder(folder / ROWS)
        self._metrics.append(MetricsLog(folder / METRICS))

    def say(self, text: str) -> None:
        """A line for who looks on."""
        if self._progress is not None:
            self._progress.say(text)

    def step(self, step: StepRecord, rows: list[RowLoss] | None) -> None:
        self._measure(
            {
                **step._asdict(),
                "tokens_per_second": step.tokens / step.seconds,
                "trained_per_second": step.trained / step.seconds,
            }
        )
        if self._rows is not None:
            self._rows.add(rows_line(step.step, rows or [], self._data))
        if self._progress is not None:
            self._progress.step(
                step.step, loss=step.loss, seconds=step.seconds, tokens=step.tokens, trained=step.trained
            )

    def skipped(self, step: int, *, untrained_rows: int) -> None:
        """Tell of a step that had nothing to train."""
        self._measure({"step": step, "skipped": 1, "untrained_rows": untrained_rows})

    def evaluation(self, step: int, found: Evaluation, more: Mapping[str, float], shown: Sequence[str]) -> None:
        """Tell of an evaluation, with what was found besides it and lines to be shown below it."""
        said = {"val_loss": found.loss, "val_perplexity": found.perplexity, "val_trained": found.trained}
        self._measure({"step": step, **said, **more})
        rest = "".join(f", {name} {value:.4g}" for name, value in more.items())
        self.say("\n".join([f"step {step:,}: {found}{rest}", *shown]))

    def save(self) -> None:
        """Write a checkpoint; all ranks call this."""
        opened, config = self._opened, self._opened.config
        sharded = config.checkpoint == "sharded"
        # Ranks that write their shards meet for a whole model only once.
        usable = not sharded or opened.step == opened.stage.stop
        opened.saved = checkpoints.save(
            self.folder,
            opened.state(),
            opened.stepper.model,
            opened.stepper.optimizer,
            opened.world,
            sharded=sharded,
            keep=config.keep_checkpoints,
            about=about_model(opened.loader, step=opened.step) if usable else None,
        )

    def plot(self) -> None:
        """Draw the loss."""
        if self._first:
            picture = loss_plot(read_metrics(self.folder), title=self.folder.name)
            files.write_file(self.folder / PLOT, picture.encode(), overwrite=True)

    def close(self) -> None:
        for each in [*self._metrics, self._rows, self._progress]:
            if each is not None:
                each.close()

    def _measure(self, line: Mapping[str, Any]) -> None:
        for each in self._metrics:
            each.add(line)
