"""Plot the loss curve of a training run as SVG, without a plotting library."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

from chatmill.errors import one_line

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 400, 56, 16, 40, 44
MOST = 1500
"""Maximum number of points in the train curve; if there are more steps, adjacent points are averaged."""
VAL = "val_loss"
Points = Sequence[tuple[float, float]]


def loss_plot(metrics: Sequence[Mapping[str, Any]], *, title: str) -> str:
    """Return an SVG plot of the training loss and the validation loss; for a mix, also of the validation loss of each
    source.
    """
    box = f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {box}>'
    back = f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
    name = f'<text x="{LEFT}" y="24" font-size="14" font-weight="bold">{escape(title)}</text>'
    return "\n".join([head, back, name, *_curves(metrics), "</svg>", ""])


def _curves(metrics: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the axes and curves as SVG elements, or an empty list if no loss is finite."""
    train = _thinned([(line["step"], line["loss"]) for line in metrics if line.get("loss") is not None])
    names = dict.fromkeys(name for line in metrics for name in line if name == VAL or name.startswith(f"{VAL}/"))
    val = {name: [(line["step"], line[name]) for line in metrics if line.get(name) is not None] for name in names}
    curves = [("train", "#2563eb", train), ("val", "#dc2626", val.pop(VAL, []))]
    # Draw the curves of sources thinner, with a label at the end of each curve.
    by_source = [(name.removeprefix(f"{VAL}/"), "#f59e0b", curve) for name, curve in val.items()]
    points = [point for _, _, curve in [*curves, *by_source] for point in curve if math.isfinite(point[1])]
    if not points:
        return []
    steps, losses = [step for step, _ in points], [loss for _, loss in points]
    across = _Scale(min(steps), max(steps), LEFT, WIDTH - RIGHT)
    up = _Scale(min(losses), max(losses), HEIGHT - BOTTOM, TOP)
    parts = []
    for tick in _ticks(up.low, up.high):
        y = up(tick)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}" stroke="#e5e7eb"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{tick:g}</text>')
    for tick in _ticks(across.low, across.high):
        parts.append(f'<text x="{across(tick)}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{tick:g}</text>')
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">step</text>')
    for name, colour, losses_of in by_source:
        shown = [(across(step), up(loss)) for step, loss in losses_of if math.isfinite(loss)]
        if shown:
            path = " ".join(f"{x},{y}" for x, y in shown)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1"/>')
            (x, y), text = shown[-1], escape(one_line(f"{name} {losses_of[-1][1]:.4f}", 60))
            parts.append(f'<text x="{x - 4}" y="{y - 4}" font-size="10" text-anchor="end" fill="#b45309">{text}</text>')
    for number, (name, colour, curve) in enumerate(curves):
        shown = [(across(step), up(loss)) for step, loss in curve if math.isfinite(loss)]
        if not shown:
            continue
        path = " ".join(f"{x},{y}" for x, y in shown)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        if len(shown) < 30:
            parts += [f'<circle cx="{x}" cy="{y}" r="2.5" fill="{colour}"/>' for x, y in shown]
        last = next(loss for _, loss in reversed(curve) if math.isfinite(loss))
        x = WIDTH - RIGHT - 130 * (2 - number)
        parts.append(f'<text x="{x}" y="24" fill="{colour}">{name} {last:.4f}</text>')
    return parts


class _Scale:
    def __init__(self, low: float, high: float, start: float, stop: float) -> None:
        largest = max(1.0, abs(low), abs(high))
        if high - low < 1e-9 * largest:
            # Widen an empty range, so that a flat curve is centered.
            low, high = low - largest / 2, high + largest / 2
        self.low, self.high, self._start, self._stop = low, high, start, stop

    def __call__(self, value: float) -> float:
        return round(self._start + (value - self.low) / (self.high - self.low) * (self._stop - self._start), 1)


def _ticks(low: float, high: float) -> list[float]:
    """Return about five round numbers between `low` and `high`."""
    rough = (high - low) / 5
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
    return [round(number * step, 10) for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _thinned(points: Points) -> Points:
    size = -(-len(points) // MOST)
    if size <= 1:
        return points
    groups = [points[at : at + size] for at in range(0, len(points), size)]
    return [(group[-1][0], sum(loss for _, loss in group) / len(group)) for group in groups]
