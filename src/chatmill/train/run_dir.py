"""The folder of a run: its config, metrics, checkpoints and loss curve.

checkpoints/NAME/config.json  metrics.jsonl  loss.svg  rows/  trackers.json  step_00000500/

The training loop and the rollout loop share these functions. Each log line is a JSON object with the key `step`. A
resumed run first removes the log lines of all steps after its checkpoint.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from chatmill import __version__
from chatmill.errors import DataError, UsageError, one_line
from chatmill.plain_file import check_plain, open_plain
from chatmill.store import files
from chatmill.train import checkpoint as checkpoints
from chatmill.train.checkpoint import Checkpoint
from chatmill.train.checkpoint_files import list_checkpoints
from chatmill.train.distributed import World
from chatmill.train.plot import loss_plot
from chatmill.train.progress import TrainProgress
from chatmill.train.step import RowLoss
from chatmill.train.trackers.interface import SampleAnswer, Status, TrackedRun, Tracker
from chatmill.train.trackers.reporter import IDS, TRACKERS, Reporter

CONFIG, PLOT = "config.json", "loss.svg"
FIRST_BATCH = "first_batch.json"
METRICS = "metrics.jsonl"
ROWS = "rows"
"""Name of the folder that contains the loss of each conversation, in one file per rank."""
REPORTS = "reports"
"""Name of the folder that contains HTML reports on the dataset, which are also logged to the trackers."""
WRITTEN = (CONFIG, FIRST_BATCH, METRICS, PLOT, ROWS, REPORTS, IDS, *TRACKERS)
"""Names of the files and folders that a run writes in addition to checkpoints."""
COLUMNS = ("episodes", "segments", "losses", "weights")
"""Keys of a log line, one for each field of `RowLoss`. Each value is a list with one entry per conversation."""


def open_resumed(
    folder: Path, resume: str | None, world: World, *, otherwise: str, logs: Sequence[str] = ()
) -> Checkpoint | None:
    """Open the checkpoint from which a run resumes, or return None for a new run. Raise `UsageError` if the folder of a
    new run already contains a run.

    If the folder cannot be used, the error message ends with the advice `otherwise`. `logs` are the names of additional
    log files that the run writes. All ranks must call this function.
    """

    def choose() -> Path | None:
        written = [name for name in (CONFIG, METRICS, PLOT, ROWS, *logs) if (folder / name).exists()]
        if written and not _is_run_config(folder / CONFIG):
            # The existing files belong to something other than a run, such as a model, and a run would overwrite them.
            raise UsageError(f"{folder}: contains {', '.join(written)}, but is not a run folder; use {otherwise}")
        if resume is not None:
            return checkpoints.choose(folder, resume)
        if list_checkpoints(folder) or written:
            raise UsageError(f"{folder}: already contains a run; continue it with --resume auto, or use {otherwise}")
        return None

    path = world.together(choose)
    return None if path is None else checkpoints.open_checkpoint(path, world)


def _is_run_config(path: Path) -> bool:
    """Return whether a file is the config.json of a training run, and not, for example, the config.json of a model."""
    try:
        config = json.loads(path.read_bytes())
    except (FileNotFoundError, IsADirectoryError, ValueError, RecursionError):
        return False
    return isinstance(config, dict) and "max_iters" in config


LATER_KEYS = {"quantize": "none"}
"""Maps config keys that checkpoints of earlier versions lack to the values that these versions used."""


def config_changes(checkpoint: Checkpoint, config: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Return one message for each config key in `names` whose value differs between a checkpoint and the current run.
    Skip keys that the checkpoint lacks.
    """
    old, new = {**LATER_KEYS, **checkpoint.state.get("config", {})}, json.loads(json.dumps(config))
    return [
        f"{name} was {one_line(json.dumps(old.get(name)))}, but is now {one_line(json.dumps(new[name]))}"
        for name in names
        if new[name] != old.get(name, new[name])
    ]


