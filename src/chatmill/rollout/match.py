"""Match: assign predicted objects to true ones.

Pairs whose overlap is below the gate are excluded. Of all assignments of the others the one with the largest sum of
overlaps is taken; of equal sums the one that assigns the first predicted object to the first true one, and so on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.errors import UsageError

GATE = 0.3
STEPS = 2**30
"""Overlaps are compared in steps of 1/STEPS: sums of integers do not depend on their order, so that ties are exact."""

MISSING = "matching needs {}: pip install 'chatmill[rollout]'"

Floats = NDArray[np.float64]
Steps = NDArray[np.int64]
Index = NDArray[np.int64]


@dataclass(frozen=True)
class Matching:
    """Numbers of predicted and true objects: each is in a pair, or among the false positives or the missed."""

    pairs: tuple[tuple[int, int], ...]
    """(predicted, true), in the order of the predicted ones."""
    false_positives: tuple[int, ...]
    missed: tuple[int, ...]
    gated: int = 0
    """Pairs that overlap, but less than the gate."""


def match_objects(
    predicted: Sequence[Mapping[str, Any]], truth: Sequence[Mapping[str, Any]], *, gate: float = GATE
) -> Matching:
    """The best assignment of predicted to true objects by overlap, whatever their descriptions.

    Objects have `bbox_2d` [x1, y1, x2, y2] or `poly` [x1, y1, x2, y2, …], in whole numbers.
    """
    if not 0 < gate <= 1:
        raise UsageError(f"a gate of {gate:g} cannot be; give a number over 0, up to 1")
    mine, true, overlap = _near_overlaps(predicted, truth)
    feasible = overlap >= gate
    steps = np.rint(overlap[feasible] * STEPS).astype(np.int64).tolist()
    pairs = zip(mine[feasible].tolist(), true[feasible].tolist(), strict=True)
    gated = int(np.count_nonzero(overlap > 0)) - len(steps)
    return _matching(_assign(dict(zip(pairs, steps, strict=True))), len(predicted), len(truth), gated=gated)


def match_equal(predicted: Sequence[Any], truth: Sequence[Any]) -> Matching:
    """Each predicted thing with the first equal true one that is left, compared as JSON."""
    left: dict[Any, list[int]] = {}
    for number in range(len(truth) - 1, -1, -1):
        left.setdefault(_identity(truth[number]), []).append(number)
    pairs = []
    for number, thing in enumerate(predicted):
        if same := left.get(_identity(thing)):
            pairs.append((number, same.pop()))
    return _matching(pairs, len(predicted), len(truth))


def overlaps(predicted: Sequence[Mapping[str, Any]], truth: Sequence[Mapping[str, Any]]) -> Floats:
    """Intersection over union of each predicted object with each true one; shapes without area overlap themselves."""
    out = np.zeros((len(predicted), len(truth)))
    mine, true, overlap = _near_overlaps(predicted, truth)
    out[mine, true] = overlap
    return out


def _near_overlaps(
    predicted: Sequence[Mapping[str, Any]], truth: Sequence[Mapping[str, Any]]
) -> tuple[Index, Index, Floats]:
    """Pairs whose bounding boxes intersect, in the order of the predicted ones, and their overlaps."""
    left, right = _bounds(predicted), _bounds(truth)
    width = np.minimum.outer(left[:, 2], right[:, 2]) - np.maximum.outer(left[:, 0], right[:, 0])
    height = np.minimum.outer(left[:, 3], right[:, 3]) - np.maximum.outer(left[:, 1], right[:, 1])
    mine, true = np.nonzero((width >= 0) & (height >= 0))
    areas = [(box[:, 2] - box[:, 0]) * (box[:, 3] - box[:, 1]) for box in (left, right)]
    shared = width[mine, true] * height[mine, true]
    overlap = _ratio(shared, areas[0][mine], areas[1][true], np.all(left[mine] == right[true], axis=1))
    if any("poly" in thing for things in (predicted, truth) for thing in things):
        polygons = ~(_are_boxes(predicted)[mine] & _are_boxes(truth)[true])
        if polygons.any():
            overlap[polygons] = _polygon_overlaps(predicted, truth, mine[polygons], true[polygons])
    return mine, true, overlap


def _bounds(things: Sequence[Mapping[str, Any]]) -> Floats:
    """x1, y1, x2, y2 of the bounding box of each thing."""
    around = [thing.get("bbox_2d") or _around(thing["poly"]) for thing in things]
    return np.array(around, dtype=np.float64).reshape(-1, 4)


def _around(points: Sequence[int]) -> list[int]:
    xs, ys = points[::2], points[1::2]
    return [min(xs), min(ys), max(xs), max(ys)]


def _are_boxes(things: Sequence[Mapping[str, Any]]) -> NDArray[np.bool_]:
    return np.array(["bbox_2d" in thing for thing in things], dtype=np.bool_)


def _ratio(shared: Floats, one: Floats, other: Floats, equal: NDArray[np.bool_]) -> Floats:
    union = one + other - shared
    # Points and lines have no area: they overlap only if they are equal.
    return np.where(union > 0, shared / np.where(union > 0, union, 1), equal)


def _polygon_overlaps(
    predicted: Sequence[Mapping[str, Any]], truth: Sequence[Mapping[str, Any]], mine: NDArray[Any], true: NDArray[Any]
) -> Floats:
    try:
        import shapely
    except ImportError:
        raise UsageError(MISSING.format("shapely")) from None

    def shapes(things: Sequence[Mapping[str, Any]], wanted: NDArray[Any]) -> NDArray[Any]:
        numbers, which = np.unique(wanted, return_inverse=True)
        rings = [_ring(things[number]) for number in numbers]
        corners = np.concatenate(rings)
        of_ring = np.repeat(np.arange(len(rings)), [len(ring) for ring in rings])
        # A self-intersecting polygon has the area of the even-odd rule.
        made = shapely.make_valid(shapely.polygons(shapely.linearrings(corners, indices=of_ring)))
        return np.asarray(made, dtype=object)[which]

    one, other = shapes(predicted, mine), shapes(truth, true)
    shared = shapely.area(shapely.intersection(one, other))
    return _ratio(shared, shapely.area(one), shapely.area(other), shapely.equals(one, other))


def _ring(thing: Mapping[str, Any]) -> Floats:
    if "poly" in thing:
        return np.array(thing["poly"], dtype=np.float64).reshape(-1, 2)
    x1, y1, x2, y2 = thing["bbox_2d"]
    return np.array([(x1, y1), (x2, y1), (x2, y2), (x1, y2)], dtype=np.float64)


def _matching(pairs: Sequence[tuple[int, int]], predicted: int, true: int, *, gated: int = 0) -> Matching:
    false_positives = set(range(predicted)) - {pair[0] for pair in pairs}
    missed = set(range(true)) - {pair[1] for pair in pairs}
    return Matching(tuple(pairs), tuple(sorted(false_positives)), tuple(sorted(missed)), gated)


def _assign(steps: Mapping[tuple[int, int], int]) -> list[tuple[int, int]]:
    """The best of these pairs, in the order of the predicted objects; independent groups are assigned separately."""
    rows, columns = ({pair[side] for pair in steps} for side in (0, 1))
    if len(rows) == len(columns) == len(steps):
        return list(steps)
    pairs: list[tuple[int, int]] = []
    for group in _groups(steps):
        rows, columns = ({pair[side] for pair in group} for side in (0, 1))
        if min(len(rows), len(columns)) == 1:
            pairs.append(max(group, key=lambda pair: (steps[pair], -pair[0], -pair[1])))
        else:
            in_order = sorted(rows), sorted(columns)
            worth = np.array([[steps.get((row, column), -1) for column in in_order[1]] for row in in_order[0]])
            chosen = _assign_group(np.maximum(worth, 0), worth >= 0)
            pairs += [(in_order[0][row], in_order[1][column]) for row, column in chosen]
    return sorted(pairs)


def _groups(pairs: Iterable[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Feasible pairs in groups that share objects."""
    of_row: dict[int, list[tuple[int, int]]] = {}
    of_column: dict[int, list[tuple[int, int]]] = {}
    for row, column in pairs:
        one, other = of_row.setdefault(row, []), of_column.setdefault(column, [])
        if one is not other:
            for pair in other:
                of_row[pair[0]] = of_column[pair[1]] = one
            of_column[column] = one
            one += other
        one.append((row, column))
    return list({id(group): group for group in of_row.values()}.values())


