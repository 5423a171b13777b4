"""A step of a run again: the exact rows, from its audit log and the dataset."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from chatmill.audit.log import LogLine, TornLine, read_log
from chatmill.audit.recompute import MismatchError, compare, load_run, recompute, whole_number
from chatmill.audit.recorder import steps_fields
from chatmill.errors import ChatmillError, DataError, UsageError
from chatmill.load.batch import Batch
from chatmill.load.batch_builder import BatchBuilder, as_arrays
from chatmill.load.plan import Cursor, LoadPlan, PlannedStep


@dataclass(frozen=True)
class ReplayedStep:
    """A step of a run with its rows, and the line of the log whose digest they have."""

    plan: LoadPlan
    step: PlannedStep
    batch: Batch
    line: int


def replay(log: str | Path, step: int, dataset: str | Path | None = None) -> ReplayedStep:
    """The rows of a step as they were handed out, from the dataset that the log names or this one.

    They are the rows only if they have the digest that was logged: `DataError` if not.
    """
    place = Path(log)
    lines = _surviving(read_log(place))
    loaded: LogLine | None = None
    covered = 0
    for at_line, line in lines:
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
            made = recompute(run, at, stop)
            compare(line, steps_fields(run.plan, *made))
        except ChatmillError as error:
            raise DataError(f"{place}:{at_line}: {error}") from None
        found = next(each for each in made.steps if each.at.step == step)
        maker = BatchBuilder(run.plan, 0, run.plan.config.batch_size, False, as_arrays)
        return ReplayedStep(run.plan, found, next(maker.slabs(iter([found])))[0].batch, at_line)
    raise UsageError(f"{place}: step {step} is not in it; expected one below {covered}")


def _surviving(found: Sequence[LogLine | TornLine]) -> list[tuple[int, LogLine]]:
    """The lines that no resumed run left behind, with their numbers."""
    kept: list[tuple[int, LogLine]] = []
    for number, line in enumerate(found, start=1):
        if not isinstance(line, LogLine):
            continue
        if line.action == "resume":
            heads = [each.sha256 for _, each in kept]
            head = line.fields.get("head", "")
            kept = kept[: heads.index(head) + 1] if head in heads else kept
        kept.append((number, line))
    return kept
