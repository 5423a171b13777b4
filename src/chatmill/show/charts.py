"""Draw charts as SVG, with colors from the page's style sheet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from markupsafe import Markup, escape

WIDTH, HEIGHT = 500, 210
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 26, 40
PLOT_HEIGHT = HEIGHT - TOP - BOTTOM
TICKS = 4
FLOW_WIDTH, FLOW_HEIGHT = 920.0, 280.0
NODE_WIDTH, GAP, GROUP_GAP = 13.0, 12.0, 24.0
LABEL_LEFT, LABEL_RIGHT = NODE_WIDTH + 6, 8.0
LINE_HEIGHT = 17.0
"""Line height of labels in the flow chart, in px; their font size is at most 12.5 px."""
LABEL_LINES = 3
"""Maximum number of lines of a node's name; a tooltip shows the full name."""


def tag(name: str, *children: str, **attributes: object) -> Markup:
    """Return an HTML or SVG element with escaped text and attribute values. In attribute names, `_` becomes `-`, and a
    trailing `_` is removed.
    """
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
    """Format a number for an axis: 12, 1.5k, 20M."""
    for size, sign in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{sign}"
    return f"{number:.3g}"


def nice(least: float) -> float:
    """Return the smallest round number (1, 2, 2.5 or 5 times a power of ten) that is at least `least`."""
    size = 10.0 ** (len(str(int(max(least, 1)))) - 1) if least >= 1 else 0.01
    while True:
        for step in (1, 2, 2.5, 5):
            if step * size >= least:
                return step * size
        size *= 10


def histogram(
    counts: Sequence[int], names: Sequence[str], labels: Mapping[int, str], *, title: str, x_label: str, y_label: str
) -> Markup:
    """Draw a bar chart; `names` are shown as tooltips, and `labels` maps the index of a bar to the text below its left
    edge.
    """
    most = nice(max([*counts, 1]) / TICKS) * TICKS
    width = (WIDTH - LEFT - RIGHT) / max(1, len(counts))
    parts = _axes(most, x_label, y_label)
    for at, count in enumerate(counts):
        height = PLOT_HEIGHT * count / most
        tooltip = tag("title", f"{names[at]}: {count:,} {y_label}")
        x, y = LEFT + at * width, HEIGHT - BOTTOM - height
        parts.append(tag("rect", tooltip, x=x + 0.5, y=y, width=max(width - 1, 0.5), height=height, class_="bar"))
    for at, label in labels.items():
        place = {"x": LEFT + at * width, "y": HEIGHT - BOTTOM + 20}
        parts.append(tag("text", label, class_="tick", text_anchor="middle", **place))
    return svg(parts, title=title)


def lines(
    series: Sequence[tuple[str, str, Sequence[float]]], labels: Sequence[str], *, title: str, x_label: str
) -> Markup:
    """Draw a line chart of percentages; each series is (name, CSS class, fractions from 0 to 1)."""
    parts = _axes(1.0, x_label, "", percent=True)
    step = (WIDTH - LEFT - RIGHT - 40) / max(1, len(labels) - 1)
    x = [LEFT + 20 + at * step for at in range(len(labels))]
    for at, label in enumerate(labels):
        parts.append(tag("text", label, x=x[at], y=HEIGHT - BOTTOM + 20, class_="tick", text_anchor="middle"))
    heights = [[HEIGHT - BOTTOM - PLOT_HEIGHT * value for value in values] for _, _, values in series]
    for (name, kind, values), y in zip(series, heights, strict=True):
        points = " ".join(f"{_short(a)},{_short(b)}" for a, b in zip(x, y, strict=True))
        parts.append(tag("polyline", points=points, class_=f"curve {kind}"))
        for at, value in enumerate(values):
            tooltip = tag("title", f"{name}, {labels[at]}: {value:.1%}")
            parts.append(tag("circle", tooltip, cx=x[at], cy=y[at], r=4, class_=f"dot {kind}"))
    for at in range(len(labels)):
        places = _value_places([points[at] for points in heights])
        for (_, kind, values), place in zip(series, places, strict=True):
            text = {"x": x[at], "y": place, "class_": f"value {kind}", "text_anchor": "middle"}
            parts.append(tag("text", f"{values[at]:.0%}", **text))
    return svg(parts, title=title)


def _value_places(points: Sequence[float]) -> list[float]:
    """Return the y coordinates of the labels of several points with the same x coordinate. The top label is above its
    point, and the other labels are below their points if there is room.
    """
    places, free = [0.0] * len(points), float("inf")
    for rank, at in reversed(list(enumerate(sorted(range(len(points)), key=lambda at: points[at])))):
        is_above = rank == 0 or points[at] + 17 > HEIGHT - BOTTOM - 4
        places[at] = free = min(points[at] + (-9 if is_above else 17), free - LINE_HEIGHT)
    return places


