"""The audit log is checked, not believed: every line is said again from the dataset, and compared."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.errors import ChatmillError, DataError, UsageError, one_line
from chatmill.load import audit
from chatmill.load.audit_log import START, Line, Torn, read_log, torn_fields, written
from chatmill.load.batch import Batch, assemble, row_digests
from chatmill.load.config import LoadConfig
from chatmill.load.plan import Cursor, Plan, Step
from chatmill.load.source import open_sources
from chatmill.load.tally import tally
from chatmill.rows import Index
from chatmill.store.cache import Cache, verify_cache
from chatmill.store.verify import verify


@dataclass
class Checked:
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


DIGITS = 12
"""No number of steps, windows or rows in a log has more."""


class MismatchError(DataError):
    """A line does not say what it should."""


def verify_log(
    log: str | Path,
    dataset: str | Path | None = None,
    *,
    heads: Mapping[str, str] | None = None,
    progress: Callable[[int], None] | None = None,
) -> Checked:
    """Recompute every line of a log from a dataset (None: the one that it names), every byte of which is checked too.

    `heads` are the hashes that checkpoints keep, by a name for each. `progress` is told of steps that were read.
    """
    place = Path(log)
    found = read_log(place)
    checker = _Checker(dataset, progress)
    result = Checked(len(found))
    torn: list[Torn] = []
    for number, line in enumerate(found, start=1):
        if isinstance(line, Torn):
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


def _at_fault(result: Checked, fault: str, checker: _Checker) -> Checked:
    result.fault, result.steps = fault, checker.steps
    return result


def _anchors(place: Path, found: Sequence[Line | Torn], heads: Mapping[str, str]) -> tuple[str | None, int]:
    """The fault if a head is no line's hash, and how many lines come after the last head."""
    numbers = {line.sha256: number for number, line in enumerate(found, start=1) if isinstance(line, Line)}
    last = max((numbers.get(head, 0) for head in heads.values()), default=0)
    for name, head in heads.items():
        if head not in numbers:
            lines = f"lines after {last}" if last else "some of its lines"
            return f"{place}: no line has the hash {head[:12]}… that {name} keeps; {lines} are changed or gone", 0
    return None, sum(number > last for number in numbers.values())


class _Run(NamedTuple):
    """What a dataset_load line says of the lines after it."""

    plan: Plan
    every: int
    """Steps that a digest covers at most."""
    rows: int | None
    """Rows of a step that it covers: those of rank 0, or None for all."""
    said: Mapping[str, str]


