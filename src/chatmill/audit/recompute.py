"""Recompute what the lines of an audit log should say, from the dataset."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.audit.log import LogLine, as_text
from chatmill.audit.recorder import dataset_fields
from chatmill.errors import DataError, one_line
from chatmill.load.batch_builder import BatchBuilder
from chatmill.load.config import LoadConfig
from chatmill.load.plan import Cursor, LoadPlan, PlannedStep
from chatmill.load.source import open_sources
from chatmill.rows import Index

DIGITS = 12
"""The most digits of a number of steps, windows or rows in a log."""


class MismatchError(DataError):
    """A line differs from what the dataset gives."""


class LoggedRun(NamedTuple):
    """The run that a dataset_load line begins."""

    plan: LoadPlan
    every: int
    """The most steps that one digest covers."""
    rows: int | None
    """Rows of a step that digests cover: those of rank 0, or None for all."""
    fields: Mapping[str, str]


def load_run(line: LogLine, dataset: str | Path | None) -> LoggedRun:
    """Open the dataset of a dataset_load line, and check the line against it."""
    try:
        values = json.loads(line.fields.get("config", ""))
    except (ValueError, RecursionError) as error:
        raise MismatchError(f"config cannot be read ({one_line(str(error))})") from None
    if not isinstance(values, dict):
        raise MismatchError("config cannot be read; expected a JSON object")
    config = LoadConfig.from_mapping(values)
    every, world = whole_number(line, "digest_steps", 1), whole_number(line, "world_size", 1)
    if config.batch_size % world:
        raise MismatchError(
            f"{line.action} says world_size {world}; expected a divisor of batch_size {config.batch_size}"
        )
    sources, config = open_sources(dataset or line.fields.get("dataset", ""), config)
    splits = [name for name in sources[0].dataset.splits if all(name in source for source in sources)]
    plan = LoadPlan(sources, config, line.fields.get("split", ""))
    unchecked = {name: line.fields.get(name, "") for name in ("dataset", "world_size", "ranks", "digest_steps")}
    compare(line, {**dataset_fields(sources, plan, splits), **unchecked})
    return LoggedRun(plan, every, None if unchecked["ranks"] == "all" else config.batch_size // world, line.fields)


class Recomputed(NamedTuple):
    """Steps whose rows were read again, the digest of the rows that the log covers, and the counts of each source."""

    steps: list[PlannedStep]
    digest: NDArray[np.uint64]
    source_counts: Index | None


def recompute(run: LoggedRun, at: Cursor, stop: int) -> Recomputed:
    """Build the batches from a cursor up to a step, as the run did."""
    steps: list[PlannedStep] = []
    for step in run.plan.steps(at):
        steps.append(step)
        if step.after.step >= stop:
            break
        if step.ends_epoch:
            raise MismatchError(f"holds steps up to {stop}, and the epoch ends with step {step.at.step}")
    builder = BatchBuilder(run.plan, 0, run.plan.config.batch_size if run.rows is None else run.rows, has_listener=True)
    digest: Any = np.zeros(2, dtype=np.uint64)
    counts: Any = None
    for item in builder.batches(iter(steps)):
        digest = digest + item.digest
        if item.source_counts is not None:
            counts = item.source_counts + (0 if counts is None else counts)
    return Recomputed(steps, digest, counts)


def compare(line: LogLine, expected: Mapping[str, Any]) -> None:
    """Raise for the first field that differs, is missing, or should not be there."""
    for name, value in expected.items():
        if name not in line.fields:
            raise MismatchError(f"{line.action} has no {name}")
        logged, right = line.fields[name], as_text(value)
        if logged != right:
            raise MismatchError(f"{line.action} says {name} {one_line(logged)}; the dataset gives {one_line(right)}")
    for name in line.fields:
        if name not in expected:
            raise MismatchError(f"{line.action} has a field {name}, which is not its own")


def whole_number(line: LogLine, name: str, least: int) -> int:
    """The number in a field, which must be at least `least`."""
    text = line.fields.get(name, "")
    if not text.isascii() or not text.isdigit() or len(text) > DIGITS or int(text) < least:
        raise MismatchError(f"{line.action} says {name} {one_line(text)}; expected a whole number from {least} on")
    return int(text)