class RunDir:
    """Writes the logs of a training run and shows its progress. Rank 0 writes all logs except the losses of
    conversations, which every rank writes for its own rows.
    """

    def __init__(
        self,
        folder: Path,
        config: Mapping[str, Any],
        world: World,
        *,
        step: int,
        total: int,
        quiet: bool = False,
        rows: RowsData | None = None,
        rewinds: Mapping[str, int] | None = None,
        trackers: Sequence[Tracker] = (),
        data: Mapping[str, Any] | None = None,
    ) -> None:
        """Create the run folder or, for a resumed run, remove the log lines after `step`. All ranks must create a
        `RunDir`.

        `config` is the config of the run. `rows` identifies the dataset if the loss of each conversation is logged.
        `rewinds` maps the names of additional log files to the last step to keep. `data` is a description of the
        dataset that the `trackers` receive together with the config.
        """
        self.folder, self._first = folder, world.is_first
        self._progress: TrainProgress | None = None
        self._metrics: MetricsLog | None = None
        self._reporter: Reporter | None = None
        self._status: Status = "failed"
        self._rows: MetricsLog | None = None
        self._data = rows
        self.set_aside: list[Path] = []
        """New paths of the checkpoints after `step`, which are renamed when the run resumes."""
        self._new_folders: list[Path] | None = None
        """The folders that were created for a new run, innermost first; None for a resumed run."""

        def begin() -> None:
            if not any(os.path.lexists(folder / name) for name in WRITTEN):
                self._new_folders = files.missing_folders(folder)
            if trackers:
                # Start trackers before changing any files, because a tracker may raise an error.
                about = {**config, **(data or {}), "world_size": world.size, "chatmill_version": __version__}
                self._reporter = Reporter(trackers, TrackedRun(folder.name, folder, about, step, None))
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
            self._metrics = MetricsLog(folder / METRICS)
            if self._reporter is not None:
                self._reporter.keep_ids()

        try:
            world.together(lambda: begin() if world.is_first else None)
            if rows is not None:
                self._rows = MetricsLog(folder / ROWS / f"rank_{world.rank:05d}.jsonl")
        except BaseException:
            self.discard()
            raise
        if world.is_first and not quiet:
            self._progress = TrainProgress(step, total, every=config["log_interval"])

    def print(self, text: str) -> None:
        """Print a line to stderr, above the progress bar."""
        if self._progress is not None:
            self._progress.say(text)

    def log(self, line: Mapping[str, Any]) -> None:
        """Append a line to metrics.jsonl, and log its values to the trackers."""
        if self._metrics is not None:
            self._metrics.add(line)
        if self._reporter is not None:
            self._reporter.log(line)
            self._print_notes(self._reporter)

    @property
    def is_tracked(self) -> bool:
        return self._reporter is not None

    def log_samples(self, step: int, samples: Sequence[SampleAnswer]) -> None:
        if self._reporter is not None and samples:
            self._reporter.log_samples(step, samples)

    def log_page(self, name: str, page: str) -> None:
        """Write an HTML report on the dataset, and log the file to the trackers."""
        path = self.folder / REPORTS / name
        files.make_folder(path.parent)
        files.write_file(path, page.encode(), overwrite=True)
        if self._reporter is not None:
            self._reporter.log_artifact(path)

    def _print_notes(self, reporter: Reporter) -> None:
        for note in reporter.take_notes():
            self.print(note)

    def log_rows(self, step: int, rows: Sequence[RowLoss] | None) -> None:
        """Log the loss of each conversation in a step, if the config enables `log_rows`."""
        if self._rows is not None and self._data is not None:
            # Store columns instead of rows, which makes the lines shorter.
            columns = zip(*rows, strict=True) if rows else ((),) * len(COLUMNS)
            self._rows.add({"step": step, "data": self._data._asdict(), **dict(zip(COLUMNS, columns, strict=True))})

    def show_step(self, step: int, **values: Any) -> None:
        if self._progress is not None:
            self._progress.step(step, **values)

    def plot(self) -> None:
        if self._first:
            picture = loss_plot(read_metrics(self.folder), title=self.folder.name)
            files.write_file(self.folder / PLOT, picture.encode(), overwrite=True)

    def end(self, status: Status) -> None:
        """Set the final status that is reported to the trackers; without a call to `end`, the status is `failed`."""
        self._status = status

    def close(self) -> None:
        """Log the config, metrics and loss curve to the trackers, and close all log files."""
        for each in (self._metrics, self._rows):
            if each is not None:
                each.close()
        reporter, self._reporter = self._reporter, None
        if reporter is not None:
            for path in (self.folder / name for name in (CONFIG, METRICS, PLOT)):
                if path.is_file():
                    reporter.log_artifact(path)
            reporter.finish(self._status)
            self._print_notes(reporter)
        if self._progress is not None:
            self._progress.close()

    def discard(self) -> None:
        """Close the log files of a run that failed before training; if the run is new, also remove its files."""
        self.close()
        if self._new_folders is not None:
            written = [self.folder / name for name in WRITTEN]
            # Remove innermost folders first, because only empty folders can be removed.
            within = [path for folder in written for path in sorted(folder.rglob("*"), reverse=True)]
            files.remove_all([*within, *written, *self._new_folders])