def _loaded(line: Line, dataset: str | Path | None) -> _Run:
    """The run that a dataset_load line begins, with the dataset open and found to be the one it names."""
    try:
        values = json.loads(line.fields.get("config", ""))
    except (ValueError, RecursionError) as error:
        raise MismatchError(f"config cannot be read ({one_line(str(error))})") from None
    if not isinstance(values, dict):
        raise MismatchError("config cannot be read; expected a JSON object")
    config = LoadConfig.from_mapping(values)
    every, world = _number(line, "digest_steps", 1), _number(line, "world_size", 1)
    sources, config = open_sources(dataset or line.fields.get("dataset", ""), config)
    splits = [name for name in sources[0].dataset.splits if all(name in source for source in sources)]
    plan = Plan(sources, config, line.fields.get("split", ""))
    told = {name: line.fields.get(name, "") for name in ("dataset", "world_size", "ranks", "digest_steps")}
    _compare(line, {**audit.dataset_fields(sources, plan, splits), **told})
    return _Run(plan, every, None if told["ranks"] == "all" else config.batch_size // world, line.fields)


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
        self._run: _Run | None = None
        self._reached = _Reached()
        self._due: list[tuple[str, dict[str, Any]]] = [("dataset_load", {})]
        """Lines that must come next."""
        self._checkpoints: dict[str, tuple[int, _Reached]] = {}
        self._heads: dict[str, int] = {START: 0}
        self.lines = 0
        self.steps = 0

    def read(self, line: Line, torn: Sequence[Torn]) -> int:
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
                self._run = _loaded(line, self._dataset)
            del self._due[0]
        elif self._due:
            _compare(line, self._due[0][1])
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
            check = verify_cache if isinstance(source.dataset, Cache) else verify
            for fault in check(source.path, full=True).faults:
                return fault
        return None

    def _resume(self, line: Line, torn: Sequence[Torn]) -> int:
        head = line.fields.get("head", "")
        if head not in self._checkpoints:
            raise MismatchError(f"goes on from {one_line(head, 12)}, which is no checkpoint before it")
        number, self._reached = self._checkpoints[head]
        said = {"head": head, "abandoned": self.lines - number, **self._reached.at._asdict()}
        _compare(line, said | (torn_fields(torn) if torn else {}))
        self._due = [("dataset_load", {})]
        return self.lines - number

    def _follow(self, line: Line) -> None:
        assert self._run is not None
        plan, (at, started, given) = self._run.plan, self._reached
        if line.action == "epoch_start":
            if started or not plan.step(at).begins_epoch:
                raise MismatchError(
                    f"begins epoch {one_line(line.fields.get('epoch', ''))} in the middle of {at.epoch}"
                )
            _compare(line, audit.start_fields(plan, at.epoch))
            self._reached = self._reached._replace(started=True)
        elif line.action == "steps":
            self._steps(line, self._run)
        elif line.action == "checkpoint":
            _compare(line, at._asdict())
        elif line.action == "mix" and given:
            _compare(line, audit.mix_fields(plan, given))
        else:
            raise MismatchError(f"is {one_line(line.action)}, which cannot come here")

    def _steps(self, line: Line, run: _Run) -> None:
        plan, (at, started, given) = run.plan, self._reached
        first, stop = _number(line, "first_step", 0), _number(line, "stop_step", 1)
        if first != at.step or not first < stop <= first + run.every:
            raise MismatchError(f"holds steps {first} to {stop}; expected at most {run.every} from {at.step} on")
        if plan.step(at).begins_epoch and not started:
            raise MismatchError(f"holds steps of epoch {at.epoch}, which no line begins")
        made = Recomputed(plan, at, stop, rows=run.rows)
        if self._progress is not None:
            self._progress(len(made.steps))
        _compare(line, audit.steps_fields(plan, made.steps, made.digest, made.given))
        last = made.steps[-1]
        self.steps += len(made.steps)
        if made.given is not None:
            given = audit.added(given, [source.name for source in plan.sources], made.given)
        self._reached = _Reached(last.after, started and not last.ends_epoch, given)
        if last.ends_epoch:
            epoch = last.at.epoch
            self._due = [("drop_last", audit.drop_fields(epoch, last))] if len(last.dropped) else []
            self._due.append(("epoch_complete", audit.complete_fields(plan, epoch, last)))


class Recomputed:
    """Some steps, with their rows read again: the first `rows` of each (None: all)."""

    def __init__(self, plan: Plan, at: Cursor, stop: int, *, rows: int | None = None) -> None:
        self.steps: list[Step] = []
        self.digest: NDArray[np.uint64] = np.zeros(2, dtype=np.uint64)
        self.given: Index | None = None
        for step in plan.steps(at):
            batch, given = read_batch(plan, step, rows)
            self.steps.append(step)
            self.digest = self.digest + row_digests(batch, step=step.at.step, first_row=0).sum(axis=0, dtype=np.uint64)
            if given is not None:
                self.given = given if self.given is None else self.given + given
            if step.after.step >= stop:
                return
            if step.ends_epoch:
                raise MismatchError(f"holds steps up to {stop}, and the epoch ends with step {step.at.step}")


def read_batch(plan: Plan, step: Step, rows: int | None = None) -> tuple[Batch, Index | None]:
    """The first rows of a step as they are handed out, and what each source has in them."""
    count = plan.config.batch_size if rows is None else rows
    chosen = step.rows(0, count)
    assert plan.config.pad_token_id is not None
    batch, _ = assemble(
        plan.reader,
        chosen.episodes,
        chosen.first,
        num_rows=count,
        block_size=plan.config.block_size,
        pad_token_id=plan.config.pad_token_id,
        use_loss_mask=plan.config.use_loss_mask,
    )
    return batch, tally(plan, chosen, batch)


def _compare(line: Line, expected: Mapping[str, Any]) -> None:
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


def _number(line: Line, name: str, least: int) -> int:
    text = line.fields.get(name, "")
    if not text.isascii() or not text.isdigit() or len(text) > DIGITS or int(text) < least:
        raise MismatchError(f"{line.action} says {name} {one_line(text)}; expected a whole number from {least} on")
    return int(text)


# Replay.


@dataclass(frozen=True)
class Replayed:
    """A step of a run with its rows, and the line of the log whose digest they have."""

    plan: Plan
    step: Step
    batch: Batch
    line: int


def replay(log: str | Path, step: int, dataset: str | Path | None = None) -> Replayed:
    """The rows of a step as they were handed out, from the dataset that the log names or this one.

    They are the rows only if they have the digest that was logged: `DataError` if not.
    """
    place = Path(log)
    lines = _surviving(read_log(place))
    loaded: Line | None = None
    covered = 0
    for number, line in lines:
        loaded = line if line.action == "dataset_load" else loaded
        if line.action != "steps" or loaded is None:
            continue
        try:
            first, stop = _number(line, "first_step", 0), _number(line, "stop_step", 1)
            covered = max(covered, stop)
            if not first <= step < stop:
                continue
            plan, every, rows, _ = _loaded(loaded, dataset)
            if stop > first + every:
                raise MismatchError(f"holds steps {first} to {stop}; expected at most {every}")
            at = Cursor(first, *(_number(line, name, 0) for name in ("epoch", "window", "row")))
            plan.check(at)
            made = Recomputed(plan, at, stop, rows=rows)
            _compare(line, audit.steps_fields(plan, made.steps, made.digest, made.given))
        except ChatmillError as error:
            raise DataError(f"{place}:{number}: {error}") from None
        found = next(each for each in made.steps if each.at.step == step)
        return Replayed(plan, found, read_batch(plan, found)[0], number)
    raise UsageError(f"{place}: step {step} is not in it; expected one below {covered}")


def _surviving(found: Sequence[Line | Torn]) -> list[tuple[int, Line]]:
    """The lines that no resumed run left behind, with their numbers."""
    kept: list[tuple[int, Line]] = []
    for number, line in enumerate(found, start=1):
        if not isinstance(line, Line):
            continue
        if line.action == "resume":
            heads = [each.sha256 for _, each in kept]
            head = line.fields.get("head", "")
            kept = kept[: heads.index(head) + 1] if head in heads else kept
        kept.append((number, line))
    return kept
