"""The audit log is checked, not believed: every line is said again from the dataset, and compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from chatmill.audit import recorder as audit
from chatmill.audit.log import START, LogLine, TornLine, read_log, torn_fields
from chatmill.audit.recompute import LoggedRun, MismatchError, compare, load_run, recompute, whole_number
from chatmill.errors import ChatmillError, one_line
from chatmill.load.plan import Cursor
from chatmill.store.primer_cache import PrimerCache, verify_cache
from chatmill.store.verify import verify_dataset


@dataclass
class AuditResult:
    """What a check found: all is well if `fault` is None, which else names the first line that differs."""

    lines: int
    fault: str | None = None
    steps: int = 0
    """Steps whose rows were read again and found as the log says."""
    abandoned: int = 0
    """Lines that a resumed run left behind."""
    torn: list[int] = field(default_factory=list)
    """Numbers of lines that a crash broke off."""
    unanchored: int = 0
    """Lines after the last one whose hash a checkpoint keeps: of those, the end may be missing."""


def verify_log(
    log: str | Path,
    dataset: str | Path | None = None,
    *,
    heads: Mapping[str, str] | None = None,
    progress: Callable[[int], None] | None = None,
) -> AuditResult:
    """Recompute every line of a log from a dataset (None: the one that it names), every byte of which is checked too.

    `heads` are the hashes that checkpoints keep, by a name for each. `progress` is told of steps that were read.
    """
    place = Path(log)
    found = read_log(place)
    checker = _Checker(dataset, progress)
    result = AuditResult(len(found))
    torn: list[TornLine] = []
    for number, line in enumerate(found, start=1):
        if isinstance(line, TornLine):
            torn.append(line)
            continue
        if torn and line.action != "resume":
            return _at_fault(result, f"{place}:{number - len(torn)}: {torn[0].why}", checker)
        try:
            result.abandoned += checker.read(line, torn)
        except ChatmillError as error:
            return _at_fault(result, f"{place}:{number}: {error}", checker)
        result.torn += range(number - len(torn), number)
        torn = []
    if not checker.lines:
        return _at_fault(result, f"{place}: holds no line; expected an audit log", checker)
    if torn[:-1] or (torn and not torn[-1].breaks_off):
        return _at_fault(result, f"{place}:{len(found) - len(torn) + 1}: {torn[0].why}", checker)
    result.torn += [len(found)] if torn else []
    result.steps = checker.steps
    result.fault, result.unanchored = _anchors(place, found, heads or {})
    result.fault = result.fault or checker.changed_file()
    return result


def _at_fault(result: AuditResult, fault: str, checker: _Checker) -> AuditResult:
    result.fault, result.steps = fault, checker.steps
    return result


def _anchors(place: Path, found: Sequence[LogLine | TornLine], heads: Mapping[str, str]) -> tuple[str | None, int]:
    """The fault if a head is no line's hash, and how many lines come after the last head."""
    numbers = {line.sha256: number for number, line in enumerate(found, start=1) if isinstance(line, LogLine)}
    last = max((numbers.get(head, 0) for head in heads.values()), default=0)
    for name, head in heads.items():
        if head not in numbers:
            lines = f"lines after {last}" if last else "some of its lines"
            return f"{place}: no line has the hash {head[:12]}… that {name} keeps; {lines} are changed or gone", 0
    return None, sum(number > last for number in numbers.values())


class _Reached(NamedTuple):
    """What holds after a line: where the run stands, and what was said of it."""

    at: Cursor = Cursor()
    started: bool = False
    """The first line of the epoch at the cursor was written."""
    given: Mapping[str, int] = {}


