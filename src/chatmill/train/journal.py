"""What a run writes line by line: its metrics, and the losses of single conversations.

A line is a JSON object with its step. A run that goes on from a checkpoint first takes back what came after it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
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


class Journal:
    """A file that lines are added to."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab")

    def add(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def rewind(path: Path, step: int) -> None:
    """Take back the lines of a file that come after a step, and what a kill left of a line."""
    if not path.is_file():
        return
    kept = [raw for raw, line in _lines(path) if line["step"] <= step]
    files.write_file(path, b"".join(kept), overwrite=True)


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The metrics of a run, in order."""
    return [line for _, line in _lines(folder / METRICS)]


def rows_file(folder: Path, rank: int) -> Path:
    return folder / ROWS / f"rank_{rank:05d}.jsonl"


class RowsData(NamedTuple):
    """What the numbers of episodes count in: a run may go on with other data."""

    dataset_dir: str
    dataset_sha256: str
    mix_sft: Mapping[str, float] | None


def rows_line(step: int, rows: Sequence[RowLoss], data: RowsData) -> dict[str, Any]:
    """The losses of one step: columns, because most of a line is numbers."""
    columns = zip(*rows, strict=True) if rows else ((),) * len(COLUMNS)
    return {"step": step, "data": data._asdict(), **dict(zip(COLUMNS, columns, strict=True))}


def read_rows(folder: Path, step: int) -> list[RowLoss]:
    """The losses of the conversations of a step, of all ranks; `DataError` if the run did not write them."""
    lines = _rows_lines(folder, step)
    return [row for line in lines for row in map(RowLoss, *(line[name] for name in COLUMNS))]


def rows_data(folder: Path, step: int) -> RowsData:
    """What the episodes of a step are of; `DataError` if the run did not write it."""
    return RowsData(**_rows_lines(folder, step)[0]["data"])


def _rows_lines(folder: Path, step: int) -> list[dict[str, Any]]:
    paths = sorted((folder / ROWS).glob("rank_*.jsonl"))
    if not paths:
        raise DataError(f"{folder}: holds no losses of conversations; train with --log_rows")
    wanted = b'{"step": %d,' % step
    found = [line for path in paths for _, line in _lines(path, wanted=lambda raw: raw.startswith(wanted))]
    if not found:
        raise DataError(f"{folder}: has no losses of step {step}; see {METRICS} for the steps there are")
    return found


def _lines(
    path: Path,
    *,
    wanted: Callable[[bytes], bool] | None = None,
    right: Callable[[dict[str, Any]], bool] | None = None,
    words: str = "an object with its step",
) -> Iterator[tuple[bytes, dict[str, Any]]]:
    right = right or _has_step
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                if raw.endswith(b"\n") and (wanted is None or wanted(raw)):
                    line = _object(raw)
                    if not right(line):
                        raise DataError(f"{path}:{number}: is damaged; expected {words}; remove the line")
                    yield raw, line
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None


def _object(raw: bytes) -> dict[str, Any]:
    """What a line holds; nothing if that is no object."""
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):
        return {}
    return line if isinstance(line, dict) else {}


def _has_step(line: dict[str, Any]) -> bool:
    return type(line.get("step")) is int


def _has_rows(line: dict[str, Any]) -> bool:
    columns, data = [line.get(name) for name in COLUMNS], line.get("data")
    return (
        _has_step(line)
        and isinstance(data, dict)
        and data.keys() == set(RowsData._fields)
        and all(isinstance(column, list) for column in columns)
        and len({len(column) for column in columns if column is not None}) == 1
        and all(type(value) is int for column in columns[:2] for value in column or ())
        and all(type(value) in (int, float) for column in columns[2:] for value in column or ())
    )


class Board:
    """TensorBoard's file of the same metrics."""

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
