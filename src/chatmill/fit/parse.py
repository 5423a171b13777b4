"""Parse: bare token ids back into turns, for callers that bring ids instead of conversations."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike, NDArray

from chatmill.errors import DataError
from chatmill.rows import NO_FILE, ORIGIN, OWN_ID, SPAN, Part, Role, Rows, Rule


def parse(ids: ArrayLike, mask: ArrayLike, *, openers: Mapping[Role, int], close: int) -> Rows:
    """One row whose turns run from a role token through the first `close`, with the mask it was given.

    A role token always begins a turn, closed or not before it; what stands between turns is a unit of
    its own, without a role.
    """
    wide = np.asarray(ids, dtype=np.int64)
    if np.any((wide < 0) | (wide >= 2**32)):
        raise DataError("token ids must be whole numbers from 0 to 4294967295")
    tokens = wide.astype(np.uint32)
    trained = np.asarray(mask, dtype=bool)
    role_at = np.full(len(tokens), Role.NONE, dtype=np.uint8)
    for role, opener in openers.items():
        role_at[tokens == opener] = role
    opens = np.flatnonzero(role_at != Role.NONE)
    closes = np.append(np.flatnonzero((tokens == close) & (role_at == Role.NONE)), len(tokens))
    limit = np.append(opens[1:], len(tokens))
    first_close = closes[np.searchsorted(closes, opens)]
    closed = first_close < limit
    stops = np.where(closed, first_close + 1, limit)

    turned = np.flatnonzero(trained[1:] != trained[:-1]) + 1
    borders = np.concatenate([[0], opens, opens + 1, first_close[closed], stops, turned])
    borders = np.unique(borders[borders < len(tokens)]).astype(np.int64)
    units = np.unique(np.concatenate([[0], opens, stops]))
    turn = np.searchsorted(opens, borders, side="right") - 1
    inside = (turn >= 0) & (borders < np.append(stops, 0)[turn])

    spans = np.zeros(len(borders), dtype=SPAN)
    spans["length"] = np.diff(np.append(borders, len(tokens)))
    spans["message"] = np.searchsorted(units, borders, side="right") - 1
    spans["weight"] = trained[borders]
    spans["target"] = OWN_ID
    spans["role"] = np.where(inside, np.append(role_at[opens], Role.NONE)[turn], Role.NONE)
    spans["part"] = Part.CONTENT
    spans["part"][np.isin(borders, opens)] = Part.OPEN
    spans["part"][np.isin(borders, first_close[closed])] = Part.CLOSE
    spans["rule"] = Rule.GIVEN
    origins = np.zeros(1, dtype=ORIGIN)
    origins["file"] = NO_FILE
    one = np.array([0, 1], dtype=np.int64)
    return Rows(tokens, spans, np.array([0, len(spans)], dtype=np.int64), origins, one)


def assistant_mask(ids: ArrayLike, *, assistant: int, close: int) -> NDArray[np.bool_]:
    """True from after each `assistant` token through the next `close`, whatever stands between them."""
    tokens = np.asarray(ids, dtype=np.int64)
    place = np.arange(1, len(tokens) + 1)
    opened = np.maximum.accumulate(np.where(tokens == assistant, place, 0))
    closed = np.maximum.accumulate(np.where(tokens == close, place, 0))
    closed_before = np.append(0, closed[:-1])[: len(tokens)]
    mask: NDArray[np.bool_] = (opened > closed_before) & (tokens != assistant)
    return mask
