"""Replay a step of a run: its exact batch, from the audit log and the dataset."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from chatmill.audit.log import LogLine, read_log
from chatmill.audit.recompute import MismatchError, compare, load_run, recompute, whole_number
from chatmill.audit.recorder import steps_fields
from chatmill.errors import ChatmillError, DataError, UsageError
from chatmill.load.batch import Batch
from chatmill.load.batch_builder import BatchBuilder
from chatmill.load.plan import Cursor, LoadPlan, PlannedStep


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
