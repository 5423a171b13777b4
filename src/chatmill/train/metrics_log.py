"""Line logs of a run: its metrics, and the losses of single conversations.

A line is a JSON object with its step. A run that resumes first removes the lines after its checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from chatmill.errors import DataError, UsageError
from chatmill.store import files
from chatmill.train.step import RowLoss

METRICS = "metrics.jsonl"
ROWS = "rows"
"""The folder of the losses of conversations, a file for each rank."""
COLUMNS = ("episodes", "segments", "losses", "weights")
"""The fields of `RowLoss` in a line."""


class MetricsLog:
    """A file that JSON lines are appended to."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab")

    def add(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def rewind(path: Path, step: int) -> None:
    """Remove the lines of a file after a step, and an incomplete last line that a killed run left."""
    if path.is_file():
        kept = [line.raw for line in _lines(path) if line.read()["step"] <= step]
        files.write_file(path, b"".join(kept), overwrite=True)


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The metrics of a run, in order."""
    return [line.read() for line in _lines(folder / METRICS)]


def rows_file(folder: Path, rank: int) -> Path:
    return folder / ROWS / f"rank_{rank:05d}.jsonl"


class RowsData(NamedTuple):
    """The data that episode numbers refer to: a run may resume with other data."""

    dataset_dir: str
    dataset_sha256: str
    mix_sft: Mapping[str, float] | None


def rows_line(step: int, rows: Sequence[RowLoss], data: RowsData) -> dict[str, Any]:
    """The losses of one step, in columns: most of a line is numbers."""
    columns = zip(*rows, strict=True) if rows else ((),) * len(COLUMNS)
    return {"step": step, "data": data._asdict(), **dict(zip(COLUMNS, columns, strict=True))}


def read_rows(folder: Path, step: int) -> list[RowLoss]:
    """The losses of the conversations of a step, of all ranks; `DataError` if the run did not write them."""
    return [row for _, rows in _of_step(folder, step) for row in rows]


def rows_data(folder: Path, step: int) -> RowsData:
    """The data that the episodes of a step are of; `DataError` if the run did not write it."""
    return _of_step(folder, step)[0][0]


def _of_step(folder: Path, step: int) -> list[tuple[RowsData, list[RowLoss]]]:
    paths = sorted((folder / ROWS).glob("rank_*.jsonl"))
    if not paths:
        raise DataError(f"{folder}: holds no losses of conversations; train with --log_rows")
    start = b'{"step": %d,' % step
    lines = [_read_rows(line) for path in paths for line in _lines(path) if line.raw.startswith(start)]
    if not lines:
        raise DataError(f"{folder}: has no losses of step {step}; see {METRICS} for the steps there are")
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
        raise line.fault(f"the columns {', '.join(COLUMNS)} of a step, and its data") from None


class MetricsLine(NamedTuple):
    """A complete line of a file."""

    path: Path
    number: int
    raw: bytes

    def read(self) -> dict[str, Any]:
        """The JSON object of the line, which has a step."""
        try:
            values = json.loads(self.raw)
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict) or type(values.get("step")) is not int:
            raise self.fault("an object with its step")
        return values

    def fault(self, right: str) -> DataError:
        return DataError(f"{self.path}:{self.number}: is damaged; expected {right}; remove the line")


def _lines(path: Path) -> Iterator[MetricsLine]:
    """The complete lines of a file."""
    try:
        with path.open("rb") as file:
            yield from (MetricsLine(path, number, raw) for number, raw in enumerate(file, 1) if raw.endswith(b"\n"))
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None


class TensorBoardLog:
    """The same metrics as TensorBoard scalars."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UsageError("tensorboard is true, and it is not installed; pip install tensorboard") from None
        files.make_folder(folder / "tensorboard")
        self._writer = SummaryWriter(str(folder / "tensorboard"))

    def add(self, line: Mapping[str, Any]) -> None:
        for name, value in line.items():
            # A step that trains nothing has no loss.
            if name != "step" and value is not None:
                self._writer.add_scalar(name, value, line["step"])

    def close(self) -> None:
        self._writer.close()
