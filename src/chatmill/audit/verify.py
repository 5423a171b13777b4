"""Verify an audit log by recomputing every line from the dataset, and rebuild the batch of a step."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.audit import recorder
from chatmill.audit.log import START, LogLine, TornLine, as_text, read_log, torn_fields
from chatmill.audit.saved_state import SavedState, first_difference, logged_checkpoints
from chatmill.errors import ChatmillError, DataError, UsageError, one_line
from chatmill.load.batch import Batch
from chatmill.load.batch_builder import BatchBuilder
from chatmill.load.config import LoadConfig
from chatmill.load.digests import DIGESTS, RowDigests
from chatmill.load.plan import Cursor, LoadPlan, PlannedStep
from chatmill.load.source import open_sources
from chatmill.plain_file import local_path
from chatmill.remote.urls import Place
from chatmill.rows import Index
from chatmill.store.primer_cache import PrimerCache, verify_cache
from chatmill.store.verify import verify_dataset

DIGITS = 12
"""Maximum number of digits that `whole_number` accepts in a field."""


class MismatchError(DataError):
    """Raised if a log line differs from the line recomputed from the dataset."""


@dataclass
class AuditResult:
    """The result of verifying an audit log. `fault` describes the first difference; None if everything matches."""

    lines: int
    fault: str | None = None
    steps: int = 0
    """Number of steps whose recomputed rows match the log."""
    abandoned: int = 0
    """Number of lines that a resumed run abandoned, because they follow the checkpoint that it resumed from."""
    torn: list[int] = field(default_factory=list)
    """Line numbers of the lines that a crash truncated."""
    unanchored: int = 0
    """Number of lines at the end of the log that no checkpoint covers; their removal would go unnoticed."""


def verify_log(
    log: str | Path,
    dataset: str | Place | None = None,
    *,
    heads: Mapping[str, str] | None = None,
    states: Mapping[str, SavedState] | None = None,
    progress: Callable[[int], None] | None = None,
) -> AuditResult:
    """Recompute every line of an audit log from the dataset, and check every byte of the dataset.

    `dataset` defaults to the dataset that the log names. `heads` maps the name of each checkpoint to its stored head,
    which is the hash of a log line. `states` is the result of `saved_states`; every field of these checkpoint states
    must match the log. `progress` is called with the number of steps that were just verified.

        result = verify_log("logs/audit/audit_20260103T164419Z.log", "data/v1")
        assert result.fault is None
    """
    place = local_path(log)
    lines = read_log(place)
    result = AuditResult(len(lines))
    checker = _Checker(dataset, progress, result)
    result.fault = _first_fault(place, lines, checker)
    if result.fault is None:
        kept = {**(heads or {}), **{name: state.head for name, state in (states or {}).items()}}
        result.fault, result.unanchored = _check_heads(place, lines, kept)
    if result.fault is None:
        result.fault = _check_states(place, lines, states or {})
    result.fault = result.fault or checker.changed_file()
    return result


def _first_fault(place: Path, lines: Sequence[LogLine | TornLine], checker: _Checker) -> str | None:
    torn: list[TornLine] = []
    result = checker.result
    for number, line in enumerate(lines, start=1):
        if isinstance(line, TornLine):
            torn.append(line)
            continue
        if torn and line.action != "resume":
            return f"{place}:{number - len(torn)}: {torn[0].why}"
        try:
            checker.check(line, torn)
        except ChatmillError as error:
            return f"{place}:{number}: {error}"
        result.torn += range(number - len(torn), number)
        torn = []
    if not checker.lines:
        return f"{place}: the file is empty; expected an audit log"
    if torn[:-1] or (torn and not torn[-1].breaks_off):
        return f"{place}:{len(lines) - len(torn) + 1}: {torn[0].why}"
    result.torn += [len(lines)] if torn else []
    return None


def _check_heads(place: Path, lines: Sequence[LogLine | TornLine], heads: Mapping[str, str]) -> tuple[str | None, int]:
    """Check that the log contains the line hash that each checkpoint stores.

    Return a description of the first missing hash, or None, and the number of lines after the last line whose hash is
    in a checkpoint.
    """
    numbers = {line.sha256: number for number, line in enumerate(lines, start=1) if isinstance(line, LogLine)}
    last = max((numbers.get(head, 0) for head in heads.values()), default=0)
    for name, head in heads.items():
        if head not in numbers:
            gone = f"lines after line {last}" if last else "lines"
            return f"{place}: no line has the hash {head[:12]}… that {name} records; {gone} were changed or removed", 0
    return None, sum(number > last for number in numbers.values())


def _check_states(place: Path, lines: Sequence[LogLine | TornLine], states: Mapping[str, SavedState]) -> str | None:
    """Return a description of the first checkpoint state that differs from the log, or None if all states match."""
    logged = logged_checkpoints(lines) if states else {}
    for name, state in states.items():
        if state.head not in logged:
            return f"{place}: the line with the hash {state.head[:12]}… that {name} records is not a checkpoint line"
        if fault := first_difference(state, logged[state.head]):
            return f"{name}: {fault}; the checkpoint was changed"
    return None


class _LoggedState(NamedTuple):
    """The state of a run after a given line of its log."""

    at: Cursor = Cursor()
    started: bool = False
    """Whether the log contains the epoch_start line of the cursor's epoch."""
    total: Mapping[str, int] = {}
    """Amount of data from each source up to the cursor."""


