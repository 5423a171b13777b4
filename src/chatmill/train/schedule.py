"""The learning rate: a pure function of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

from chatmill.train.config import OptimizerConfig


@dataclass(frozen=True)
class LRSchedule:
    """Rises for `warmup` steps to `peak`, then falls to `floor` at step `total`.

      peak      /‾‾\\__
               /      ‾\\__ floor
    step      0  warmup   total
    """

    peak: float
    floor: float
    warmup: int
    total: int
    shape: str
    """cosine, linear or constant."""

    @classmethod
    def of(cls, settings: OptimizerConfig, *, warmup: int, total: int) -> Self:
        """The schedule of a config."""
        peak = settings.learning_rate
        return cls(peak, peak * settings.min_lr_ratio, warmup, total, settings.lr_schedule)

    def __call__(self, step: int) -> float:
        """The learning rate of a step; the first is 0."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        if self.shape == "constant":
            return self.peak
        progress = min(1.0, (step - self.warmup) / max(1, self.total - self.warmup))
        factor = 1 - progress if self.shape == "linear" else (1 + math.cos(math.pi * progress)) / 2
        return self.floor + (self.peak - self.floor) * factor
