"""Health: counts over the rollouts of a run or a file."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from chatmill.rollout.target import Target


@dataclass
class Health:
    """Sums over targets."""

    rollouts: int = 0
    valid: int = 0
    """Valid objects in the rollouts."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Entries that are no valid object, by reason."""
    truncated: int = 0
    """Rollouts whose tokens ended before the answer did."""
    fallback: Counter[str] = field(default_factory=Counter)
    """Rollouts of which nothing was kept, by reason."""
    broken: int = 0
    """Targets that are not JSON, because a kept body is not."""
    matched: int = 0
    missed: int = 0
    """True objects that were matched, and those that were missed and are appended."""
    false_positives: int = 0
    gated: int = 0
    """Pairs that overlap, but too little."""
    slots: int = 0
    too_long: int = 0
    """Prompts and targets longer than the model's positions, which are left out."""
    rollout_tokens: int = 0
    kept_tokens: int = 0
    target_tokens: int = 0
    trained_tokens: int = 0

    def add(self, target: Target, rollout_tokens: int) -> None:
        self.rollouts += 1
        self.valid += len(target.valid_objects)
        self.dropped.update(target.dropped)
        self.truncated += target.truncated
        if target.fallback is not None:
            self.fallback[target.fallback] += 1
        self.broken += not target.target_is_json
        self.matched += len(target.matched)
        self.missed += len(target.missed)
        self.false_positives += len(target.valid_objects) - len(target.matched)
        self.gated += target.gated
        self.slots += target.slots
        self.rollout_tokens += rollout_tokens
        self.kept_tokens += target.kept
        self.target_tokens += len(target.ids)
        self.trained_tokens += int(target.rows.mask().sum())

    def merge(self, other: Health) -> None:
        for name, value in vars(other).items():
            mine = getattr(self, name)
            setattr(self, name, mine + value)

    def to_json(self) -> dict[str, Any]:
        """All counts, reasons in order of their names."""
        return {
            name: dict(sorted(value.items())) if isinstance(value, Counter) else value
            for name, value in vars(self).items()
        }
