"""The report: one page that says what a dataset holds, self-contained, without a script, for screens and paper."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib import resources
from typing import Any

import numpy as np
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from chatmill.ledger import Ledger
from chatmill.rows import NO_MESSAGE, OWN_ID, Part, Role, Rows, Rule
from chatmill.show.charts import Link, Node, flow, histogram, lines, nice
from chatmill.show.conversation import place_name
from chatmill.show.dataset import DatasetView
from chatmill.show.stats import QUANTILES, SHARES, SplitStats
from chatmill.show.text import TokenText, visible
from chatmill.show.turns import is_padding, turns

BLOCK_SIZES = (256, 512, 1024, 2048, 4096, 8192, 16384)
SAMPLES = 20
SAMPLE_TOKENS = 400
"""Tokens of a sample that are shown."""
BARS = 40


def report(shown: DatasetView, surveys: Sequence[SplitStats], *, version: str) -> str:
    """The page about a dataset, as HTML; `version` is chatmill's."""
    style = _file("report.css")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    page = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True).from_string(
        _file("report.html")
    )
    counts = _sample_counts(surveys)
    return page.render(
        style=Markup(style),
        # Nothing is loaded and nothing runs; the one style that applies is the one written here.
        policy=f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'",
        version=version,
        name=visible(shown.path.name or str(shown.path), limit=200),
        sha256=shown.dataset.sha256,
        facts=_facts(shown, surveys),
        without_text=shown.without_text,
        flow=_flow(shown.ledger, surveys),
        ledger=[]
        if shown.ledger is None
        else [(bucket, visible(reason), entry) for bucket, reason, entry in shown.ledger],
        splits=[_split(shown, survey, counts[survey.split]) for survey in surveys],
    )


def _file(name: str) -> str:
    return (resources.files("chatmill.show") / name).read_text("utf-8")


def _facts(shown: DatasetView, surveys: Sequence[SplitStats]) -> list[tuple[str, str]]:
    tokens, trained = (sum(getattr(each, name) for each in surveys) for name in ("tokens", "trained"))
    return [
        ("episodes", f"{sum(each.rows for each in surveys):,}"),
        ("segments", f"{sum(each.segments for each in surveys):,}"),
        ("tokens", f"{tokens:,}"),
        ("trained", f"{trained / tokens:.1%}" if tokens else "–"),
        ("longest row", f"{max((each.quantile(1) for each in surveys), default=0):,}"),
        ("sources", f"{len({name for each in surveys for name in each.sources}):,}"),
    ]


def _split(shown: DatasetView, survey: SplitStats, samples: int) -> dict[str, Any]:
    """What the page says of one split."""
    return {
        "name": survey.split,
        "survey": survey,
        "quantiles": [(f"{share:.0%}", f"{survey.quantile(share):,}") for share in QUANTILES],
        "lengths": _lengths(survey),
        "shares": _shares(survey),
        "fill": _fills(survey),
        "roles": _rows_of(survey.roles.items(), survey.tokens),
        "rules": _rows_of(survey.rules.items(), survey.tokens),
        "sources": _rows_of(
            sorted(((visible(name, limit=80), count) for name, count in survey.sources.items()), key=_by_size),
            survey.tokens,
        ),
        "longest": [
            (row, "–" if row.file is None else f"{visible(row.file, limit=200)}:{row.line}") for row in survey.longest
        ],
        "samples": [_sample(shown, survey.split, number) for number in _spread(survey.rows, samples)],
    }


def _by_size(entry: tuple[str, Any]) -> int:
    return -int(entry[1].tokens)


def _rows_of(counts: Any, whole: int) -> list[dict[str, Any]]:
    """Lines of a table with bars, as widths of 1000."""
    return [
        {
            "name": name,
            "tokens": count.tokens,
            "trained": count.trained,
            "share": count.tokens / whole if whole else 0,
            "trained_share": count.trained / count.tokens if count.tokens else 0,
            "width": round(1000 * count.tokens / whole) if whole else 0,
            "trained_width": round(1000 * count.trained / whole) if whole else 0,
        }
        for name, count in counts
    ]


# Charts.


def _lengths(survey: SplitStats) -> Markup:
    """Rows by length: even steps up to where nearly all of them are, and one bar for the longer ones."""
    width = max(1, int(nice(survey.quantile(0.995) / BARS)))
    bars = survey.quantile(1.0) // width + 1
    bars = bars if bars <= BARS + 5 else BARS
    padded = np.zeros(max(len(survey.length_counts), bars * width), dtype=np.int64)
    padded[: len(survey.length_counts)] = survey.length_counts
    counts = padded[: bars * width].reshape(bars, width).sum(axis=1).tolist()
    names = [f"{at * width:,} to {(at + 1) * width - 1:,} tokens" for at in range(bars)]
    labels = {at: f"{at * width:,}" for at in range(0, bars + 1, 8)}
    if longer := int(padded[bars * width :].sum()):
        counts, names = [*counts, 0, 0, longer], [*names, "", "", f"{bars * width:,} tokens and more"]
        labels[bars + 2] = "more"
    title = f"How long the rows of {survey.split} are"
    return histogram(counts, names, labels, title=title, x_label="tokens of a row", y_label="rows")


