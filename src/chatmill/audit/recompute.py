"""Recompute from the dataset what an audit log should say, and replay its steps."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.audit.log import LogLine, as_text, read_log
from chatmill.audit.recorder import dataset_fields, steps_fields
from chatmill.errors import ChatmillError, DataError, UsageError, one_line
from chatmill.load.batch import Batch
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


# Replay: the exact batch of a step.


@dataclass(frozen=True)
class ReplayedStep:
    """A step of a run with its batch, and the number of the log line that covers it."""

    plan: LoadPlan
    step: PlannedStep
    batch: Batch
    line: int


def replay_step(log: str | Path, step: int, dataset: str | Path | None = None) -> ReplayedStep:
    """Rebuild the global batch of a step, from the dataset that the log names or from `dataset`.

    The rows must have the digest that was logged: `DataError` if not.

        replay_step("logs/audit/audit_20260103T164419Z.log", step=7).batch
    """
    place = Path(log)
    loaded: LogLine | None = None
    covered = 0
    for number, line in _current_lines(place):
        loaded = line if line.action == "dataset_load" else loaded
        if line.action != "steps" or loaded is None:
            continue
        try:
            first, stop = whole_number(line, "first_step", 0), whole_number(line, "stop_step", 1)
            covered = max(covered, stop)
            if not first <= step < stop:
                continue
            run = load_run(loaded, dataset)
            if stop > first + run.every:
                raise MismatchError(f"holds steps {first} to {stop}; expected at most {run.every}")
            at = Cursor(first, *(whole_number(line, name, 0) for name in ("epoch", "window", "row")))
            run.plan.check(at)
            recomputed = recompute(run, at, stop)
            compare(line, steps_fields(run.plan, *recomputed))
        except ChatmillError as error:
            raise DataError(f"{place}:{number}: {error}") from None
        planned = next(each for each in recomputed.steps if each.at.step == step)
        builder = BatchBuilder(run.plan, 0, run.plan.config.batch_size)
        return ReplayedStep(run.plan, planned, next(builder.batches(iter([planned]))).batch, number)
    raise UsageError(f"{place}: step {step} is not in it; expected one below {covered}")


def _current_lines(log: Path) -> list[tuple[int, LogLine]]:
    """The lines that no resumed run abandoned, with their numbers."""
    kept: list[tuple[int, LogLine]] = []
    for number, line in enumerate(read_log(log), start=1):
        if not isinstance(line, LogLine):
            continue
        if line.action == "resume":
            heads = [each.sha256 for _, each in kept]
            head = line.fields.get("head", "")
            kept = kept[: heads.index(head) + 1] if head in heads else kept
        kept.append((number, line))
    return kept
