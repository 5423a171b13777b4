"""Read `removed.jsonl`: the records that a filter or deduplication removed from a dataset."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from chatmill.errors import DataError
from chatmill.store.layout import REMOVED
from chatmill.store.mapped import reading
from chatmill.store.read import Dataset

PIECE = 2**20
"""Number of bytes read at a time."""


@dataclass(frozen=True)
class RecordPlace:
    """The location of a record: its source, file and line."""

    source: str
    file: str
    line: int


@dataclass(frozen=True)
class RemovedRecord(RecordPlace):
    reason: str
    twin: RecordPlace | None = None
    """The record that was kept instead, if this record is a duplicate."""


def removed_records(dataset: Dataset) -> Iterator[RemovedRecord]:
    """Yield the removed records of a dataset in input order, if its metadata lists `removed.jsonl`."""
    if dataset.metadata is None or dataset.metadata.removed is None:
        return
    path = dataset.path / REMOVED
    for number, line in enumerate(_lines(dataset), 1):
        try:
            yield _parsed(json.loads(line))
        except (ValueError, TypeError, KeyError, RecursionError):
            raise DataError(
                f"{path}:{number}: is not a removed record, so the file was changed; run chatmill verify --full"
            ) from None


def _lines(dataset: Dataset) -> Iterator[bytes]:
    data = np.asarray(dataset.stored.map(dataset.path / REMOVED))
    left = b""
    for start in range(0, len(data), PIECE):
        with reading():
            piece = data[start : start + PIECE].tobytes()
        *lines, left = (left + piece).split(b"\n")
        yield from lines
    if left:
        yield left


def _parsed(data: dict[str, Any]) -> RemovedRecord:
    twin = data.get("twin")
    return RemovedRecord(**_place(data), reason=str(data["reason"]), twin=twin and RecordPlace(**_place(twin)))


def _place(data: dict[str, Any]) -> dict[str, Any]:
    return {"source": str(data["source"]), "file": str(data["file"]), "line": int(data["line"])}
