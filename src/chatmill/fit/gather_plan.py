"""Make new rows from pieces of existing rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from chatmill.rows import Index, Part, Rows, Rule, copy_tokens, joined, no_origins, offsets, ragged_index

OWN_RULE = 255
"""The value of `GatherPlan.rule` for a piece whose spans keep their own weights and rules."""


@dataclass(frozen=True)
class GatherPlan:
    """Describes how to assemble new rows from pieces of existing rows.

    A piece is a token range [start, stop) of the source rows. Positions of len(source.ids) and above refer to literals:
    tokens that are not in the source rows, such as padding.
    """

    start: Index
    stop: Index
    first_piece: Index
    """Index of the first piece of each new segment. The last entry is the number of pieces."""
    origin: Index
    """Index of the source segment of each new segment, or -1 if the new segment has no source."""
    first_segment: Index
    """Index of the first new segment of each new row. The last entry is the number of new segments."""
    rule: NDArray[np.uint8] | None = None
    """For each piece, OWN_RULE or the rule that sets its weight to 0. The rule INJECTED also sets the `part` of the
    spans.
    """


def gather(source: Rows, plan: GatherPlan, literals: Rows | None = None) -> Rows:
    """Return the rows that a plan describes. Spans are split at the boundaries of pieces; empty pieces are omitted."""
    full = plan.stop > plan.start
    start, stop = plan.start[full], plan.stop[full]
    spans, span_start = source.spans, source.span_start
    if literals is not None:
        spans = joined([spans, literals.spans])
        span_start = np.append(span_start[:-1], literals.span_start + len(source.ids))
    first = np.searchsorted(span_start, start, side="right") - 1
    last = np.searchsorted(span_start, stop, side="left")
    counts = last - first
    chosen = ragged_index(first, counts)
    cut = spans.take(chosen)
    cut["length"] = np.minimum(span_start[chosen + 1], np.repeat(stop, counts)) - np.maximum(
        span_start[chosen], np.repeat(start, counts)
    )
    if plan.rule is not None:
        rule = np.repeat(plan.rule[full], counts)
        cut["weight"][rule != OWN_RULE] = 0
        cut["rule"] = np.where(rule != OWN_RULE, rule, cut["rule"])
        cut["part"][rule == Rule.INJECTED] = Part.INJECTED
    return Rows(
        copy_tokens(source.ids, start, stop - start, literals.ids if literals is not None else None),
        cut,
        offsets(counts)[offsets(full)[plan.first_piece]],
        joined([no_origins(1), source.origins]).take(plan.origin + 1),
        plan.first_segment,
        source.files,
    )
