"""Match predicted objects to true objects.

Pairs with an overlap (IoU) below the threshold `gate` are never matched. The assignment maximizes the sum of overlaps.
On a tie, earlier predicted objects are matched first, then earlier true objects.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.errors import UsageError

try:
    from chatmill._native import _rollout
except ImportError:  # pragma: no cover
    _rollout = None  # type: ignore[assignment]

GATE = 0.3
STEPS = 2**30
"""Overlaps are rounded to multiples of 1/STEPS, so that ties are detected exactly."""

FEW = 128
"""Groups with at most this many possible assignments are solved by brute force."""
MISSING = "matching requires {}; run pip install 'chatmill[rollout]'"

Floats = NDArray[np.float64]
Steps = NDArray[np.int64]
Index = NDArray[np.int64]


@dataclass(frozen=True)
class Matching:
    """Indices of matched pairs, of unmatched predictions, and of unmatched true objects (`missed`)."""

    pairs: tuple[tuple[int, int], ...]
    """Index pairs (predicted, true), sorted."""
    false_positives: tuple[int, ...]
    missed: tuple[int, ...]
    gated: int = 0
    """Number of pairs whose overlap is above zero but below the gate."""


def match_objects(
    predicted: Sequence[Mapping[str, Any]], truth: Sequence[Mapping[str, Any]], *, gate: float = GATE
) -> Matching:
    """Match predicted to true objects by overlap, ignoring descriptions.

    Each object has integer coordinates `bbox_2d` [x1, y1, x2, y2] or `poly` [x1, y1, x2, y2, …].
    """
    if not 0 < gate <= 1:
        raise UsageError(f"gate is {gate:g}; expected a number above 0 and at most 1")
    mine, true, overlap = _near_overlaps(predicted, truth)
    feasible = np.flatnonzero(overlap >= gate)
    gated = int(np.count_nonzero(overlap)) - len(feasible)
    steps = np.rint(overlap[feasible] * STEPS).astype(np.int64)
    return _matching(_assign(mine[feasible], true[feasible], steps), len(predicted), len(truth), gated=gated)


def match_equal(predicted: Sequence[Any], truth: Sequence[Any]) -> Matching:
    """Match each predicted object to the first unmatched true object that is equal."""
    left: dict[Any, list[int]] = {}
    for number in range(len(truth) - 1, -1, -1):
        left.setdefault(_identity(truth[number]), []).append(number)
    pairs = []
    for number, thing in enumerate(predicted):
        if same := left.get(_identity(thing)):
            pairs.append((number, same.pop()))
    return _matching(pairs, len(predicted), len(truth))


def overlaps(predicted: Sequence[Mapping[str, Any]], truth: Sequence[Mapping[str, Any]]) -> Floats:
    """Return the IoU of each pair of objects. A point or line has no area and overlaps only with an equal object."""
    out = np.zeros((len(predicted), len(truth)))
    mine, true, overlap = _near_overlaps(predicted, truth)
    out[mine, true] = overlap
    return out


def _near_overlaps(
    predicted: Sequence[Mapping[str, Any]], truth: Sequence[Mapping[str, Any]]
) -> tuple[Index, Index, Floats]:
    """Return the pairs of objects whose bounding boxes intersect, and their overlaps."""
    (boxes, drawn), (true_boxes, true_drawn) = _bounds(predicted), _bounds(truth)
    mine, true, overlap = _box_overlaps(boxes, true_boxes)
    if drawn or true_drawn:
        is_drawn, is_true_drawn = np.zeros(len(predicted), np.bool_), np.zeros(len(truth), np.bool_)
        is_drawn[drawn] = is_true_drawn[true_drawn] = True
        slow = np.flatnonzero(is_drawn[mine] | is_true_drawn[true])
        if len(slow):
            overlap[slow] = _polygon_overlaps(predicted, truth, mine[slow], true[slow])
    return mine, true, overlap


def _bounds(things: Sequence[Mapping[str, Any]]) -> tuple[list[Any], list[int]]:
    boxes: list[Any] = [thing.get("bbox_2d") for thing in things]
    polygons = [number for number, box in enumerate(boxes) if box is None] if None in boxes else []
    for number in polygons:
        boxes[number] = _around(things[number]["poly"])
    return boxes, polygons


def _box_overlaps(boxes: list[Any], true_boxes: list[Any]) -> tuple[Index, Index, Floats]:
    if _rollout is not None and (columns := _rollout.overlaps(boxes, true_boxes)) is not None:
        mine, true = (np.frombuffer(column, dtype=np.int64) for column in columns[:2])
        return mine, true, np.frombuffer(columns[2], dtype=np.float64)
    left, right = (
        np.ascontiguousarray(np.fromiter(chain.from_iterable(each), np.float64, 4 * len(each)).reshape(-1, 4).T)
        for each in (boxes, true_boxes)
    )
    width, height = np.minimum(left[2:, :, None], right[2:, None]) - np.maximum(left[:2, :, None], right[:2, None])
    near = np.flatnonzero(np.minimum(width, height) >= 0)
    mine, true = np.divmod(near, max(1, len(true_boxes)))
    shared = width.ravel()[near] * height.ravel()[near]
    one, other = ((box[2] - box[0]) * (box[3] - box[1]) for box in (left, right))
    return mine, true, _ratio(shared, one[mine], other[true], lambda: np.all(left[:, mine] == right[:, true], axis=0))


def _around(points: Sequence[int]) -> list[int]:
    xs, ys = points[::2], points[1::2]
    return [min(xs), min(ys), max(xs), max(ys)]


def _ratio(shared: Floats, one: Floats, other: Floats, equal: Callable[[], NDArray[np.bool_]]) -> Floats:
    union = one + other - shared
    if (union > 0).all():
        return shared / union
    # Points and lines have no area, and overlap only if they are equal.
    return np.where(union > 0, shared / np.where(union > 0, union, 1), equal())


def _polygon_overlaps(
    predicted: Sequence[Mapping[str, Any]], truth: Sequence[Mapping[str, Any]], mine: NDArray[Any], true: NDArray[Any]
) -> Floats:
    try:
        import shapely
    except ImportError:
        raise UsageError(MISSING.format("shapely")) from None

    ours, theirs = mine.tolist(), true.tolist()
    place = {number: at for at, number in enumerate(dict.fromkeys(ours))}
    true_place = {number: at for at, number in enumerate(dict.fromkeys(theirs), start=len(place))}
    rings = [*(_ring(predicted[number]) for number in place), *(_ring(truth[number]) for number in true_place)]
    of_ring = [number for number, (ring, _) in enumerate(rings) for _ in range(len(ring) // 2)]
    corners = np.fromiter(chain.from_iterable(ring for ring, _ in rings), np.float64).reshape(-1, 2)
    shapes = shapely.polygons(shapely.linearrings(corners, indices=of_ring))
    area = shapely.area(shapes)
    # Repair self-intersecting polygons, so that their area follows the even-odd rule.
    doubtful = [at for at, (_, is_simple) in enumerate(rings) if not is_simple or not area[at]]
    if doubtful:
        shapes[doubtful] = shapely.make_valid(shapes[doubtful])
        area = shapely.area(shapes)
    one, other = [place[number] for number in ours], [true_place[number] for number in theirs]
    shared = shapely.area(shapely.intersection(shapes[one], shapes[other]))
    return _ratio(shared, area[one], area[other], lambda: shapely.equals(shapes[one], shapes[other]))


def _ring(thing: Mapping[str, Any]) -> tuple[Sequence[int], bool]:
    """Return the corners x1, y1, x2, y2 … of an object, and whether the object is a box or a triangle."""
    if "poly" in thing:
        points: Sequence[int] = thing["poly"]
        return points, len(points) == 6
    x1, y1, x2, y2 = thing["bbox_2d"]
    return (x1, y1, x2, y1, x2, y2, x1, y2), True


def _matching(pairs: Sequence[tuple[int, int]], predicted: int, true: int, *, gated: int = 0) -> Matching:
    false_positives = set(range(predicted)) - {pair[0] for pair in pairs}
    missed = set(range(true)) - {pair[1] for pair in pairs}
    return Matching(tuple(pairs), tuple(sorted(false_positives)), tuple(sorted(missed)), gated)


def _assign(mine: Index, true: Index, steps: Steps) -> list[tuple[int, int]]:
    alone = (np.bincount(mine)[mine] == 1) & (np.bincount(true)[true] == 1)
    pairs = list(zip(mine[alone].tolist(), true[alone].tolist(), strict=True))
    if alone.all():
        return pairs
    others = np.flatnonzero(~alone)
    of_pair = dict(
        zip(zip(mine[others].tolist(), true[others].tolist(), strict=True), steps[others].tolist(), strict=True)
    )
    for group in _groups(of_pair):
        pairs += _assign_group({pair: of_pair[pair] for pair in sorted(group)})
    return sorted(pairs)


def _groups(pairs: Iterable[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Split the feasible pairs into groups, so that no object is in two groups."""
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