class _Checker:
    """Follows a run line by line, and raises `MismatchError` for one that says anything else than the dataset does."""

    def __init__(self, dataset: str | Path | None, progress: Callable[[int], None] | None) -> None:
        self._dataset, self._progress = dataset, progress
        self._run: LoggedRun | None = None
        self._reached = _Reached()
        self._due: list[tuple[str, dict[str, Any]]] = [("dataset_load", {})]
        """Lines that must come next."""
        self._checkpoints: dict[str, tuple[int, _Reached]] = {}
        self._heads: dict[str, int] = {START: 0}
        self.lines = 0
        self.steps = 0

    def read(self, line: LogLine, torn: Sequence[TornLine]) -> int:
        """Check the next line; the number of lines that it leaves behind."""
        last = next(reversed(self._heads))
        if line.previous != last:
            raise MismatchError(f"names {line.previous[:12]}… as the hash of the line before, which is {last[:12]}…")
        left = 0
        if line.action == "resume":
            left = self._resume(line, torn)
        elif self._due and self._due[0][0] != line.action:
            raise MismatchError(f"is {one_line(line.action)}; expected {self._due[0][0]}")
        elif self._due and line.action == "dataset_load":
            # A run that goes on mostly says what the one before it said, and need not be opened again.
            if self._run is None or line.fields != self._run.said:
                self._run = load_run(line, self._dataset)
            del self._due[0]
        elif self._due:
            compare(line, self._due[0][1])
            del self._due[0]
        else:
            self._follow(line)
        self.lines += 1
        self._heads[line.sha256] = self.lines
        if line.action == "checkpoint":
            self._checkpoints[line.sha256] = self.lines, self._reached
        return left

    def changed_file(self) -> str | None:
        """A file of the dataset that is not what its metadata says: rows that no step had are held against that."""
        for source in self._run.plan.sources if self._run is not None else ():
            check = verify_cache if isinstance(source.dataset, PrimerCache) else verify_dataset
            for fault in check(source.path, full=True).faults:
                return fault
        return None

    def _resume(self, line: LogLine, torn: Sequence[TornLine]) -> int:
        head = line.fields.get("head", "")
        if head not in self._checkpoints:
            raise MismatchError(f"goes on from {one_line(head, 12)}, which is no checkpoint before it")
        number, self._reached = self._checkpoints[head]
        said = {"head": head, "abandoned": self.lines - number, **self._reached.at._asdict()}
        compare(line, said | (torn_fields(torn) if torn else {}))
        self._due = [("dataset_load", {})]
        return self.lines - number

    def _follow(self, line: LogLine) -> None:
        assert self._run is not None
        plan, (at, started, given) = self._run.plan, self._reached
        if line.action == "epoch_start":
            if started or not plan.step(at).begins_epoch:
                raise MismatchError(
                    f"begins epoch {one_line(line.fields.get('epoch', ''))} in the middle of {at.epoch}"
                )
            compare(line, audit.start_fields(plan, at.epoch))
            self._reached = self._reached._replace(started=True)
        elif line.action == "steps":
            self._steps(line, self._run)
        elif line.action == "checkpoint":
            compare(line, at._asdict())
        elif line.action == "mix" and given:
            compare(line, audit.mix_fields(plan, given))
        else:
            raise MismatchError(f"is {one_line(line.action)}, which cannot come here")

    def _steps(self, line: LogLine, run: LoggedRun) -> None:
        plan, (at, started, given) = run.plan, self._reached
        first, stop = whole_number(line, "first_step", 0), whole_number(line, "stop_step", 1)
        if first != at.step or not first < stop <= first + run.every:
            raise MismatchError(f"holds steps {first} to {stop}; expected at most {run.every} from {at.step} on")
        if plan.step(at).begins_epoch and not started:
            raise MismatchError(f"holds steps of epoch {at.epoch}, which no line begins")
        made = recompute(run, at, stop)
        if self._progress is not None:
            self._progress(len(made.steps))
        compare(line, audit.steps_fields(plan, *made))
        last = made.steps[-1]
        self.steps += len(made.steps)
        if made.given is not None:
            given = audit.added(given, [source.name for source in plan.sources], made.given)
        self._reached = _Reached(last.after, started and not last.ends_epoch, given)
        if last.ends_epoch:
            epoch = last.at.epoch
            self._due = [("drop_last", audit.drop_fields(epoch, last))] if len(last.dropped) else []
            self._due.append(("epoch_complete", audit.complete_fields(plan, epoch, last)))
