"""Find the record weights of stored conversations.

A dataset has no column for record weights. The weight of a record is stored only as the loss weight of its trained
tokens with the rule `role`; without such tokens, the record weight is unknown. Blocks and rows made by `--fit windows`
contain only parts of conversations, so a record weight that is missing in one part may be stored in another part of the
same conversation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.rows import ORIGIN, Index, Rule, Table, TrainOn, as_bytes, offsets, select, weights_by_role

Keys = NDArray[np.bytes_]
Weights = NDArray[np.float32]
Chunk = tuple[Table, Index, Table]
"""Spans, the first span of each conversation, and the origins of the conversations."""


@dataclass(frozen=True)
class RecordWeights:
    """The record weights of conversations that have trained tokens with the rule `role` in the new loss mask, but not
    in the old one.
    """

    keys: Keys
    """The origins of the conversations as bytes, sorted."""
    weights: Weights
    """The record weight of each conversation, or NaN if no part of the conversation contains the weight."""

    @property
    def unknown(self) -> Table:
        """The origins of the conversations whose record weight is not in the dataset."""
        return np.frombuffer(self.keys[np.isnan(self.weights)].tobytes(), dtype=ORIGIN)

    def of(self, spans: Table, first_span: Index, origins: Table) -> Weights:
        """Return the record weight of each conversation in a chunk, or 1 if the new mask does not use the weight."""
        weights = weights_by_role(spans, first_span)
        missing = np.flatnonzero(weights == 0)
        at, matches = _find(self.keys, _keys(origins[missing]))
        weights[missing] = 1
        weights[missing[matches]] = self.weights[at]
        return weights


def find_record_weights(chunks: Callable[[], Iterator[Chunk]], train_on: TrainOn) -> RecordWeights:
    """Find conversations that need a record weight but do not store it, then search all chunks for these weights."""
    missing = [_keys(origins[_is_missing(spans, first, train_on)]) for spans, first, origins in chunks()]
    keys = np.unique(np.concatenate(missing)) if missing else _keys(np.empty(0, dtype=ORIGIN))
    lowest, highest = (np.full(len(keys), limit, dtype=np.float32) for limit in (np.inf, 0))
    for spans, first, origins in chunks() if len(keys) else ():
        weights = weights_by_role(spans, first)
        known = np.flatnonzero(weights)
        at, matches = _find(keys, _keys(origins[known]))
        np.minimum.at(lowest, at, weights[known[matches]])
        np.maximum.at(highest, at, weights[known[matches]])
    return RecordWeights(keys, np.where(lowest == highest, lowest, np.float32(np.nan)))


def _is_missing(spans: Table, first_span: Index, train_on: TrainOn) -> NDArray[np.bool_]:
    """For each conversation, return whether it has trained tokens with the rule `role` in the new loss mask, but not in
    the old one.
    """
    gains = select(spans, first_span, train_on) & (spans["rule"] == Rule.ROLE)
    gained = np.diff(offsets(gains)[first_span])
    missing: NDArray[np.bool_] = (gained > 0) & (weights_by_role(spans, first_span) == 0)
    return missing


def _keys(origins: Table) -> Keys:
    """Return the file, line and hash of each conversation as bytes, which can be sorted and compared."""
    table = np.empty(len(origins), dtype=ORIGIN)
    for name in ORIGIN.names or ():
        table[name] = origins[name]
    keys: NDArray[Any] = as_bytes(table).view(f"S{ORIGIN.itemsize}")
    return keys


def _find(keys: Keys, wanted: Keys) -> tuple[Index, Index]:
    """Find `wanted` in the sorted `keys`; return the position of each match in `keys` and its index in `wanted`."""
    if not len(keys):
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    matches = np.flatnonzero(keys[at] == wanted)
    return at[matches], matches