def _assign_group(steps: Mapping[tuple[int, int], int]) -> list[tuple[int, int]]:
    """Return the pairs with the largest sum of overlaps; on a tie, match earlier objects first."""
    of_row: dict[int, list[tuple[int, int]]] = {}
    for (row, column), worth in steps.items():
        of_row.setdefault(row, []).append((column, worth))
    columns = sorted({column for _, column in steps})
    if len(of_row) == 1 or len(columns) == 1:
        return [max(steps, key=steps.__getitem__)]
    if math.prod(len(options) + 1 for options in of_row.values()) <= FEW:
        return _first_of_all(list(of_row.items()), 0, frozenset())[1]
    rows = list(of_row)
    matrix = np.array([[steps.get((row, column), -1) for column in columns] for row in rows])
    return [(rows[row], columns[column]) for row, column in _first_of_best(matrix)]


def _first_of_all(
    of_row: Sequence[tuple[int, Sequence[tuple[int, int]]]], at: int, taken: frozenset[int]
) -> tuple[int, list[tuple[int, int]]]:
    """Find the pairs of `of_row[at:]` with the largest sum of overlaps by brute force; return the sum and pairs."""
    if at == len(of_row):
        return 0, []
    row, options = of_row[at]
    best, pairs = -1, []
    for column, worth in options:
        if column not in taken:
            of_others, others = _first_of_all(of_row, at + 1, taken | {column})
            if worth + of_others > best:
                best, pairs = worth + of_others, [(row, column), *others]
    of_others, others = _first_of_all(of_row, at + 1, taken)
    return (of_others, others) if of_others > best else (best, pairs)