class _Checker:
    """Checks a log line by line; raises `MismatchError` for a line that differs from the recomputed line."""

    def __init__(
        self, dataset: str | Place | None, progress: Callable[[int], None] | None, result: AuditResult
    ) -> None:
        self._dataset, self._progress, self.result = dataset, progress, result
        self._run: LoggedRun | None = None
        self._state = _LoggedState()
        self._due: list[tuple[str, dict[str, Any]]] = [("dataset_load", {})]
        """Actions and fields that the next lines of the log must have."""
        self._checkpoints: dict[str, tuple[int, _LoggedState]] = {}
        self._last = START
        self.lines = 0

    def check(self, line: LogLine, torn: Sequence[TornLine]) -> None:
        """Check the next line, and update the counts in `result`."""
        if line.previous != self._last:
            raise MismatchError(
                f"records {line.previous[:12]}… as the hash of the previous line; expected {self._last[:12]}…"
            )
        if line.action == "resume":
            self._resume(line, torn)
        elif not self._due:
            self._follow(line)
        else:
            action, fields = self._due[0]
            if action != line.action:
                raise MismatchError(f"has action {one_line(line.action)}; expected {action}")
            if action != "dataset_load":
                compare(line, fields)
            # A resumed run usually repeats the dataset_load line, so the dataset is already open.
            elif self._run is None or line.fields != self._run.fields:
                self._run = load_run(line, self._dataset)
            del self._due[0]
        self.lines += 1
        self._last = line.sha256
        if line.action == "checkpoint":
            self._checkpoints[line.sha256] = self.lines, self._state

    def changed_file(self) -> str | None:
        """Verify all files of the dataset, including rows that the run did not use; describe the first fault, or return
        None.
        """
        if self._run is None:
            return None
        plan = self._run.plan
        for source in plan.sources:
            if isinstance(source.dataset, PrimerCache) and isinstance(source.path, Path):
                checked = verify_cache(source.path, full=True)
            else:
                checked = verify_dataset(source.path, full=True, token_dtype=plan.config.token_dtype)
            for fault in checked.faults:
                return fault
        return None

    def _resume(self, line: LogLine, torn: Sequence[TornLine]) -> None:
        head = line.fields.get("head", "")
        if head not in self._checkpoints:
            raise MismatchError(f"resumes from {one_line(head, 12)}, which is not an earlier checkpoint")
        number, self._state = self._checkpoints[head]
        abandoned = self.lines - number
        fields = {"head": head, "abandoned": abandoned, **self._state.at._asdict()}
        compare(line, fields | (torn_fields(torn) if torn else {}))
        self._due = [("dataset_load", {})]
        self.result.abandoned += abandoned

    def _follow(self, line: LogLine) -> None:
        assert self._run is not None
        plan, (at, started, total) = self._run.plan, self._state
        if line.action == "epoch_start":
            if started or not plan.step(at).begins_epoch:
                raise MismatchError(
                    f"starts epoch {one_line(line.fields.get('epoch', ''))} in the middle of epoch {at.epoch}"
                )
            compare(line, recorder.start_fields(plan, at.epoch))
            self._state = self._state._replace(started=True)
        elif line.action == "steps":
            self._steps(line, self._run)
        elif line.action == "checkpoint":
            compare(line, at._asdict())
        elif line.action == "mix" and total:
            compare(line, recorder.mix_fields(plan, total))
        else:
            raise MismatchError(f"has action {one_line(line.action)}, which cannot occur here")

    def _steps(self, line: LogLine, run: LoggedRun) -> None:
        plan, (at, started, total) = run.plan, self._state
        first, stop = whole_number(line, "first_step", 0), whole_number(line, "stop_step", 1)
        if first != at.step or not first < stop <= first + run.every:
            raise MismatchError(
                f"covers steps {first} to {stop}; expected at most {run.every} steps, starting at {at.step}"
            )
        if plan.step(at).begins_epoch and not started:
            raise MismatchError(f"covers steps of epoch {at.epoch}, which has no epoch_start line")
        steps, digest, counts = recompute(run, at, stop)
        if self._progress is not None:
            self._progress(len(steps))
        compare(line, recorder.steps_fields(plan, steps, digest, counts))
        last = steps[-1]
        self.result.steps += len(steps)
        if counts is not None:
            total = recorder.add_counts(total, plan, counts)
        self._state = _LoggedState(last.after, started and not last.ends_epoch, total)
        if last.ends_epoch:
            epoch = last.at.epoch
            self._due = [("drop_last", recorder.drop_fields(epoch, last))] if len(last.dropped) else []
            self._due.append(("epoch_complete", recorder.complete_fields(plan, epoch, last)))


