"""TensorBoard tracker, which writes event files to the run folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import indent
from typing import Any

from chatmill.errors import UsageError, one_line
from chatmill.store import files
from chatmill.train.trackers.interface import SampleAnswer, Status, TrackedRun, flat

FOLDER = "tensorboard"


class TensorBoardTracker:
    """Logs scalars and texts to TensorBoard. Files are not logged, because they are already in the run folder."""

    name = "tensorboard"
    _writer: Any

    def start(self, run: TrackedRun) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UsageError(
                f"tensorboard cannot be imported ({one_line(str(error), 200)}); reinstall tensorboard"
            ) from None
        files.make_folder(run.folder / FOLDER)
        # Make TensorBoard ignore values that were logged after the checkpoint from which the run resumes.
        self._writer = SummaryWriter(str(run.folder / FOLDER), purge_step=run.step + 1)
        self._add_text("config", json.dumps(flat(run.config), indent=1), run.step)

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def log_samples(self, step: int, samples: Sequence[SampleAnswer]) -> None:
        for number, sample in enumerate(samples, 1):
            parts = [f"{name}\n{text}" for name, text in sample._asdict().items()]
            self._add_text(f"samples/{number}", "\n\n".join(parts), step)
        self._writer.flush()

    def log_artifact(self, path: Path) -> None:
        pass

    def finish(self, status: Status) -> None:
        self._writer.close()

    def _add_text(self, tag: str, text: str, step: int) -> None:
        # TensorBoard renders texts as Markdown, which shows indented text verbatim.
        self._writer.add_text(tag, indent(text, "    ", lambda line: True), step)
