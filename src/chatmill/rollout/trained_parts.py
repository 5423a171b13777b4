"""Build the training row for a rollout, with the label and weight of each token."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from chatmill.errors import UsageError
from chatmill.rows import NO_FILE, ORIGIN, OWN_ID, SPAN, Ids, Index, Part, Role, Rows, Rule, Table

RULES = np.full((2, 256), Rule.MISSED, dtype=np.uint8)
"""The rule of each `Part`, as `RULES[train_values, part]`."""
RULES[:, Part.PREFIX], RULES[:, Part.SLOT], RULES[0, Part.VALUE] = Rule.ROLLOUT, Rule.MATCHED, Rule.VALUES_OFF
IS_TRAINED = np.ones(256, dtype=np.float32)
IS_TRAINED[[Rule.ROLLOUT, Rule.VALUES_OFF]] = 0


@dataclass(frozen=True)
class PartWeights:
    """The loss weight of each kind of token in the training row for a rollout."""

    slot: float = 1.0
    """Weight of the coordinates of matched objects."""
    append: float = 1.0
    """Weight of appended objects."""
    end: float = 1.0
    """Weight of the closing brace and EOS."""
    surplus: float = 0.0
    """Weight of the target that closes the answer if the rollout continues after the last true object."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (math.isfinite(value) and value >= 0):
                raise UsageError(f"{name} is {value}; expected a number of at least 0")

    def of_parts(self) -> NDArray[np.float32]:
        weights = np.full(256, self.append, dtype=np.float32)
        weights[Part.SLOT], weights[[Part.BRACE, Part.EOS]] = self.slot, self.end
        return weights


EVEN = PartWeights()


def target_row(
    ids: Ids,
    parts: bytes,
    slots: tuple[Index, Index],
    closing: tuple[int, int] | None,
    *,
    train_values: bool,
    weights: PartWeights,
) -> Rows:
    """Return the training row for a rollout; `slots` and `closing` contain token positions and their label ids."""
    part = np.frombuffer(bytearray(parts), dtype=np.uint8)
    part[slots[0]] = Part.SLOT
    target = np.full(len(ids), OWN_ID, dtype=np.int32)
    target[slots[0]] = slots[1]
    if closing is not None:
        part[closing[0]], target[closing[0]] = Part.BRACE, closing[1]
    # Other tokens separate the slots, so each slot is its own span.
    changes = np.flatnonzero(part[1:] != part[:-1])
    bounds = np.empty(len(changes) + 2, dtype=np.int64)
    bounds[0], bounds[1:-1], bounds[-1] = 0, changes + 1, len(ids)
    start = bounds[:-1]
    of_span = part[start]
    spans = np.zeros(len(start), dtype=SPAN)
    spans["length"], spans["part"], spans["role"] = bounds[1:] - start, of_span, Role.ASSISTANT
    spans["target"] = target[start]
    rules, weight = _of_parts(train_values, weights)
    spans["rule"], spans["weight"] = rules[of_span], weight[of_span]
    if closing is not None:
        surplus = np.searchsorted(start, closing[0])
        spans["rule"][surplus], spans["weight"][surplus] = Rule.SURPLUS, weights.surplus
    return one_row(ids, spans)


@lru_cache
def _of_parts(train_values: bool, weights: PartWeights) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    rules = RULES[int(train_values)]
    return rules, IS_TRAINED[rules] * weights.of_parts()


def one_row(ids: Ids, spans: Table) -> Rows:
    """Return a single row with these token ids and spans. The row is one conversation that comes from no file."""
    origins = np.zeros(1, dtype=ORIGIN)
    origins["file"] = NO_FILE
    return Rows(ids, spans, np.array([0, len(spans)], dtype=np.int64), origins, np.array([0, 1], dtype=np.int64))
