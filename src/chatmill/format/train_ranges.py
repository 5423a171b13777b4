"""Convert `train_ranges`, which set loss weights for character ranges of an answer, to token weights and spans.

    content    The| answer| is 4|.       train_ranges [[4, 10, 0]]: "answer" is not trained on
    tokens     The  answer  is 4 .
    weight     own    0     own

A token gets the lowest weight of its characters. If ranges with positive weights cover only some characters of a token,
the role of the message determines the weight of the token. The ledger counts tokens whose characters have different
weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.errors import RecordError
from chatmill.ledger import Ledger
from chatmill.records import Message, Record
from chatmill.rows import Index, Rows, Rule
from chatmill.tokenizer import Tokenizer

SPLIT = "range_splits_token"
"""The ledger reason for tokens whose characters have different weights."""
REWRITES = (
    "the tokenizer changes the text, so characters cannot be mapped to tokens",
    "use a tokenizer that keeps text unchanged, or remove train_ranges",
)
CharWeights = NDArray[np.float32]
"""The weight that the ranges set for each character, or NaN outside all ranges."""


class TokenPlaces(NamedTuple):
    """The start and end of each token in a text, in characters or bytes."""

    begin: Index
    end: Index


@dataclass(frozen=True)
class TokenWeights:
    """The loss weights that `train_ranges` set for each token."""

    lowest: NDArray[np.float32]
    """For each token, the lowest weight of its characters, or NaN if no range covers a character of the token."""
    whole: NDArray[np.bool_]
    """For each token, whether ranges cover all its characters."""
    split: NDArray[np.bool_]
    """For each token, whether the weights of its characters differ."""

    @staticmethod
    def none(count: int) -> TokenWeights:
        """Return weights for `count` tokens that no range covers."""
        flags = np.zeros((2, count), dtype=bool)
        return TokenWeights(np.full(count, np.nan, dtype=np.float32), flags[0], flags[1])

    def set(self, places: slice | Index, weights: TokenWeights) -> None:
        self.lowest[places], self.whole[places], self.split[places] = weights.lowest, weights.whole, weights.split

    def take(self, tokens: Index) -> TokenWeights:
        """Return the weights of the tokens with these indices. An index past the last token has no weight (NaN)."""
        known = tokens < len(self.lowest)
        out = TokenWeights.none(len(tokens))
        at = tokens[known]
        out.set(np.flatnonzero(known), TokenWeights(self.lowest[at], self.whole[at], self.split[at]))
        return out


def char_weights(message: Message) -> CharWeights:
    weights = np.full(len(message.content), np.nan, dtype=np.float32)
    for start, stop, weight in message.train_ranges:
        weights[start:stop] = weight
    return weights


def token_weights(weights: CharWeights, places: TokenPlaces) -> TokenWeights:
    """Return the weight of each token, given the weight of each character and the place of each token in the text.

    A token without characters has no weight (NaN).
    """
    begin, end = (np.clip(each, 0, len(weights)) for each in places)
    by_range = ~np.isnan(weights)
    bounds = np.stack([begin, end], axis=1).ravel()

    def reduced(function: np.ufunc, values: NDArray[np.float32]) -> NDArray[np.float32]:
        # Append one value, because `reduceat` requires indices inside the array, and a token may end at the end of the
        # text.
        reduced: NDArray[np.float32] = function.reduceat(np.append(values, values[:1]), bounds)[::2]
        return reduced

    if not len(begin) or not len(weights):
        return TokenWeights.none(len(begin))
    lowest = reduced(np.minimum, np.where(by_range, weights, np.float32(np.inf)))
    highest = reduced(np.maximum, np.where(by_range, weights, np.float32(-np.inf)))
    whole = reduced(np.minimum, by_range.astype(np.float32)) > 0
    some = (reduced(np.maximum, by_range.astype(np.float32)) > 0) & (begin < end)
    split = some & (~whole | (lowest != highest))
    return TokenWeights(np.where(some, lowest, np.float32(np.nan)), whole & some, split)


def spelled_places(text: str, ids: Sequence[int], tokenizer: Tokenizer) -> TokenPlaces | None:
    """Return the byte range of each token in the UTF-8 text, or None if the tokens do not decode to the text.

    If the tokenizer adds a space before the text, the space is treated as part of the first character.
    """
    pieces = tokenizer.pieces(ids)
    spelled, data = b"".join(pieces), text.encode()
    added = len(spelled) - len(data)
    if spelled[max(added, 0) :] != data or spelled[: max(added, 0)] not in (b"", b" "):
        return None
    end = np.cumsum([len(piece) for piece in pieces], dtype=np.int64) - added
    return TokenPlaces(np.append(-added, end[:-1])[: len(end)], np.maximum(end, 1))


def by_byte(text: str, weights: CharWeights) -> CharWeights:
    """Return the weight of each UTF-8 byte of a text, given the weight of each character."""
    sizes = [len(character.encode()) for character in text] if not text.isascii() else 1
    return np.repeat(weights, sizes)


def apply_ranges(rows: Rows, weights: TokenWeights, ledger: Ledger | None) -> Rows:
    """Return `rows` with the token weights applied. Spans are split where the weights change."""
    spans = rows.spans
    span_of = np.repeat(np.arange(len(spans)), spans["length"])
    rule, own = spans["rule"][span_of], spans["weight"][span_of]
    flagged = rule == Rule.FLAG
    decided = ~np.isnan(weights.lowest) & ((rule == Rule.ROLE) | flagged)
    # If ranges with positive weights cover only part of a token, keep the weight that the role determines.
    by_range = decided & (weights.whole | flagged | (weights.lowest == 0))
    weight = np.where(flagged & ~weights.whole, np.minimum(weights.lowest, own), weights.lowest)
    begins = np.zeros(len(span_of), dtype=bool)
    begins[rows.span_start[:-1]] = True
    begins[1:] |= by_range[1:] != by_range[:-1]
    begins[1:] |= by_range[1:] & by_range[:-1] & (weight[1:] != weight[:-1])
    start = np.flatnonzero(begins)
    out = spans.take(span_of[start])
    out["length"] = np.diff(np.append(start, len(span_of)))
    chosen = by_range[start]
    out["rule"][chosen], out["weight"][chosen] = Rule.RANGE, weight[start][chosen]
    if ledger is not None and (count := int((weights.split & decided).sum())):
        ledger.add("noted", SPLIT, tokens=count)
    return replace(rows, spans=out, first_span=np.searchsorted(start, rows.segment_start))


def vague(record: Record, number: int, why: str, right: str) -> RecordError:
    """Return the error for a message whose ranges cannot be mapped to tokens."""
    what = f"message {number} has train_ranges, but {why}"
    return RecordError(what, right, kind="vague_range").at(record.file, record.line, record.id)
