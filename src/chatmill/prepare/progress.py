"""Progress of a build, per source."""

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
    """Progress of a build. `done` counts input bytes in the steps "check" and "render", and tokens in the step "write".

    If a job has several sources, rendering is reported per source: all numbers refer to `source`.
    """

    step: str
    done: int
    total: int
    rows: int
    tokens: int
    source: str = ""
    """Name of the source being rendered; empty in other steps, and if the job has only one source."""
    resumed: int = 0
    """The part of `done` that was reused from an interrupted build."""


def source_title(source: InputSource) -> str:
    """Return the name of a source, or its first input if it has no name."""
    return source.name or shown(place(source.inputs[0]))


class SourceProgress:
    """Tracks the rendering progress of each source."""

    def __init__(self, job: Job, units: Sequence[Unit]) -> None:
        self._names = [source_title(source) for source in job.sources] if len(job.sources) > 1 else [""]
        self._total, self._done, self._resumed = Counter[int](), Counter[int](), Counter[int]()
        self._rows, self._tokens = Counter[int](), Counter[int]()
        for unit in units:
            self._total[unit.source] += unit.size

    def after(self, unit: Unit, done: Done) -> BuildProgress:
        """Count a unit as done, and return the progress of its source."""
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