def _shares(survey: SplitStats) -> Markup:
    names = [f"{at * 100 // SHARES} to {(at + 1) * 100 // SHARES}%" for at in range(SHARES)]
    labels = {at: f"{at * 100 // SHARES}%" for at in range(0, SHARES + 1, 4)}
    title = f"How much of each row of {survey.split} is trained"
    counts = survey.share_counts.tolist()
    return histogram(counts, names, labels, title=title, x_label="trained share of a row", y_label="rows")


def _fills(survey: SplitStats) -> Markup:
    return lines(
        [
            ("packed", "packed", [fill.packed for fill in survey.fills]),
            ("one episode a row", "alone", [fill.alone for fill in survey.fills]),
        ],
        [f"{fill.block_size:,}" for fill in survey.fills],
        title=f"How full rows of {survey.split} are at each block size",
        x_label="block size",
    )


def _flow(ledger: Ledger | None, surveys: Sequence[SplitStats]) -> Markup:
    """From records to trained tokens. Where no ledger is, from stored tokens on."""
    roles: dict[str, int] = {}
    for survey in surveys:
        for name, count in survey.roles.items():
            roles[name] = roles.get(name, 0) + count.tokens - count.trained
    trained, stored = sum(each.trained for each in surveys), sum(each.tokens for each in surveys)
    last = [Node("trained", trained, "tokens", "trained")]
    last += [
        Node("outside of turns" if name == "none" else f"context: {name}", amount, "tokens", f"role-{name}")
        for name, amount in roles.items()
        if amount
    ]
    title = "From records to trained tokens"
    if ledger is None:
        columns = [[Node("stored", stored, "tokens", "stored")], last]
        return flow(columns, _links(0, columns[0], last), title=title)
    read = [Node("read", ledger.total("read").rows, "records", "came")]
    rendered = [Node("rendered", ledger.total("rendered").rows, "records", "came")]
    rendered += _nodes(ledger, ("rejected",), "rows", "records")
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
    found = []
    for bucket, reason, entry in ledger:
        if bucket in buckets and getattr(entry, column):
            name = f"{bucket}: {visible(reason.replace('_', ' '), limit=30)}" if reason else bucket
            found.append(Node(name, getattr(entry, column), unit, kind))
    return found


def _links(column: int, one: Sequence[Node], other: Sequence[Node]) -> list[Link]:
    """What stands above goes to what stands above: which tokens of a column are lost is known of their sum alone."""
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


def _sample_counts(surveys: Sequence[SplitStats]) -> dict[str, int]:
    """Most samples are of the first split; every other one has a few."""
    few = {survey.split: 4 for survey in surveys[1:]}
    return {survey.split: few.get(survey.split, SAMPLES - sum(few.values())) for survey in surveys}


def _spread(rows: int, count: int) -> list[int]:
    """So many rows, evenly spread from the first to the last."""
    return sorted({int(at) for at in np.linspace(0, rows - 1, min(count, rows))}) if rows else []


def _sample(shown: DatasetView, split: str, number: int) -> dict[str, Any]:
    """An episode with its turns and their tokens, as far as it is shown."""
    row = shown.row(split, number)
    said: list[dict[str, Any]] = []
    left = SAMPLE_TOKENS
    for segment in range(len(row.origins)):
        if is_padding(row, segment) or left <= 0:
            continue
        if len(row.origins) > 1:
            said.append({"border": f"segment {segment}: {place_name(row, segment)}"})
        for turn in turns(row, segment):
            if left <= 0:
                break
            stop = min(turn.stop, turn.start + left)
            spans = _sample_spans(row, turn.first_span, turn.last_span, stop, shown.text)
            said.append({"border": None, "turn": turn, "size": turn.stop - turn.start, "spans": spans})
            left -= stop - turn.start
    trained = int(row.spans["length"][row.spans["weight"] > 0].sum())
    return {
        "number": number,
        "place": place_name(row, 0) if len(row.origins) == 1 else f"{len(row.origins)} segments",
        "tokens": len(row.ids),
        "trained": trained / len(row.ids) if len(row.ids) else 0,
        "parts": said,
        "hidden": max(0, len(row.ids) - SAMPLE_TOKENS),
    }


def _sample_spans(row: Rows, first: int, last: int, stop: int, text: TokenText) -> list[dict[str, Any]]:
    found = []
    for at in range(first, last):
        span, start = row.spans[at], int(row.span_start[at])
        if start >= stop:
            break
        ids = row.ids[start : min(stop, int(row.span_start[at + 1]))].tolist()
        message = "" if span["message"] == NO_MESSAGE else f" {span['message']}"
        words = f"{Role(span['role']).name}{message}, {Part(span['part']).name}, rule {Rule(span['rule']).name}"
        target = "" if span["target"] == OWN_ID else f"→{text.token(int(span['target']))}"
        found.append(
            {
                "title": f"{words.lower().replace('_', ' ')}, weight {float(span['weight']):g}",
                "trained": bool(span["weight"] > 0),
                "tokens": [(each, each.endswith(("↵", "\\n"))) for each in text.tokens(ids)],
                "target": target,
            }
        )
    return found