# Line logs.


class MetricsLog:
    def __init__(self, path: Path) -> None:
        if path.exists():
            check_plain(path)
        self._file = path.open("ab")

    def add(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def rewind(path: Path, step: int) -> None:
    """Remove the lines of all steps after `step`, and an incomplete last line, from a log file."""
    if path.exists():
        kept = [line.raw for line in _lines(path) if line.read()["step"] <= step]
        files.write_file(path, b"".join(kept), overwrite=True)


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics.jsonl as dicts, in file order."""
    return [line.read() for line in _lines(folder / METRICS)]


class RowsData(NamedTuple):
    """Identifies the dataset that the episode ids of a log line refer to. Each log line identifies its dataset, because
    a run can resume with a different dataset.
    """

    dataset_dir: str
    dataset_sha256: str
    mix_sft: Mapping[str, float] | None


def read_rows(folder: Path, step: int) -> list[RowLoss]:
    """Return the loss of each conversation in a step; raise `DataError` if the run did not log these losses."""
    return [row for _, rows in _of_step(folder, step) for row in rows]


def rows_data(folder: Path, step: int) -> RowsData:
    """Return the dataset that the episode ids of a step refer to; raise `DataError` if the step was not logged."""
    return _of_step(folder, step)[0][0]


def _of_step(folder: Path, step: int) -> list[tuple[RowsData, list[RowLoss]]]:
    paths = sorted((folder / ROWS).glob("rank_*.jsonl"))
    if not paths:
        raise DataError(f"{folder}: does not contain per-conversation losses; train with --log_rows")
    start = b'{"step": %d,' % step
    lines = [_read_rows(line) for path in paths for line in _lines(path) if line.raw.startswith(start)]
    if not lines:
        raise DataError(f"{folder}: has no losses for step {step}; {METRICS} lists the available steps")
    return lines


def _read_rows(line: MetricsLine) -> tuple[RowsData, list[RowLoss]]:
    try:
        values = line.read()
        data = RowsData(**values["data"])
        Path(data.dataset_dir), bytes.fromhex(data.dataset_sha256)
        episodes, segments, losses, weights = (values[name] for name in COLUMNS)
        columns = map(int, episodes), map(int, segments), map(float, losses), map(float, weights)
        return data, [RowLoss(*row) for row in zip(*columns, strict=True)]
    except (KeyError, TypeError, ValueError, OverflowError):
        raise line.fault(f"a step with its data and the columns {', '.join(COLUMNS)}") from None


class MetricsLine(NamedTuple):
    """One line of a log file, including its line break."""

    path: Path
    number: int
    raw: bytes

    def read(self) -> dict[str, Any]:
        """Parse the line as a JSON object; raise `DataError` if it is not valid JSON or has no integer `step`."""
        try:
            values = json.loads(self.raw)
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict) or type(values.get("step")) is not int:
            raise self.fault("a JSON object with a step")
        return values

    def fault(self, right: str) -> DataError:
        return DataError(f"{self.path}:{self.number}: is damaged; expected {right}; remove the line")


def _lines(path: Path) -> Iterator[MetricsLine]:
    try:
        with open_plain(path) as file:
            yield from (MetricsLine(path, number, raw) for number, raw in enumerate(file, 1) if raw.endswith(b"\n"))
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
