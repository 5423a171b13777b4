"""What an audit log should say, from the dataset: the runs that it names, and the rows of their steps."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.audit import recorder as audit
from chatmill.audit.log import LogLine, written
from chatmill.errors import DataError, one_line
from chatmill.load.batch_builder import BatchBuilder, as_arrays
from chatmill.load.config import LoadConfig
from chatmill.load.plan import Cursor, LoadPlan, PlannedStep
from chatmill.load.source import open_sources
from chatmill.rows import Index

DIGITS = 12
"""No number of steps, windows or rows in a log has more."""


class MismatchError(DataError):
    """A line does not say what it should."""


class LoggedRun(NamedTuple):
    """What a dataset_load line says of the lines after it."""

    plan: LoadPlan
    every: int
    """Steps that a digest covers at most."""
    rows: int | None
    """Rows of a step that it covers: those of rank 0, or None for all."""
    said: Mapping[str, str]


def load_run(line: LogLine, dataset: str | Path | None) -> LoggedRun:
    """The run that a dataset_load line begins, with the dataset open and found to be the one it names."""
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
    told = {name: line.fields.get(name, "") for name in ("dataset", "world_size", "ranks", "digest_steps")}
    compare(line, {**audit.dataset_fields(sources, plan, splits), **told})
    return LoggedRun(plan, every, None if told["ranks"] == "all" else config.batch_size // world, line.fields)


class Recomputed(NamedTuple):
    """Steps whose rows were read again, with the digest of the rows that the log covers, and what each source gave."""

    steps: list[PlannedStep]
    digest: NDArray[np.uint64]
    given: Index | None


def recompute(run: LoggedRun, at: Cursor, stop: int) -> Recomputed:
    """Read the rows from a cursor up to a step, as the run did."""
    steps: list[PlannedStep] = []
    for step in run.plan.steps(at):
        steps.append(step)
        if step.after.step >= stop:
            break
        if step.ends_epoch:
            raise MismatchError(f"holds steps up to {stop}, and the epoch ends with step {step.at.step}")
    digest: NDArray[np.uint64] = np.zeros(2, dtype=np.uint64)
    given: Index | None = None
    rows = run.plan.config.batch_size if run.rows is None else run.rows
    for slab in BatchBuilder(run.plan, 0, rows, True, as_arrays).slabs(iter(steps)):
        for item in slab:
            assert item.digest is not None
            digest = digest + item.digest
            if item.given is not None:
                given = item.given if given is None else given + item.given
    return Recomputed(steps, digest, given)


def compare(line: LogLine, expected: Mapping[str, Any]) -> None:
    """Raise for the first field that is not what it should be, that is missing, or that is one too many."""
    for name, value in expected.items():
        if name not in line.fields:
            raise MismatchError(f"{line.action} has no {name}")
        if line.fields[name] != written(value):
            said, right = one_line(line.fields[name]), one_line(written(value))
            raise MismatchError(f"{line.action} says {name} {said}; the dataset gives {right}")
    for name in line.fields:
        if name not in expected:
            raise MismatchError(f"{line.action} has a field {name}, which is not its own")


def whole_number(line: LogLine, name: str, least: int) -> int:
    text = line.fields.get(name, "")
    if not text.isascii() or not text.isdigit() or len(text) > DIGITS or int(text) < least:
        raise MismatchError(f"{line.action} says {name} {one_line(text)}; expected a whole number from {least} on")
    return int(text)
