"""Transcripts: documents of bare token ids, several conversations each, as the Rows that rendering would give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np

from chatmill.errors import DataError
from chatmill.rows import NO_FILE, ORIGIN, OWN_ID, SPAN, Part, Role, Rows, Rule, offsets, weigh


def parse_transcripts(documents: Sequence[Sequence[int]], *, openers: Mapping[Role, int], close: int, eos: int) -> Rows:
    """One row a document, to which its EOS is added, with a segment for each conversation that an EOS ends.

        U u E A a EOS b   ->   U|u|E A|a EOS   b EOS
                               user  asst      a stray token, which is nobody's

    A turn runs from its marker through the first END; another marker or EOS ends it unclosed.
    """
    if len({*openers.values(), close, eos}) < len(openers) + 2:
        raise DataError("two of the markers have the same id; each needs its own")
    wide = np.fromiter(chain.from_iterable(chain(document, (eos,)) for document in documents), dtype=np.int64)
    if np.any((wide < 0) | (wide >= 2**32)):
        raise DataError("token ids must be whole numbers from 0 to 4294967295")
    tokens = wide.astype(np.uint32)
    size = len(tokens)

    role_at = np.full(size, Role.NONE, dtype=np.uint8)
    for role, opener in openers.items():
        role_at[tokens == opener] = role
    opens, ends = np.flatnonzero(role_at != Role.NONE), np.flatnonzero(tokens == eos)
    breaks = np.flatnonzero((role_at != Role.NONE) | (tokens == eos))
    limit = np.append(breaks, size)[np.searchsorted(breaks, opens, side="right")]
    closes = np.append(np.flatnonzero(tokens == close), size)
    first_close = closes[np.searchsorted(closes, opens)]
    closed = first_close < limit
    stops = np.where(closed, first_close + 1, limit)
    closes = first_close[closed]

    border = np.zeros(size + 1, dtype=bool)
    for at in (0, opens, opens + 1, closes, stops, ends, ends + 1):
        border[at] = True
    start = np.flatnonzero(border[:-1])
    turn = np.searchsorted(opens, start, side="right") - 1
    inside = (turn >= 0) & (start < np.append(stops, 0)[turn])
    part_at = np.full(size, Part.CONTENT, dtype=np.uint8)
    part_at[opens], part_at[closes], part_at[ends] = Part.OPEN, Part.CLOSE, Part.EOS

    segment_start = np.append(0, ends + 1)
    first_span = np.searchsorted(start, segment_start)
    spans = np.zeros(len(start), dtype=SPAN)
    spans["length"] = np.diff(np.append(start, size))
    spans["target"] = OWN_ID
    spans["role"] = np.where(inside, np.append(role_at[opens], Role.NONE)[turn], Role.NONE)
    spans["part"] = part_at[start]
    spans["rule"] = np.where(spans["part"] == Part.EOS, Rule.HEADER, Rule.ROLE)
    # Messages count turns and strays; the EOS belongs to the last, as in a rendered row.
    unit = np.cumsum((spans["part"] == Part.OPEN) | (~inside & (spans["part"] != Part.EOS)))
    before = np.append(0, unit)[first_span[:-1]]
    spans["message"] = np.maximum(unit - np.repeat(before, np.diff(first_span)) - 1, 0)
    weigh(spans, first_span, "assistant")
    origins = np.zeros(len(ends), dtype=ORIGIN)
    origins["file"] = NO_FILE
    row_start = offsets(np.array([len(document) + 1 for document in documents], dtype=np.int64))
    return Rows(tokens, spans, first_span, origins, np.searchsorted(segment_start, row_start))
