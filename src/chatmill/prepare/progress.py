"""How far a build is, source by source."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from chatmill.prepare.job import InputSource, Job
from chatmill.prepare.unit import Done, Unit
from chatmill.records.files import shown
from chatmill.remote.urls import place


@dataclass(frozen=True)
class BuildProgress:
    """Progress of a build: `step` is check (of units to resume), render (in bytes of input) or write (in tokens).

    When a job has several sources, rendering is reported for each of them: all numbers are of `source` alone.
    """

    step: str
    done: int
    total: int
    rows: int
    tokens: int
    source: str = ""
    """The name of the source that is rendered; empty if the job has one source, and in other steps."""
    resumed: int = 0
    """How much of `done` was taken over from an interrupted build."""


def source_title(source: InputSource) -> str:
    """The name of a source; without one, its first input."""
    return source.name or shown(place(source.inputs[0]))


class SourceProgress:
    """Counts the units of each source that are rendered."""

    def __init__(self, job: Job, units: Sequence[Unit]) -> None:
        self._names = [source_title(source) for source in job.sources] if len(job.sources) > 1 else [""]
        self._total, self._done, self._resumed = Counter[int](), Counter[int](), Counter[int]()
        self._rows, self._tokens = Counter[int](), Counter[int]()
        for unit in units:
            self._total[unit.source] += unit.size

    def after(self, unit: Unit, done: Done) -> BuildProgress:
        """The progress of the source of a unit after that unit."""
        source, rendered = unit.source, done.ledger.total("rendered")
        self._done[source] += unit.size
        self._resumed[source] += unit.size if done.resumed else 0
        self._rows[source] += rendered.rows
        self._tokens[source] += rendered.tokens
        return BuildProgress(
            "render",
            self._done[source],
            self._total[source],
            self._rows[source],
            self._tokens[source],
            self._names[source],
            self._resumed[source],
        )
