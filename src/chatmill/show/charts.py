"""Charts as SVG. Colours come from the style of the page, so that they suit light and dark screens, and print."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from markupsafe import Markup, escape

WIDTH, HEIGHT = 500, 210
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 12, 34
PLOT_HEIGHT = HEIGHT - TOP - BOTTOM
TICKS = 4
LABEL_HEIGHT = 15
FLOW_WIDTH, FLOW_HEIGHT = 860.0, 280.0
NODE_WIDTH, GAP, GROUP_GAP = 13.0, 10.0, 30.0


def tag(name: str, *children: str, **attributes: object) -> Markup:
    """One element. Text and values are escaped; in the name of an attribute, `_` is `-`, and at the end nothing."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-") if key != "viewBox" else key}="{escape(_short(value))}"'
        for key, value in attributes.items()
    )
    return Markup(f"<{name}{written}>{''.join(map(escape, children))}</{name}>")


def _short(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def svg(parts: Iterable[Markup], *, title: str, height: float = HEIGHT, width: float = WIDTH) -> Markup:
    head = tag("title", title)
    return tag("svg", head, *parts, viewBox=f"0 0 {_short(width)} {_short(height)}", role="img", aria_label=title)


def compact(number: float) -> str:
    """12 · 1.5k · 20M: short enough for an axis."""
    for size, sign in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{sign}"
    return f"{number:.3g}"


def nice(least: float) -> float:
    """The smallest of 1, 2, 2.5, 5, 10, 20 … that is not below `least`."""
    size = 10.0 ** (len(str(int(max(least, 1)))) - 1) if least >= 1 else 0.01
    while True:
        for step in (1, 2, 2.5, 5):
            if step * size >= least:
                return step * size
        size *= 10


def histogram(
    counts: Sequence[int], names: Sequence[str], labels: Mapping[int, str], *, title: str, x_label: str, y_label: str
) -> Markup:
    """Bars with names as tooltips; `labels` are written below the left edges of some bars, by number."""
    most = nice(max([*counts, 1]) / TICKS) * TICKS
    width = (WIDTH - LEFT - RIGHT) / max(1, len(counts))
    parts = _axes(most, x_label, y_label)
    for at, count in enumerate(counts):
        height = PLOT_HEIGHT * count / most
        tooltip = tag("title", f"{names[at]}: {count:,} {y_label}")
        x, y = LEFT + at * width, HEIGHT - BOTTOM - height
        parts.append(tag("rect", tooltip, x=x + 0.5, y=y, width=max(width - 1, 0.5), height=height, class_="bar"))
    for at, label in labels.items():
        place = {"x": LEFT + at * width, "y": HEIGHT - BOTTOM + 15}
        parts.append(tag("text", label, class_="tick", text_anchor="middle", **place))
    return svg(parts, title=title)


def lines(
    series: Sequence[tuple[str, str, Sequence[float]]], labels: Sequence[str], *, title: str, x_label: str
) -> Markup:
    """Line chart of shares from 0 to 1: (name, class, values) each."""
    parts = _axes(1.0, x_label, "", percent=True)
    step = (WIDTH - LEFT - RIGHT - 40) / max(1, len(labels) - 1)
    x = [LEFT + 20 + at * step for at in range(len(labels))]
    for at, label in enumerate(labels):
        parts.append(tag("text", label, x=x[at], y=HEIGHT - BOTTOM + 15, class_="tick", text_anchor="middle"))
    for name, kind, values in series:
        y = [HEIGHT - BOTTOM - PLOT_HEIGHT * value for value in values]
        points = " ".join(f"{_short(a)},{_short(b)}" for a, b in zip(x, y, strict=True))
        parts.append(tag("polyline", points=points, class_=f"curve {kind}"))
        for at, value in enumerate(values):
            tooltip = tag("title", f"{name}, {labels[at]}: {value:.1%}")
            parts.append(tag("circle", tooltip, cx=x[at], cy=y[at], r=4, class_=f"dot {kind}"))
            place = {"x": x[at], "y": y[at] + (-9 if value < 0.93 else 17)}
            parts.append(tag("text", f"{value:.0%}", **place, class_=f"value {kind}", text_anchor="middle"))
    return svg(parts, title=title)


def _axes(most: float, x_label: str, y_label: str, *, percent: bool = False) -> list[Markup]:
    """Grid lines with their values, and the labels of the axes."""
    parts = []
    for at in range(TICKS + 1):
        value, y = most * at / TICKS, HEIGHT - BOTTOM - PLOT_HEIGHT * at / TICKS
        parts.append(tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y, class_="grid"))
        label = f"{value:.0%}" if percent else compact(value)
        parts.append(tag("text", label, x=LEFT - 8, y=y + 4, class_="tick", text_anchor="end"))
    parts.append(tag("text", x_label, x=WIDTH - RIGHT, y=HEIGHT - 3, class_="axis", text_anchor="end"))
    if y_label:
        parts.append(tag("text", y_label, x=0, y=HEIGHT - 3, class_="axis"))
    return parts


