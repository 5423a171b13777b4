"""Score: recall and precision of answers, by a stricter rule than training uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from chatmill.rollout.match import match_objects


class DetectionScore(NamedTuple):
    """Counts over any number of answers."""

    correct: int = 0
    """Predicted objects with the description of a true one and enough overlap."""
    predicted: int = 0
    true: int = 0

    def plus(self, other: DetectionScore) -> DetectionScore:
        return DetectionScore(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    @property
    def recall(self) -> float:
        return self.correct / self.true if self.true else 1.0

    @property
    def precision(self) -> float:
        return self.correct / self.predicted if self.predicted else 1.0

    @property
    def f1(self) -> float:
        return 2 * self.correct / (self.predicted + self.true) if self.predicted + self.true else 1.0


def score_objects(
    predicted: Sequence[Mapping[str, Any]], truth: Sequence[Mapping[str, Any]], *, overlap: float = 0.5
) -> DetectionScore:
    """The score of one answer: objects are matched within each description, by overlap."""
    correct = 0
    for desc in {thing["desc"] for thing in truth}:
        mine, theirs = ([thing for thing in things if thing["desc"] == desc] for things in (predicted, truth))
        correct += len(match_objects(mine, theirs, gate=overlap).pairs)
    return DetectionScore(correct, len(predicted), len(truth))
