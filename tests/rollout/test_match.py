from __future__ import annotations

from fractions import Fraction
from itertools import combinations, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill.errors import UsageError
from chatmill.rollout.match import match_equal, match_objects, overlaps

# On a small grid, ties, touching edges and boxes without area are common.
place_ = st.integers(0, 5)


@st.composite
def boxes_(draw):
    xs, ys = sorted(draw(st.tuples(place_, place_))), sorted(draw(st.tuples(place_, place_)))
    return {"desc": "x", "bbox_2d": [xs[0], ys[0], xs[1], ys[1]]}


def cells(box):
    x1, y1, x2, y2 = box["bbox_2d"]
    return {(x, y) for x in range(x1, x2) for y in range(y1, y2)}


def box_overlap(one, other):
    union = cells(one) | cells(other)
    return Fraction(len(cells(one) & cells(other)), len(union)) if union else Fraction(int(one == other))


def brute_force(predicted, truth, gate):
    best, chosen = Fraction(-1), None
    for size in range(min(len(predicted), len(truth)), -1, -1):
        for rows in combinations(range(len(predicted)), size):
            for columns in permutations(range(len(truth)), size):
                pairs = list(zip(rows, columns, strict=True))
                values = [box_overlap(predicted[row], truth[column]) for row, column in pairs]
                if all(value >= gate for value in values):
                    # Break ties in favor of the lowest columns, row by row. Treat a row without a match as if its
                    # column came after the last column.
                    of_row = dict(pairs)
                    rank = [of_row.get(row, len(truth)) for row in range(len(predicted))]
                    if chosen is None or (sum(values), [-r for r in rank]) > (best, [-r for r in chosen[1]]):
                        best, chosen = sum(values), (pairs, rank)
    return chosen[0]


@settings(max_examples=60)
@given(st.lists(boxes_(), max_size=4), st.lists(boxes_(), max_size=4), st.sampled_from([0.2, 0.3, 0.5]))
def test_the_matching_is_the_first_among_the_best_assignments(predicted, truth, gate):
    found = match_objects(predicted, truth, gate=gate)
    assert list(found.pairs) == brute_force(predicted, truth, Fraction(gate).limit_denominator(10))


@pytest.mark.parametrize("seed", range(4))
def test_matching_six_by_six_crowded_boxes_equals_brute_force(seed):
    draw = np.random.default_rng(seed)
    corners = np.sort(draw.integers(0, 4, (12, 2, 2)), axis=1)
    things = [{"desc": "x", "bbox_2d": [int(a) for a in (x1, y1, x2, y2)]} for (x1, y1), (x2, y2) in corners]
    found = match_objects(things[:6], things[6:], gate=0.3)
    best = {}
    for columns in permutations(range(6)):
        values = [box_overlap(things[row], things[6 + column]) for row, column in enumerate(columns)]
        kept = tuple((row, column) for row, column in enumerate(columns) if values[row] >= Fraction(3, 10))
        best[kept] = sum((values[row] for row, _ in kept), Fraction())
    most = max(best.values())
    assert sum(box_overlap(things[row], things[6 + column]) for row, column in found.pairs) == most
    ranks = [[dict(pairs).get(row, 6) for row in range(6)] for pairs, value in best.items() if value == most]
    assert [dict(found.pairs).get(row, 6) for row in range(6)] == min(ranks)


@given(st.lists(boxes_(), max_size=5), st.lists(boxes_(), max_size=5))
def test_every_object_is_matched_a_false_positive_or_missed(predicted, truth):
    found = match_objects(predicted, truth)
    assert sorted([row for row, _ in found.pairs] + list(found.false_positives)) == list(range(len(predicted)))
    assert sorted([column for _, column in found.pairs] + list(found.missed)) == list(range(len(truth)))
    weak = sum(0 < box_overlap(one, other) < Fraction(3, 10) for one in predicted for other in truth)
    assert found.gated == weak


def polygon(*points):
    return {"desc": "x", "poly": list(points)}


def test_polygon_overlap_uses_exact_areas():
    square, triangle = polygon(0, 0, 10, 0, 10, 10, 0, 10), polygon(0, 0, 10, 0, 0, 10)
    turned = polygon(10, 0, 10, 10, 0, 10)
    box, far = {"desc": "x", "bbox_2d": [0, 0, 10, 5]}, polygon(100, 100, 200, 100, 200, 200)
    bow_tie = polygon(0, 0, 10, 10, 10, 0, 0, 10)
    # The bow tie consists of two triangles of area 25; the box cuts off a triangle tip of area 12.5.
    found = overlaps([square, triangle, bow_tie], [triangle, turned, box, far, bow_tie])
    expected = [[0.5, 0.5, 0.5, 0, 0.5], [1, 0, 37.5 / 62.5, 0, 1 / 3], [1 / 3, 1 / 3, 25 / 75, 0, 1]]
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


def test_shapes_without_area_overlap_only_themselves():
    line, other = polygon(0, 0, 5, 5, 9, 9), polygon(0, 0, 5, 5, 8, 8)
    point = {"desc": "x", "bbox_2d": [3, 3, 3, 3]}
    assert overlaps([line, point], [line, other, point]).tolist() == [[1, 0, 0], [0, 0, 1]]


def test_boxes_and_equal_polygons_have_the_same_overlap():
    draw = np.random.default_rng(1)
    corners = np.sort(draw.integers(0, 999, (20, 2, 2)), axis=1)
    boxes = [{"desc": "x", "bbox_2d": [int(a) for a in (x1, y1, x2, y2)]} for (x1, y1), (x2, y2) in corners]
    polygons = [polygon(*(int(a) for a in (x1, y1, x2, y1, x2, y2, x1, y2))) for (x1, y1), (x2, y2) in corners]
    np.testing.assert_allclose(overlaps(boxes, boxes), overlaps(polygons, boxes), rtol=1e-9)


def test_an_overlap_equal_to_the_gate_matches():
    half = {"desc": "x", "bbox_2d": [0, 0, 5, 10]}
    whole = {"desc": "x", "bbox_2d": [0, 0, 10, 10]}
    assert match_objects([half], [whole], gate=0.5).pairs == ((0, 0),)
    assert match_objects([half], [whole], gate=0.51).pairs == ()


@pytest.mark.parametrize("gate", [0, -1, 1.5, float("nan")])
def test_a_gate_must_be_above_0_and_at_most_1(gate):
    with pytest.raises(UsageError, match="gate"):
        match_objects([], [], gate=gate)


def test_equal_objects_are_matched_in_order_and_types_must_agree():
    found = match_equal([{"a": 1}, {"a": True}, {"a": 1}, {"a": "1"}], [{"a": "1"}, {"a": 1}, {"a": 1.0}, {"a": 1}])
    assert found.pairs == ((0, 1), (2, 3), (3, 0))
    assert (found.false_positives, found.missed) == ((1,), (2,))
