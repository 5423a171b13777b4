"""Write a report on a dataset: one self-contained HTML page without scripts, for screen and print."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib import resources
from typing import Any

import numpy as np
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from chatmill.errors import one_line
from chatmill.ledger import Ledger
from chatmill.remote.urls import Place
from chatmill.show.charts import Link, Node, compact, flow, histogram, lines, nice
from chatmill.show.dataset import DatasetView, open_view
from chatmill.show.row_view import is_padding, part_name, place_name, span_views, trained_tokens, turn_name, turns
from chatmill.show.stats import QUANTILES, SHARES, SplitStats, split_stats
from chatmill.show.text import visible

BLOCK_SIZES = (256, 512, 1024, 2048, 4096, 8192, 16384)
SAMPLES = 20
SAMPLE_TOKENS = 400
"""Maximum number of tokens displayed for a sample."""
BARS = 40
MAX_NODES = 8
"""Maximum number of nodes for reasons in one column of the flow chart; the smallest reasons share a node."""
OUTSIDE = "outside messages"
"""The name for tokens outside messages, such as template text and padding."""


def dataset_page(path: Place, *, version: str) -> str:
    view = open_view(path)
    names = [name for name in view.dataset.splits if len(view.dataset[name])]
    splits = [split_stats(view.dataset[name], name, block_sizes=BLOCK_SIZES) for name in names]
    return report_html(view, splits, version=version)


def report_html(view: DatasetView, splits: Sequence[SplitStats], *, version: str) -> str:
    """Return the HTML report on a dataset; `version` is chatmill's version."""
    page, style = ((resources.files("chatmill.show") / f"report.{name}").read_text("utf-8") for name in ("html", "css"))
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["visible"] = visible
    # Most samples are from the first split; the other splits have a few samples each.
    few = 4
    samples = [SAMPLES - few * (len(splits) - 1), *[few] * (len(splits) - 1)]
    return environment.from_string(page).render(
        style=Markup(style),
        outside=OUTSIDE,
        # The content security policy forbids scripts and external resources, and allows only this style sheet.
        policy=f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'",
        version=version,
        view=view,
        total={name: sum(getattr(each, name) for each in splits) for name in ("rows", "segments", "tokens", "trained")},
        longest=max((each.quantile(1) for each in splits), default=0),
        sources={name for each in splits for name in each.sources},
        flow=_flow(view.ledger, splits),
        ledger=list(view.ledger or ()),
        quantiles=QUANTILES,
        splits=[
            {
                "stats": stats,
                "lengths": _lengths(stats),
                "shares": _shares(stats),
                "fill": _fills(stats),
                "samples": [_sample(view, stats.split, number) for number in _spread(stats.rows, count)],
            }
            for stats, count in zip(splits, samples, strict=False)
        ],
    )


# Charts.


def _lengths(stats: SplitStats) -> Markup:
    """Draw a histogram of row lengths; if some rows are much longer than most, the last bar counts all long rows."""
    width = max(1, int(nice(stats.quantile(0.995) / BARS)))
    bars = stats.quantile(1.0) // width + 1
    bars = bars if bars <= BARS + 5 else BARS
    padded = np.zeros(max(len(stats.length_counts), bars * width), dtype=np.int64)
    padded[: len(stats.length_counts)] = stats.length_counts
    counts = padded[: bars * width].reshape(bars, width).sum(axis=1).tolist()
    names = [f"{at * width:,} to {(at + 1) * width - 1:,} tokens" for at in range(bars)]
    labels = {at: f"{at * width:,}" if at * width < 10**6 else compact(at * width) for at in range(0, bars, 8)}
    if longer := int(padded[bars * width :].sum()):
        counts, names = [*counts, 0, 0, longer], [*names, "", "", f"{bars * width:,} or more tokens"]
        labels[bars + 2] = "more"
    title = f"Row lengths in {stats.split}"
    return histogram(counts, names, labels, title=title, x_label="tokens per row", y_label="rows")


def _shares(stats: SplitStats) -> Markup:
    names = [f"{at * 100 // SHARES} to {(at + 1) * 100 // SHARES}%" for at in range(SHARES)]
    labels = {at: f"{at * 100 // SHARES}%" for at in range(0, SHARES + 1, 4)}
    title = f"Trained share of the rows in {stats.split}"
    counts = stats.share_counts.tolist()
    return histogram(counts, names, labels, title=title, x_label="trained share of a row", y_label="rows")


def _fills(stats: SplitStats) -> Markup:
    return lines(
        [
            ("packed", "packed", [fill.packed for fill in stats.fills]),
            ("one episode per row", "alone", [fill.alone for fill in stats.fills]),
        ],
        [f"{fill.block_size:,}" for fill in stats.fills],
        title=f"Share of tokens that are not padding in {stats.split}, by block size",
        x_label="block size",
    )


