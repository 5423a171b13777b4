"""Verify an audit log: recompute every line from the dataset, and compare."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from chatmill.audit.log import START, LogLine, TornLine, read_log, torn_fields
from chatmill.audit.recompute import LoggedRun, MismatchError, compare, load_run, recompute, whole_number
from chatmill.audit.recorder import add_counts, complete_fields, drop_fields, mix_fields, start_fields, steps_fields
from chatmill.errors import ChatmillError, one_line
from chatmill.load.plan import Cursor
from chatmill.store.primer_cache import PrimerCache, verify_cache
from chatmill.store.verify import verify_dataset


@dataclass
class AuditResult:
    """The result of verifying a log. `fault` is None, or names the first line that differs."""

    lines: int
    fault: str | None = None
    steps: int = 0
    """Steps whose rows were recomputed and are as logged."""
    abandoned: int = 0
    """Lines that a resumed run left behind."""
    torn: list[int] = field(default_factory=list)
    """Numbers of lines that a crash cut off."""
    unanchored: int = 0
    """Lines after the last one whose hash a checkpoint keeps; lines could be missing after them."""


def verify_log(
    log: str | Path,
    dataset: str | Path | None = None,
    *,
    heads: Mapping[str, str] | None = None,
    progress: Callable[[int], None] | None = None,
) -> AuditResult:
    """Recompute every line of a log from a dataset (None: the one that it names), and check every byte of the dataset.

    `heads` maps the name of each checkpoint to the hash that it keeps. `progress` is called with numbers of steps.

        result = verify_log("logs/audit/audit_20260103T164419Z.log", "data/v1")
        assert result.fault is None
    """
    place = Path(log)
    lines = read_log(place)
    checker = _Checker(dataset, progress)
    result = AuditResult(len(lines))
    result.fault = _first_fault(place, lines, checker, result)
    result.steps = checker.steps
    if result.fault is None:
        result.fault, result.unanchored = _check_heads(place, lines, heads or {})
    result.fault = result.fault or checker.changed_file()
    return result


def _first_fault(
    place: Path, lines: Sequence[LogLine | TornLine], checker: _Checker, result: AuditResult
) -> str | None:
    torn: list[TornLine] = []
    for number, line in enumerate(lines, start=1):
        if isinstance(line, TornLine):
            torn.append(line)
            continue
        if torn and line.action != "resume":
            return f"{place}:{number - len(torn)}: {torn[0].why}"
        try:
            result.abandoned += checker.check(line, torn)
        except ChatmillError as error:
            return f"{place}:{number}: {error}"
        result.torn += range(number - len(torn), number)
        torn = []
    if not checker.lines:
        return f"{place}: holds no line; expected an audit log"
    if torn[:-1] or (torn and not torn[-1].breaks_off):
        return f"{place}:{len(lines) - len(torn) + 1}: {torn[0].why}"
    result.torn += [len(lines)] if torn else []
    return None


def _check_heads(place: Path, lines: Sequence[LogLine | TornLine], heads: Mapping[str, str]) -> tuple[str | None, int]:
    """The fault if a head is not the hash of a line, and the number of lines after the last head."""
    numbers = {line.sha256: number for number, line in enumerate(lines, start=1) if isinstance(line, LogLine)}
    last = max((numbers.get(head, 0) for head in heads.values()), default=0)
    for name, head in heads.items():
        if head not in numbers:
            gone = f"lines after {last}" if last else "some of its lines"
            return f"{place}: no line has the hash {head[:12]}… that {name} keeps; {gone} are changed or gone", 0
    return None, sum(number > last for number in numbers.values())


class _LoggedState(NamedTuple):
    """The state of a run after a line."""

    at: Cursor = Cursor()
    started: bool = False
    """The epoch_start line of the cursor's epoch was written."""
    total: Mapping[str, int] = {}
    """What each source contributed so far."""