def _assign_group(steps: Steps, feasible: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """The pairs with the largest sum; of equal sums, row by row the first column that still allows it."""
    allowed = feasible.copy()
    best = _largest_sum(steps, allowed)
    pairs = []
    for row in range(len(steps)):
        options = np.flatnonzero(allowed[row]).tolist()
        for column in options:
            tried = allowed.copy()
            tried[row], tried[:, column] = False, False
            if steps[row, column] + _largest_sum(steps, tried) == best:
                best -= int(steps[row, column])
                allowed = tried
                pairs.append((row, column))
                break
        # A row for which no column keeps the sum stays unassigned.
        allowed[row] = False
    return pairs


def _largest_sum(steps: Steps, allowed: NDArray[np.bool_]) -> int:
    """The largest sum of any assignment; an unassigned row adds nothing."""
    if not allowed.any():
        return 0
    try:
        from scipy.optimize import linear_sum_assignment
    except ImportError:
        raise UsageError(MISSING.format("scipy")) from None
    worth = np.where(allowed, steps, 0)
    return int(worth[linear_sum_assignment(worth, maximize=True)].sum())


def _identity(thing: Any) -> Any:
    """A hashable value, equal for equal JSON: true is not 1, and the order of fields does not matter."""
    if isinstance(thing, Mapping):
        return frozenset((key, _identity(value)) for key, value in thing.items())
    return (type(thing).__name__, thing)


# Recall and precision of answers, by a stricter rule than training uses.


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
