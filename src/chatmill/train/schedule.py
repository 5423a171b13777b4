"""The learning rate: a pure function of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass


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

    def __call__(self, step: int) -> float:
        """The rate of a step; the first is 0."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        if self.shape == "constant":
            return self.peak
        way = min(1.0, (step - self.warmup) / max(1, self.total - self.warmup))
        left = 1 - way if self.shape == "linear" else (1 + math.cos(math.pi * way)) / 2
        return self.floor + (self.peak - self.floor) * left