class _Checker:
    """Follows a run line by line; raises `MismatchError` for a line that differs from what the dataset gives."""

    def __init__(self, dataset: str | Path | None, progress: Callable[[int], None] | None) -> None:
        self._dataset, self._progress = dataset, progress
        self._run: LoggedRun | None = None
        self._state = _LoggedState()
        self._due: list[tuple[str, dict[str, Any]]] = [("dataset_load", {})]
        """Lines that must come next."""
        self._checkpoints: dict[str, tuple[int, _LoggedState]] = {}
        self._last = START
        self.lines = 0
        self.steps = 0

    def check(self, line: LogLine, torn: Sequence[TornLine]) -> int:
        """Check the next line; returns the number of lines that it abandons."""
        if line.previous != self._last:
            raise MismatchError(
                f"names {line.previous[:12]}… as the hash of the line before, which is {self._last[:12]}…"
            )
        abandoned = 0
        if line.action == "resume":
            abandoned = self._resume(line, torn)
        elif not self._due:
            self._follow(line)
        else:
            action, fields = self._due[0]
            if action != line.action:
                raise MismatchError(f"is {one_line(line.action)}; expected {action}")
            if action != "dataset_load":
                compare(line, fields)
            # A resumed run mostly repeats the line of the run before it, and need not be opened again.
            elif self._run is None or line.fields != self._run.fields:
                self._run = load_run(line, self._dataset)
            del self._due[0]
        self.lines += 1
        self._last = line.sha256
        if line.action == "checkpoint":
            self._checkpoints[line.sha256] = self.lines, self._state
        return abandoned

    def changed_file(self) -> str | None:
        """A file of the dataset that does not match its metadata; finds changes in rows that no step had."""
        for source in self._run.plan.sources if self._run is not None else ():
            check = verify_cache if isinstance(source.dataset, PrimerCache) else verify_dataset
            for fault in check(source.path, full=True).faults:
                return fault
        return None

    def _resume(self, line: LogLine, torn: Sequence[TornLine]) -> int:
        head = line.fields.get("head", "")
        if head not in self._checkpoints:
            raise MismatchError(f"goes on from {one_line(head, 12)}, which is no checkpoint before it")
        number, self._state = self._checkpoints[head]
        abandoned = self.lines - number
        fields = {"head": head, "abandoned": abandoned, **self._state.at._asdict()}
        compare(line, fields | (torn_fields(torn) if torn else {}))
        self._due = [("dataset_load", {})]
        return abandoned

    def _follow(self, line: LogLine) -> None:
        assert self._run is not None
        plan, (at, started, total) = self._run.plan, self._state
        if line.action == "epoch_start":
            if started or not plan.step(at).begins_epoch:
                raise MismatchError(
                    f"begins epoch {one_line(line.fields.get('epoch', ''))} in the middle of {at.epoch}"
                )
            compare(line, start_fields(plan, at.epoch))
            self._state = self._state._replace(started=True)
        elif line.action == "steps":
            self._steps(line, self._run)
        elif line.action == "checkpoint":
            compare(line, at._asdict())
        elif line.action == "mix" and total:
            compare(line, mix_fields(plan, total))
        else:
            raise MismatchError(f"is {one_line(line.action)}, which cannot come here")

    def _steps(self, line: LogLine, run: LoggedRun) -> None:
        plan, (at, started, total) = run.plan, self._state
        first, stop = whole_number(line, "first_step", 0), whole_number(line, "stop_step", 1)
        if first != at.step or not first < stop <= first + run.every:
            raise MismatchError(f"holds steps {first} to {stop}; expected at most {run.every} from {at.step} on")
        if plan.step(at).begins_epoch and not started:
            raise MismatchError(f"holds steps of epoch {at.epoch}, which no line begins")
        recomputed = recompute(run, at, stop)
        if self._progress is not None:
            self._progress(len(recomputed.steps))
        compare(line, steps_fields(plan, *recomputed))
        last = recomputed.steps[-1]
        self.steps += len(recomputed.steps)
        if recomputed.source_counts is not None:
            total = add_counts(total, plan, recomputed.source_counts)
        self._state = _LoggedState(last.after, started and not last.ends_epoch, total)
        if last.ends_epoch:
            epoch = last.at.epoch
            self._due = [("drop_last", drop_fields(epoch, last))] if len(last.dropped) else []
            self._due.append(("epoch_complete", complete_fields(plan, epoch, last)))