class Node(NamedTuple):
    """A node of a flow chart; `kind` is the class of its colour."""

    name: str
    amount: int
    unit: str
    kind: str


class Link(NamedTuple):
    """A band from node `start` of a column to node `stop` of the next, where `arrives` is the amount in its unit."""

    column: int
    start: int
    amount: int
    stop: int
    arrives: int


def flow(columns: Sequence[Sequence[Node]], links: Sequence[Link], *, title: str) -> Markup:
    """Nodes in columns, as high as their amounts, and bands between them; each unit has its own scale."""
    step = (FLOW_WIDTH - 190) / max(1, len(columns) - 1)
    totals = [sum(node.amount for node in column) for column in columns]
    whole: dict[str, int] = {}
    for column, total in zip(columns, totals, strict=True):
        whole[column[0].unit] = max(1, whole.get(column[0].unit, 0), total)

    def height(amount: int, unit: str) -> float:
        return FLOW_HEIGHT * amount / whole[unit]

    heights = [[height(node.amount, node.unit) for node in column] for column in columns]
    tops = [_tops(column, sizes) for column, sizes in zip(columns, heights, strict=True)]
    # Where the next band of each node arrives, and where it leaves.
    arriving, leaving = ([list(column) for column in tops] for _ in range(2))
    parts: list[Markup] = []
    for link in links:
        start, stop = columns[link.column][link.start], columns[link.column + 1][link.stop]
        leaves, arrives = height(link.amount, start.unit), height(link.arrives, stop.unit)
        y1, y2 = leaving[link.column][link.start], arriving[link.column + 1][link.stop]
        leaving[link.column][link.start] += leaves
        arriving[link.column + 1][link.stop] += arrives
        x1, x2 = link.column * step + NODE_WIDTH, (link.column + 1) * step
        parts.append(tag("path", d=_band(x1, y1, leaves, x2, y2, arrives), class_=f"band {stop.kind}"))
    lowest = 0.0
    for number, column in enumerate(columns):
        free = 0.0
        for node, y, size in zip(column, tops[number], heights[number], strict=True):
            tooltip = tag("title", f"{node.name}: {node.amount:,} {node.unit}")
            box = {"x": number * step, "y": y, "width": NODE_WIDTH, "height": max(size, 1.5), "rx": 2}
            parts.append(tag("rect", tooltip, class_=node.kind, **box))
            # The bands of what is added rise to the right: its name is written below.
            at = y + size + LABEL_HEIGHT if node.kind == "added" else max(free, y + min(max(size, 8), 40) / 2)
            free = at + 2 * LABEL_HEIGHT
            share = f" · {node.amount / max(1, totals[number]):.1%}" if len(column) > 1 else ""
            x = number * step + NODE_WIDTH + 6
            parts.append(tag("text", node.name, x=x, y=at, class_="name"))
            parts.append(tag("text", f"{node.amount:,} {node.unit}{share}", x=x, y=at + 13, class_="tick"))
            lowest = max(lowest, free, y + size)
    return svg(parts, title=title, width=FLOW_WIDTH, height=lowest + 8)


def _tops(column: Sequence[Node], sizes: Sequence[float]) -> list[float]:
    """The y of each node; groups of lost and added nodes are set apart, so that no band covers their names."""
    y, tops = 10.0, []
    for at, (node, size) in enumerate(zip(column, sizes, strict=True)):
        y += GROUP_GAP if at and node.kind in ("lost", "added") and node.kind != column[at - 1].kind else 0
        tops.append(y)
        with_label = {"lost": max(size, 2 * LABEL_HEIGHT), "added": size + 2 * LABEL_HEIGHT}
        y += with_label.get(node.kind, size) + GAP
    return tops


def _band(x1: float, y1: float, leaves: float, x2: float, y2: float, arrives: float) -> str:
    middle = (x1 + x2) / 2
    upper = [(x1, y1), (middle, y1), (middle, y2), (x2, y2)]
    lower = [(x2, y2 + arrives), (middle, y2 + arrives), (middle, y1 + leaves), (x1, y1 + leaves)]
    (a, b, c, d), (e, f, g, h) = ([f"{_short(x)} {_short(y)}" for x, y in edge] for edge in (upper, lower))
    return f"M{a}C{b} {c} {d}L{e}C{f} {g} {h}Z"
