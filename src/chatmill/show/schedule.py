"""When an episode comes: its place in an epoch's order, its neighbours in a packed row, the rows of a logged step."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from chatmill.audit.log import LogLine, TornLine, read_log
from chatmill.audit.replay import replay
from chatmill.errors import UsageError
from chatmill.load.config import LoadConfig
from chatmill.load.plan import WINDOW, Cursor, LoadPlan
from chatmill.load.source import open_sources
from chatmill.show.text import visible

NEIGHBOURS = 3


@dataclass(frozen=True)
class OrderPage:
    """Some positions of an epoch, and the episodes that stand there."""

    order: str
    seed: int
    epoch: int
    length: int | None
    """Positions in the epoch; None if it never ends."""
    start: int
    episodes: list[int]


@dataclass(frozen=True)
class Whereabouts:
    """Where an episode stands in an epoch, and what stands beside it."""

    order: str
    seed: int
    epoch: int
    position: int
    before: list[int]
    after: list[int]
    window: int
    row: int
    """The row of its window that it is laid in."""
    shares_row_with: list[int]


class OrderView:
    """The order of a dataset under a configuration, whose seed and epoch may be varied."""

    def __init__(self, path: Path, config: LoadConfig) -> None:
        # What is nothing to the order is left out, so that a dataset that lacks it has one all the same. The last
        # rows of an epoch are kept, because where an episode is packed does not depend on what becomes of its row.
        self.config = replace(config, pad_token_id=0, use_loss_mask=False, mix_sft=None, epoch_drop_last=False)
        self._path = path
        self.plan = lru_cache(maxsize=4)(self._plan)

    def _plan(self, split: str, seed: int) -> LoadPlan:
        sources, config = open_sources(self._path, replace(self.config, epoch_seed=seed))
        return LoadPlan(sources, config, split)

    def page(self, split: str, *, seed: int, epoch: int, start: int, limit: int) -> OrderPage:
        plan = self.plan(split, seed)
        length = plan.order.length
        stop = start + limit if length is None else min(start + limit, length)
        episodes = plan.episodes(plan.order.block(epoch, start, max(start, stop))).tolist()
        return OrderPage(plan.order.name, seed, epoch, length, start, episodes)

    def find(self, split: str, episode: int, *, seed: int, epoch: int) -> Whereabouts:
        plan = self.plan(split, seed)
        position = plan.order.find(epoch, plan.ordinal(episode))
        number = position // WINDOW
        row, together = (
            _row_of(plan, episode, epoch, number) if self.config.packing != "none" else (position % WINDOW, [])
        )
        first, length = max(0, position - NEIGHBOURS), plan.order.length or 0
        around = plan.episodes(plan.order.block(epoch, first, min(length, position + NEIGHBOURS + 1))).tolist()
        return Whereabouts(
            plan.order.name,
            seed,
            epoch,
            position,
            around[: position - first],
            around[position - first + 1 :],
            number,
            row,
            [each for each in together if each != episode],
        )


def _row_of(plan: LoadPlan, episode: int, epoch: int, window: int) -> tuple[int, list[int]]:
    """The row of a window that an episode is packed in, and all that are in it."""
    for step in plan.steps(Cursor(epoch=epoch, window=window)):
        found = np.flatnonzero(step.episodes == episode)
        if len(found):
            row = int(np.searchsorted(step.first, found[0], side="right")) - 1
            return step.at.row + row, step.episodes[step.first[row] : step.first[row + 1]].tolist()
    raise AssertionError("steps have no end")


# Audit logs.


@dataclass(frozen=True)
class TimelineLine:
    """A line of an audit log, as it may be shown."""

    number: int
    time: str
    action: str
    fields: dict[str, str]
    abandoned: bool
    """A resumed run left it behind."""


@dataclass(frozen=True)
class StepRows:
    """What a run was handed out at a step: the episodes of each row, as the dataset gives and the log confirms them."""

    step: int
    epoch: int
    split: str
    line: int
    """The line of the log whose digest they have."""
    rows: list[list[int]]


def audit_logs(places: Sequence[Path]) -> list[Path]:
    """The logs that files and folders stand for."""
    found: list[Path] = []
    for place in places:
        logs = sorted(place.glob("*.log")) if place.is_dir() else [place]
        if not logs or not all(log.is_file() for log in logs):
            raise UsageError(f"{place}: is no audit log, and no folder that holds one")
        found += logs
    return found


def timeline(log: Path) -> list[TimelineLine]:
    """All lines of a log in order."""
    lines: list[TimelineLine] = []
    hashes: dict[str, int] = {}
    left: set[int] = set()
    for number, line in enumerate(read_log(log), 1):
        if isinstance(line, TornLine):
            lines.append(TimelineLine(number, "", "torn", {"why": visible(line.why, limit=300)}, False))
            continue
        assert isinstance(line, LogLine)
        if line.action == "resume" and (head := hashes.get(line.fields.get("head", ""))) is not None:
            left |= set(range(head + 1, number))
        hashes[line.sha256] = number
        fields = {name: visible(value, limit=300) for name, value in line.fields.items()}
        lines.append(TimelineLine(number, line.time, visible(line.action, limit=40), fields, False))
    return [replace(line, abandoned=line.number in left) for line in lines]


def rows_at(log: Path, step: int, dataset: Path) -> StepRows:
    """The rows of a step, read again from the dataset and held against the log."""
    found = replay(log, step, dataset)
    episodes, first = found.step.episodes.tolist(), found.step.first.tolist()
    rows = [episodes[start:stop] for start, stop in itertools.pairwise(first)]
    return StepRows(step, found.step.at.epoch, found.plan.split, found.line, rows)