def _first_of_best(steps: Steps) -> list[tuple[int, int]]:
    """Return the same pairs as `_first_of_all`, without brute force.

    `steps` contains the rounded overlap of each pair, or -1 if the pair is infeasible.
    """
    allowed = steps >= 0
    best, chosen = _largest_sum(steps, allowed)
    pairs = []
    for row in range(len(steps)):
        for column in np.flatnonzero(allowed[row]).tolist():
            tried = allowed.copy()
            tried[row], tried[:, column] = False, False
            if column != chosen.get(row):
                of_others, others = _largest_sum(steps, tried)
                if steps[row, column] + of_others < best:
                    continue
                chosen = others
            best -= int(steps[row, column])
            allowed = tried
            pairs.append((row, column))
            break
        # If every column would reduce the sum, leave the row unassigned.
        allowed[row] = False
    return pairs


def _largest_sum(steps: Steps, allowed: NDArray[np.bool_]) -> tuple[int, dict[int, int]]:
    """Return the largest sum of overlaps, and an assignment with this sum as a dict from row to column."""
    if not allowed.any():
        return 0, {}
    try:
        from scipy.optimize import linear_sum_assignment
    except ImportError:
        raise UsageError(MISSING.format("scipy")) from None
    worth = np.where(allowed, steps, 0)
    rows, columns = linear_sum_assignment(worth, maximize=True)
    pairs = zip(rows.tolist(), columns.tolist(), strict=True)
    return int(worth[rows, columns].sum()), {row: column for row, column in pairs if allowed[row, column]}


def _identity(thing: Any) -> Any:
    """Return a hashable value that is the same for equal JSON values; true differs from 1."""
    if isinstance(thing, Mapping):
        return frozenset((key, _identity(value)) for key, value in thing.items())
    return (type(thing).__name__, thing)


# Scores. Unlike in training, matched objects must have the same description.


class DetectionScore(NamedTuple):
    """Object counts, and the recall, precision and F1 computed from them."""

    correct: int = 0
    """Number of predicted objects that match a true object."""
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
    """Count the correct, predicted and true objects of one answer. A predicted object is correct if it matches a true
    object with the same description and an IoU of at least `overlap`.
    """
    correct = 0
    for desc in {thing["desc"] for thing in truth}:
        mine, theirs = ([thing for thing in things if thing["desc"] == desc] for things in (predicted, truth))
        correct += len(match_objects(mine, theirs, gate=overlap).pairs)
    return DetectionScore(correct, len(predicted), len(truth))