def _flow(ledger: Ledger | None, splits: Sequence[SplitStats]) -> Markup:
    """Draw a flow chart from records to trained tokens; without a ledger, the chart starts with the stored tokens."""
    roles: dict[str, int] = {}
    for stats in splits:
        for name, count in stats.roles.items():
            roles[name] = roles.get(name, 0) + count.tokens - count.trained
    trained, stored = sum(each.trained for each in splits), sum(each.tokens for each in splits)
    last = [Node("trained", trained, "tokens", "trained")]
    last += [
        Node(f"context: {OUTSIDE if name == 'none' else name}", amount, "tokens", f"role-{name}")
        for name, amount in roles.items()
        if amount
    ]
    title = "From records to trained tokens"
    if ledger is None:
        columns = [[Node("stored", stored, "tokens", "stored")], last]
        return flow(columns, _links(0, columns[0], last), title=title)
    read = [Node("read", ledger.total("read").rows, "records", "came")]
    rendered = [Node("rendered", ledger.total("rendered").rows, "records", "came")]
    rendered += _nodes(ledger, ("rejected", "filtered"), "rows", "records")
    made = [Node("tokens", ledger.total("rendered").tokens, "tokens", "came")]
    made += _nodes(ledger, ("repeated", "injected", "padding"), "tokens", "tokens", kind="added")
    kept = [Node("stored", stored, "tokens", "stored"), *_nodes(ledger, ("truncated", "dropped"), "tokens", "tokens")]
    links = [
        *_links(0, read, rendered),
        Link(1, 0, rendered[0].amount, 0, made[0].amount),
        *_links(2, made, kept),
        *_links(3, kept[:1], last),
    ]
    return flow([read, rendered, made, kept, last], links, title=title)


def _nodes(ledger: Ledger, buckets: Sequence[str], column: str, unit: str, *, kind: str = "lost") -> list[Node]:
    """Return a chart node for each reason in the ledger; with more than MAX_NODES reasons, combine the smallest."""
    nodes = [
        Node(f"{bucket}: {one_line(reason.replace('_', ' '), 80)}" if reason else bucket, amount, unit, kind)
        for bucket, reason, entry in ledger
        if bucket in buckets and (amount := getattr(entry, column))
    ]
    if len(nodes) <= MAX_NODES:
        return nodes
    smallest = set(sorted(range(len(nodes)), key=lambda at: (-nodes[at].amount, at))[MAX_NODES - 1 :])
    others = sum(nodes[at].amount for at in smallest)
    named = [node for at, node in enumerate(nodes) if at not in smallest]
    return [*named, Node(f"{len(smallest)} other reasons", others, unit, kind)]


def _links(column: int, one: Sequence[Node], other: Sequence[Node]) -> list[Link]:
    """Link the nodes of two chart columns in order from the top, because the ledger records only the total of each
    node.
    """
    links, left, right = [], [node.amount for node in one], [node.amount for node in other]
    start = stop = 0
    while start < len(left) and stop < len(right):
        amount = min(left[start], right[stop])
        if amount:
            links.append(Link(column, start, amount, stop, amount))
        left[start] -= amount
        right[stop] -= amount
        if not left[start]:
            start += 1
        else:
            stop += 1
    return links


# Samples.


def _spread(rows: int, count: int) -> list[int]:
    """Return at most `count` row indices, evenly spaced from the first row to the last."""
    return sorted({int(at) for at in np.linspace(0, rows - 1, min(count, rows))}) if rows else []


def _sample(view: DatasetView, split: str, number: int) -> dict[str, Any]:
    row = view.row(split, number)
    parts: list[dict[str, Any]] = []
    left = SAMPLE_TOKENS
    for segment in range(len(row.origins)):
        if is_padding(row, segment) or left <= 0:
            continue
        if len(row.origins) > 1:
            parts.append({"border": f"segment {segment}: {place_name(row, segment, unrolled=view.unrolled)}"})
        for turn in turns(row, segment):
            if left <= 0:
                break
            stop = min(turn.stop, turn.start + left)
            spans = [
                (
                    span,
                    view.text.tokens(row.ids[span.start : min(stop, span.stop)].tolist()),
                    "" if span.target is None else f"→{view.text.token(span.target)}",
                    part_name(row, span, view.text),
                )
                for span in span_views(row, turn.first_span, turn.last_span)
                if span.start < stop
            ]
            parts.append({"border": None, "turn": turn, "name": turn_name(row, turn, view.text), "spans": spans})
            left -= stop - turn.start
    return {
        "number": number,
        "place": place_name(row, unrolled=view.unrolled),
        "tokens": len(row.ids),
        "trained": trained_tokens(row) / len(row.ids) if len(row.ids) else 0,
        "parts": parts,
        "hidden": max(0, len(row.ids) - SAMPLE_TOKENS),
    }
