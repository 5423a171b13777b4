"""Generate synthetic scenes for object detection: a text grid with filled rectangles, and their bounding boxes.

    0 . a a .       {"desc": "a", "bbox_2d": [250, 0, 749, 500]}
    1 . a a .       {"desc": "c", "bbox_2d": [0, 500, 250, 999]}
    2 c . . .
    3 c . . .

Rectangles do not overlap, and rectangles with the same letter do not touch.
"""

from __future__ import annotations

import math
import random
from typing import Any, Literal

LETTERS = "abcdef"
EMPTY = "."
LONGEST_SIDE = 2
"""Maximum side length of a rectangle, in cells."""
CELLS = 5
"""Number of grid cells per object, at the maximum number of objects."""

Order = Literal["reading", "random"]
Grid = list[list[str]]


def grid_size(most: int) -> int:
    """Return the side length, in cells, of a grid for up to `most` objects."""
    return math.ceil(math.sqrt(CELLS * most))


def scene(draw: random.Random, most: int, order: Order = "reading") -> tuple[str, list[dict[str, Any]]]:
    """Return the text and the objects of a scene: `most // 2` to `most` objects, or fewer if the grid has no space
    left.

    If `order` is "reading", objects are sorted by their upper left corners.
    """
    size = grid_size(most)
    grid: Grid = [[EMPTY] * size for _ in range(size)]
    boxes: list[tuple[int, int, int, int, str]] = []
    wanted = draw.randint(max(1, most // 2), most)
    for _ in range(50 * most):
        if len(boxes) == wanted:
            break
        width, height, letter = draw.randint(1, LONGEST_SIDE), draw.randint(1, LONGEST_SIDE), draw.choice(LETTERS)
        left, top = draw.randint(0, size - width), draw.randint(0, size - height)
        if _fits(grid, left, top, width, height, letter):
            for y in range(top, top + height):
                grid[y][left : left + width] = [letter] * width
            boxes.append((top, left, top + height, left + width, letter))
    text = "\n".join(f"{y}" + "".join(f" {cell}" for cell in row) for y, row in enumerate(grid))
    if order == "reading":
        boxes.sort()
    return text, [
        {"desc": letter, "bbox_2d": [place(left, size), place(top, size), place(right, size), place(bottom, size)]}
        for top, left, bottom, right, letter in boxes
    ]


def records(seed: int, count: int, most: int, order: Order = "reading") -> list[dict[str, Any]]:
    """Return `count` scenes as records with ground-truth objects."""
    draw = random.Random(seed)
    made = []
    for number in range(count):
        text, objects = scene(draw, most, order)
        made.append({"id": f"{seed}-{number}", "messages": [{"role": "user", "content": text}], "objects": objects})
    return made


def place(cell: int, size: int) -> int:
    """Scale a position on the grid, in cells, to a coordinate from 0 to 999."""
    return round(cell * 999 / size)


def _fits(grid: Grid, left: int, top: int, width: int, height: int, letter: str) -> bool:
    size = len(grid)
    inside = [grid[y][x] for y in range(top, top + height) for x in range(left, left + width)]
    around = [
        grid[y][x]
        for y in range(max(0, top - 1), min(size, top + height + 1))
        for x in range(max(0, left - 1), min(size, left + width + 1))
    ]
    return set(inside) == {EMPTY} and letter not in around
