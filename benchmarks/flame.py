"""Draw flame graphs as SVG, and list the functions with the most samples."""

from __future__ import annotations

import zlib
from collections import Counter
from dataclasses import dataclass, field
from xml.sax.saxutils import escape, quoteattr

WIDTH, ROW, TOP, LETTER = 1000, 17, 40, 6.4
LEAST = 0.004
"""Frames with less than this share of the samples are omitted."""
STYLE = """
    svg { background: #ffffff }
    text { font: 11px ui-monospace, "DejaVu Sans Mono", monospace; fill: #1f2328; pointer-events: none }
    .title { font: 600 14px system-ui, sans-serif }
    rect { stroke: #ffffff; stroke-width: 0.5 }
    .own { fill: hsl(28 85% 68%) } .own2 { fill: hsl(38 88% 66%) } .other { fill: hsl(210 22% 82%) }
    @media (prefers-color-scheme: dark) {
      svg { background: #0d1117 } text { fill: #f0f6fc } rect { stroke: #0d1117 }
      .own { fill: hsl(22 70% 36%) } .own2 { fill: hsl(34 72% 33%) } .other { fill: hsl(210 14% 30%) }
    }
"""


@dataclass
class Node:
    samples: int = 0
    below: dict[str, Node] = field(default_factory=dict)


def flame_graph(title: str, stacks: dict[str, int]) -> str:
    """Draw stacks (`frame;frame;frame`, outermost first) with their sample counts. Callees are above their callers."""
    root = Node()
    for stack, samples in stacks.items():
        node = root
        node.samples += samples
        for frame in stack.split(";"):
            node = node.below.setdefault(frame, Node())
            node.samples += samples
    boxes: list[tuple[str, int, float, float]] = []
    _place(root, 0, 0.0, root.samples, boxes)
    depth = max((level for _, level, _, _ in boxes), default=0) + 1
    height = TOP + ROW * depth + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f"aria-label={quoteattr(title)}>",
        f"  <style>{STYLE}  </style>",
        f'  <text class="title" x="10" y="24">{escape(title)}</text>',
    ]
    for frame, level, start, share in boxes:
        x, width, y = 10 + (WIDTH - 20) * start, (WIDTH - 20) * share, TOP + ROW * (depth - 1 - level)
        letters = int((width - 6) / LETTER)
        shown = frame.split(" (")[0]
        shown = shown if len(shown) <= letters else shown[: max(letters - 1, 0)] + "…"
        parts.append(
            f'  <g><title>{escape(frame)}: {share:.1%}</title><rect class="{_kind(frame)}" x="{x:.1f}" y="{y}" '
            f'width="{width:.1f}" height="{ROW - 1}"/>'
            + (f'<text x="{x + 3:.1f}" y="{y + 12}">{escape(shown)}</text>' if letters >= 3 else "")
            + "</g>"
        )
    return "\n".join([*parts, "</svg>", ""])


def _place(node: Node, level: int, start: float, total: int, boxes: list[tuple[str, int, float, float]]) -> None:
    for frame, child in sorted(node.below.items(), key=lambda item: -item[1].samples):
        share = child.samples / total
        if share >= LEAST:
            boxes.append((frame, level, start, share))
            _place(child, level + 1, start, total, boxes)
        start += share


def _kind(frame: str) -> str:
    if "chatmill/" not in frame:
        return "other"
    return "own" if zlib.crc32(frame.encode()) % 2 else "own2"


def hottest(stacks: dict[str, int], count: int = 8) -> list[tuple[str, float, float]]:
    """Return the functions with the most samples, and the fraction of samples in each, without and with its callees."""
    own, whole = Counter[str](), Counter[str]()
    for stack, samples in stacks.items():
        frames = stack.split(";")
        own[frames[-1]] += samples
        for frame in set(frames):
            whole[frame] += samples
    total = sum(stacks.values())
    return [(frame, samples / total, whole[frame] / total) for frame, samples in own.most_common(count)]