# Functions that recompute the lines of a log.


class LoggedRun(NamedTuple):
    """A run, as described by the dataset_load line of its log."""

    plan: LoadPlan
    every: int
    """Maximum number of steps per digest."""
    rows: int | None
    """Number of rows per step on rank 0, or None if digests cover all ranks."""
    row_digests: RowDigests
    fields: Mapping[str, str]


def load_run(line: LogLine, dataset: str | Place | None) -> LoggedRun:
    """Open `dataset`, by default the dataset that the dataset_load line names, and compare it with the line."""
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
            f"{line.action} has world_size {world}; expected a divisor of batch_size {config.batch_size}"
        )
    sources, config = open_sources(dataset or line.fields.get("dataset", ""), config)
    plan = LoadPlan(sources, config, line.fields.get("split", ""))
    unchecked = {name: line.fields.get(name, "") for name in ("dataset", "world_size", "ranks", "digest_steps")}
    name = line.fields.get("row_digest")
    if name not in DIGESTS:
        raise MismatchError(f"{line.action} has row_digest {one_line(str(name))}; expected {recorder.ROW_DIGEST}")
    unchecked |= {} if name is None else {"row_digest": name}
    compare(line, {**recorder.dataset_fields(plan), **unchecked})
    rows = None if unchecked["ranks"] == "all" else config.batch_size // world
    return LoggedRun(plan, every, rows, DIGESTS[name], line.fields)


def recompute(run: LoggedRun, at: Cursor, stop: int) -> tuple[list[PlannedStep], NDArray[np.uint64], Index | None]:
    """Rebuild the batches of a run from the cursor `at` up to, but not including, step `stop`.

    Return the steps, the combined digest of their rows, and the amount of data from each source. If the log covers only
    the rows of rank 0, so do the digest and the amounts.
    """
    steps: list[PlannedStep] = []
    for step in run.plan.steps(at):
        steps.append(step)
        if step.after.step >= stop:
            break
        if step.ends_epoch:
            raise MismatchError(f"covers steps up to {stop}, but the epoch ends with step {step.at.step}")
    num_rows = run.plan.config.batch_size if run.rows is None else run.rows
    builder = BatchBuilder(run.plan, 0, num_rows, run.row_digests)
    batches = [(item.digest, item.source_counts) for item in builder.batches(iter(steps))]
    return steps, *recorder.sum_batches(batches)


def compare(line: LogLine, expected: Mapping[str, Any]) -> None:
    """Raise `MismatchError` for the first field of a log line that is missing, is unexpected, or differs from
    `expected`.
    """
    for name, value in expected.items():
        if name not in line.fields:
            raise MismatchError(f"{line.action} has no {name}")
        logged, right = line.fields[name], as_text(value)
        if logged != right:
            raise MismatchError(f"{line.action} has {name} {one_line(logged)}; expected {one_line(right)}")
    for name in line.fields:
        if name not in expected:
            raise MismatchError(f"{line.action} has the unexpected field {name}")


def whole_number(line: LogLine, name: str, least: int) -> int:
    """Return a field as an integer; raise `MismatchError` if the field is not an integer of at least `least`."""
    text = line.fields.get(name, "")
    if not text.isascii() or not text.isdigit() or len(text) > DIGITS or int(text) < least:
        raise MismatchError(f"{line.action} has {name} {one_line(text)}; expected an integer of at least {least}")
    return int(text)


# Functions that rebuild the batch of a step.


@dataclass(frozen=True)
class ReplayedStep:
    """A step of a run, its batch, and the number of the log line that records the step."""

    plan: LoadPlan
    step: PlannedStep
    batch: Batch
    line: int


def replay_step(log: str | Path, step: int, dataset: str | Place | None = None) -> ReplayedStep:
    """Rebuild the global batch of a step from `dataset`, by default the dataset that the log names.

    Raise `DataError` if the digest of the rows differs from the log.

        replay_step("logs/audit/audit_20260103T164419Z.log", step=7).batch
    """
    place = local_path(log)
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
                raise MismatchError(f"covers steps {first} to {stop}; expected at most {run.every} steps")
            at = Cursor(first, *(whole_number(line, name, 0) for name in ("epoch", "window", "row")))
            run.plan.check(at)
            steps, digest, counts = recompute(run, at, stop)
            compare(line, recorder.steps_fields(run.plan, steps, digest, counts))
        except ChatmillError as error:
            raise DataError(f"{place}:{number}: {error}") from None
        planned = next(each for each in steps if each.at.step == step)
        builder = BatchBuilder(run.plan, 0, run.plan.config.batch_size)
        return ReplayedStep(run.plan, planned, next(builder.batches(iter([planned]))).batch, number)
    raise UsageError(f"{place}: does not contain step {step}; expected a step below {covered}")


def _current_lines(log: Path) -> list[tuple[int, LogLine]]:
    """Return (line number, line) for each line of a log, without the lines that a resumed run discarded."""
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
