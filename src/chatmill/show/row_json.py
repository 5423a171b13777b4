"""Rows as plain data, for JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from chatmill.load.batch import IGNORE_INDEX
from chatmill.rows import NO_MESSAGE, OWN_ID, Part, Role, Rows, Rule
from chatmill.show.explain import origin_of


def row_json(row: Rows) -> dict[str, Any]:
    """One row: its segments, ids, labels, weights and spans."""
    targets, mask = row.targets().tolist(), row.mask().tolist()
    return {
        "segments": list(_segments_json(row)),
        "ids": row.ids.tolist(),
        "labels": [target if trained else IGNORE_INDEX for target, trained in zip(targets, mask, strict=True)],
        "weights": row.weights().tolist(),
        "spans": list(spans_json(row)),
    }


def _segments_json(row: Rows) -> Iterator[dict[str, Any]]:
    for segment in range(len(row.origins)):
        file, line, source = origin_of(row, segment)
        start, stop = row.segment_start[segment : segment + 2].tolist()
        yield {"start": start, "stop": stop, "source": source, "file": file, "line": line}


def spans_json(row: Rows) -> Iterator[dict[str, Any]]:
    for span, start, stop in zip(row.spans, row.span_start[:-1].tolist(), row.span_start[1:].tolist(), strict=True):
        yield {
            "start": start,
            "stop": stop,
            "role": Role(span["role"]).name.lower(),
            "part": Part(span["part"]).name.lower(),
            "rule": Rule(span["rule"]).name.lower(),
            "message": None if span["message"] == NO_MESSAGE else int(span["message"]),
            "weight": float(span["weight"]),
            "target": None if span["target"] == OWN_ID else int(span["target"]),
        }
