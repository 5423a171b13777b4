"""A loader listener that reports batches to the audit log after the training step, not when they are prefetched."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.audit import Audit
from chatmill.load.plan import LoadPlan, PlannedStep
from chatmill.rows import Index

if TYPE_CHECKING:
    from chatmill.load.loader import EpisodeLoader


class FetchedStep(NamedTuple):
    """A step whose batch was fetched, and the calls that report the step to the audit log."""

    step: int
    calls: list[Callable[[], None]]


class TrainedSteps:
    """Reports trained steps to an audit log; pass an instance to `EpisodeLoader` as `listener`."""

    def __init__(self, audit: Audit) -> None:
        self.audit = audit
        self._fetched: deque[FetchedStep] = deque()
        self._epoch_start: list[Callable[[], None]] = []
        """The call that reports the start of an epoch, just before the report of the epoch's first batch."""

    def report(self, steps: int) -> None:
        """Report all fetched steps with a number below `steps`."""
        while self._fetched and self._fetched[0].step < steps:
            for call in self._fetched.popleft().calls:
                call()

    def forget(self) -> None:
        """Discard the steps that were fetched but not reported, for example when the loader is rewound."""
        self._fetched.clear()
        self._epoch_start = []

    # Methods that the loader calls.

    def loaded(self, loader: EpisodeLoader) -> None:
        self.audit.loaded(loader)

    def epoch_started(self, plan: LoadPlan, epoch: int) -> None:
        self._epoch_start = [partial(self.audit.epoch_started, plan, epoch)]

    def delivered(
        self, plan: LoadPlan, step: PlannedStep, digest: NDArray[np.uint64], source_counts: Index | None
    ) -> None:
        delivered = partial(self.audit.delivered, plan, step, digest, source_counts)
        self._fetched.append(FetchedStep(step.at.step, [*self._epoch_start, delivered]))
        self._epoch_start = []

    def epoch_completed(self, plan: LoadPlan, epoch: int, step: PlannedStep) -> None:
        self._fetched[-1].calls.append(partial(self.audit.epoch_completed, plan, epoch, step))
