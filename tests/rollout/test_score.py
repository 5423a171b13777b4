from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from chatmill.rollout.match import DetectionScore, score_objects
from chatmill.rollout.schema import Detection

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "detect"))

from scenes import grid_size, place, records, scene


def box(desc, *places):
    return {"desc": desc, "bbox_2d": list(places)}


def test_an_object_is_correct_if_its_name_is_right_and_it_overlaps_enough():
    truth = [box("a", 0, 0, 10, 10), box("b", 50, 50, 60, 60), box("a", 100, 0, 110, 10)]
    found = [box("a", 0, 0, 10, 6), box("a", 50, 50, 60, 60), box("a", 100, 0, 104, 10), box("a", 0, 0, 10, 10)]
    score = score_objects(found, truth)
    assert score == DetectionScore(correct=1, predicted=4, true=3)
    assert (score.recall, score.precision, score.f1) == pytest.approx((1 / 3, 1 / 4, 2 / 7))
    assert score.plus(DetectionScore(1, 1, 2)) == DetectionScore(2, 5, 5)


def test_an_empty_answer_to_an_empty_scene_is_correct():
    assert (DetectionScore().recall, DetectionScore().precision, DetectionScore().f1) == (1, 1, 1)


@pytest.mark.parametrize("most", [1, 5, 60])
def test_the_boxes_of_a_scene_match_its_visible_letters(most):
    draw, size = random.Random(0), grid_size(most)
    edges = {place(cell, size): cell for cell in range(size + 1)}
    for _ in range(30):
        text, objects = scene(draw, most)
        grid = [line.split()[1:] for line in text.split("\n")]
        assert [len(row) for row in grid] == [size] * size
        expected = []
        for thing in map(Detection().check, objects):
            left, top, right, bottom = (edges[value] for value in thing["bbox_2d"])
            expected.append((top, left, bottom, right, thing["desc"]))
        assert sorted(rectangles(grid)) == expected
        assert max(1, most // 2) <= len(objects) <= most


def test_a_random_order_has_the_same_objects():
    reading, shuffled = records(7, 20, 12), records(7, 20, 12, "random")
    assert [record["messages"] for record in reading] == [record["messages"] for record in shuffled]
    boxes = [[sorted(thing["bbox_2d"] for thing in record["objects"]) for record in of] for of in (reading, shuffled)]
    assert boxes[0] == boxes[1]
    assert sum(one["objects"] != other["objects"] for one, other in zip(reading, shuffled, strict=True)) > 15


def rectangles(grid):
    size = len(grid)
    left = {(y, x) for y in range(size) for x in range(size) if grid[y][x] != "."}
    while left:
        letter, shape, new = None, set(), {min(left)}
        while new:
            shape |= new
            letter = grid[min(new)[0]][min(new)[1]]
            around = {(y + dy, x + dx) for y, x in new for dy, dx in ((0, 1), (1, 0), (0, -1), (-1, 0))}
            new = {cell for cell in around & left - shape if grid[cell[0]][cell[1]] == letter}
        ys, xs = zip(*shape, strict=True)
        box = (min(ys), min(xs), max(ys) + 1, max(xs) + 1, letter)
        assert len(shape) == (box[2] - box[0]) * (box[3] - box[1])
        left -= shape
        yield box
