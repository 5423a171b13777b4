"""Scenes: a grid of cells with filled rectangles, written as text, and the boxes that are in it.

    0 . a a .       {"desc": "a", "bbox_2d": [250, 0, 749, 500]}
    1 . a a .       {"desc": "c", "bbox_2d": [0, 500, 250, 999]}
    2 c . . .
    3 c . . .

Rectangles neither overlap nor touch one of their own letter, so that what is one object can be seen.
"""

from __future__ import annotations

import random
from typing import Any

LETTERS = "abcd"
EMPTY = "."
SIZE = 5
MOST = 3
"""Objects in a scene."""

Grid = list[list[str]]


def scene(draw: random.Random) -> tuple[str, list[dict[str, Any]]]:
    """The text of a scene, and its objects in reading order of their upper left corners."""
    grid: Grid = [[EMPTY] * SIZE for _ in range(SIZE)]
    boxes: list[tuple[int, int, int, int, str]] = []
    wanted = draw.randint(1, MOST)
    for _ in range(50):
        if len(boxes) == wanted:
            break
        width, height, letter = draw.randint(1, 3), draw.randint(1, 3), draw.choice(LETTERS)
        left, top = draw.randint(0, SIZE - width), draw.randint(0, SIZE - height)
        if _fits(grid, left, top, width, height, letter):
            for y in range(top, top + height):
                grid[y][left : left + width] = [letter] * width
            boxes.append((top, left, top + height, left + width, letter))
    text = "\n".join(f"{y}" + "".join(f" {cell}" for cell in row) for y, row in enumerate(grid))
    return text, [
        {"desc": letter, "bbox_2d": [_place(left), _place(top), _place(right), _place(bottom)]}
        for top, left, bottom, right, letter in sorted(boxes)
    ]


def records(seed: int, count: int) -> list[dict[str, Any]]:
    """So many scenes as records of truth."""
    draw = random.Random(seed)
    made = []
    for number in range(count):
        text, objects = scene(draw)
        made.append({"id": f"{seed}-{number}", "messages": [{"role": "user", "content": text}], "objects": objects})
    return made


def _fits(grid: Grid, left: int, top: int, width: int, height: int, letter: str) -> bool:
    inside = [grid[y][x] for y in range(top, top + height) for x in range(left, left + width)]
    around = [
        grid[y][x]
        for y in range(max(0, top - 1), min(SIZE, top + height + 1))
        for x in range(max(0, left - 1), min(SIZE, left + width + 1))
    ]
    return set(inside) == {EMPTY} and letter not in around


def _place(cell: int) -> int:
    """The edge of a cell on an axis of 1000 places."""
    return round(cell * 999 / SIZE)