def _axes(most: float, x_label: str, y_label: str, *, percent: bool = False) -> list[Markup]:
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
    """A node of a flow chart; `kind` is the CSS class that sets its color."""

    name: str
    amount: int
    unit: str
    kind: str


class Link(NamedTuple):
    """A band from node `start` of a column to node `stop` of the next column; `arrives` is `amount`, converted to the
    unit of `stop`.
    """

    column: int
    start: int
    amount: int
    stop: int
    arrives: int


def flow(columns: Sequence[Sequence[Node]], links: Sequence[Link], *, title: str) -> Markup:
    """Draw columns of nodes, with heights proportional to their amounts, and bands between the columns.

    Every unit, such as tokens, has its own scale.
    """
    # All columns have equal widths, because the last column also has labels to the right of its nodes.
    step = FLOW_WIDTH / len(columns)
    labels = [[_label(node, step) for node in column] for column in columns]
    totals = [sum(node.amount for node in column) for column in columns]
    whole: dict[str, int] = {}
    for column, total in zip(columns, totals, strict=True):
        whole[column[0].unit] = max(1, whole.get(column[0].unit, 0), total)

    def height(amount: int, unit: str) -> float:
        return FLOW_HEIGHT * amount / whole[unit]

    heights = [[height(node.amount, node.unit) for node in column] for column in columns]
    tops = [_tops(*column) for column in zip(columns, heights, labels, strict=True)]
    # The y coordinates at which the next incoming and the next outgoing band of each node begin.
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
        for at, node in enumerate(column):
            y, size, label = tops[number][at], heights[number][at], labels[number][at]
            tooltip = tag("title", f"{node.name}: {node.amount:,} {node.unit}")
            box = {"x": number * step, "y": y, "width": NODE_WIDTH, "height": max(size, 1.5), "rx": 2}
            parts.append(tag("rect", tooltip, class_=node.kind, **box))
            share = f" · {node.amount / max(1, totals[number]):.1%}" if len(column) > 1 else ""
            for line, text in enumerate([*label, f"{node.amount:,}", node.unit + share]):
                place = {"x": number * step + LABEL_LEFT, "y": y + (line + 0.8) * LINE_HEIGHT}
                parts.append(tag("text", text, class_="name" if line < len(label) else "tick", **place))
            lowest = max(lowest, y + max(size, _label_height(label)))
    return svg(parts, title=title, width=FLOW_WIDTH, height=lowest + 8)


def _label(node: Node, step: float) -> list[str]:
    """Split the name of a node into lines that fit the width of its column in any common font."""
    room = (step - LABEL_LEFT - LABEL_RIGHT) / 12.5
    lines, left = [""], node.name
    while left:
        word, space, _ = left.partition(" ")
        # Break a word that is too long for one line.
        fits = 0
        while fits < len(word) and _ems(word[: fits + 1]) <= room:
            fits += 1
        piece = word[: max(fits, 1)]
        if lines[-1] and _ems(f"{lines[-1]} {piece}") <= room:
            lines[-1] += f" {piece}"
        else:
            lines.append(piece)
        left = left[len(piece) + len(space if piece == word else "") :]
    lines = lines[1:]
    if len(lines) > LABEL_LINES:
        last = lines[LABEL_LINES - 1]
        while last and _ems(f"{last}…") > room:
            last = last[:-1]
        lines = [*lines[: LABEL_LINES - 1], f"{last}…"]
    return lines


def _ems(text: str) -> float:
    """Return an upper bound on the width, in em, of bold text in common fonts."""
    return sum(1.5 if each > "\u2e7f" else 1.15 if each in "mwMW@%" or each > "\u024f" else 0.8 for each in text)


def _label_height(label: Sequence[str]) -> float:
    return (len(label) + 2) * LINE_HEIGHT


def _tops(column: Sequence[Node], sizes: Sequence[float], labels: Sequence[Sequence[str]]) -> list[float]:
    """Return the y coordinate of the top of each node, so that no node overlaps the label of the previous node."""
    y, tops = 10.0, []
    for at, (node, size, label) in enumerate(zip(column, sizes, labels, strict=True)):
        y += GROUP_GAP if at and node.kind in ("lost", "added") and node.kind != column[at - 1].kind else 0
        tops.append(y)
        y += max(size, _label_height(label)) + GAP
    return tops


def _band(x1: float, y1: float, leaves: float, x2: float, y2: float, arrives: float) -> str:
    middle = (x1 + x2) / 2
    upper = [(x1, y1), (middle, y1), (middle, y2), (x2, y2)]
    lower = [(x2, y2 + arrives), (middle, y2 + arrives), (middle, y1 + leaves), (x1, y1 + leaves)]
    (a, b, c, d), (e, f, g, h) = ([f"{_short(x)} {_short(y)}" for x, y in edge] for edge in (upper, lower))
    return f"M{a}C{b} {c} {d}L{e}C{f} {g} {h}Z"
