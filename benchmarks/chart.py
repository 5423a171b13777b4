"""Draw a chart of chatmill's speedups over its peers as SVG, on a logarithmic scale."""

from __future__ import annotations

import math
from xml.sax.saxutils import escape

from lines import Line, Results, lines
from train_lines import TRAIN_LINES

WIDTH, LABEL, RIGHT, ROW, TOP = 860, 330, 70, 32, 54
STYLE = """
    svg { background: #ffffff }
    text { font: 13px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #1f2328 }
    .title { font-size: 15px; font-weight: 600 }
    .small, .tick { font-size: 11px; fill: #59636e }
    .grid { stroke: #d1d9e0 } .one { stroke: #59636e }
    .faster { fill: #1a7f37 } .slower { fill: #bc4c00 }
    @media (prefers-color-scheme: dark) {
      svg { background: #0d1117 }
      text { fill: #f0f6fc }
      .small, .tick { fill: #9198a1 }
      .grid { stroke: #3d444d } .one { stroke: #9198a1 }
      .faster { fill: #3fb950 } .slower { fill: #f0883e }
    }
"""


def chart(results: Results) -> str:
    """Draw one bar for each comparison with a peer. A bar to the left of 1 means that the peer is faster."""
    shown = [line for line in lines(results) if line.times is not None] + _training(results)
    most = max([100.0, *(line.times or 0 for line in shown)])
    least = min([1.0, *(line.times or 1 for line in shown)])
    first, last = math.floor(math.log10(least)), math.ceil(math.log10(most))
    room, height = WIDTH - LABEL - RIGHT, TOP + ROW * len(shown) + 34

    def at(value: float) -> float:
        return LABEL + room * (math.log10(value) - first) / (last - first)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="Speedup of chatmill over each peer">',
        f"  <style>{STYLE}  </style>",
        '  <text class="title" x="16" y="26">Speedup of chatmill over each peer</text>',
        '  <text class="small" x="16" y="43">logarithmic scale; each pair was measured in the same run</text>',
    ]
    for power in range(first, last + 1):
        x, kind = at(10.0**power), "one" if power == 0 else "grid"
        parts.append(f'  <line class="{kind}" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{height - 28}"/>')
        parts.append(f'  <text class="tick" x="{x:.1f}" y="{height - 12}" text-anchor="middle">{10.0**power:g}</text>')
    for number, line in enumerate(shown):
        parts += _bar(line, TOP + ROW * number, at)
    return "\n".join([*parts, "</svg>", ""])


def _bar(line: Line, y: float, at) -> list[str]:  # type: ignore[no-untyped-def]
    assert line.times is not None
    start, stop = sorted((at(1.0), at(line.times)))
    kind = "faster" if line.times >= 1 else "slower"
    number = f"{line.times:,.0f}" if line.times >= 10 else f"{line.times:.1f}"
    return [
        f'  <text x="16" y="{y + 14}">{escape(line.what.replace("`", ""))}</text>',
        f'  <text class="small" x="16" y="{y + 27}">{escape(line.peer.replace("`", ""))}</text>',
        f'  <rect class="{kind}" x="{start:.1f}" y="{y + 5}" width="{max(stop - start, 1):.1f}" height="18" rx="2"/>',
        f'  <text x="{stop + 6:.1f}" y="{y + 19}">{number}</text>',
    ]


def _training(results: Results) -> list[Line]:
    found = {name: one for name, one in results.get("gpu", {}).items() if "error" not in one}
    if (ours := found.get("0.6b-own-adamw")) is None:
        return []
    names = ("0.6b-peer-fp32-compiled", "0.6b-peer-fp32", "0.6b-usual-packed", "0.6b-usual-padded")
    return [
        Line(
            "train a 0.6B model on one GPU",
            "",
            peer=TRAIN_LINES[name].what,
            times=ours["tokens_per_s"] / found[name]["tokens_per_s"],
        )
        for name in names
        if name in found
    ]
