"""Parts of an answer that are trained or not, by ranges of its characters: from characters to tokens to spans.

    content    The| answer| is 4|.       train_ranges [[4, 10, 0]]: "answer" is not trained
    tokens     The  answer  is 4 .
    weight     own    0     own

A token that holds characters of several weights has the lowest of them, so it is trained only if all of its characters
are. Where one of these is left to the role, the role decides if ranges train the others. Such tokens are counted.
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
"""The ledger's reason for tokens with characters of several weights."""
REWRITES = (
    "its characters cannot be located in its tokens: the tokenizer changes its text",
    "use a tokenizer that keeps text unchanged, or remove train_ranges",
)
CharWeights = NDArray[np.float32]
"""By character, the weight that a range gives it; NaN where none does."""


class TokenPlaces(NamedTuple):
    """By token, where it begins and ends in a text, in characters or in bytes."""

    begin: Index
    end: Index


@dataclass(frozen=True)
class TokenWeights:
    """By token, what ranges say about its characters."""

    lowest: NDArray[np.float32]
    """The lowest weight that a range gives to one of them; NaN if none does."""
    whole: NDArray[np.bool_]
    """Whether ranges give a weight to all of them."""
    split: NDArray[np.bool_]
    """Whether their weights differ."""

    @staticmethod
    def none(count: int) -> TokenWeights:
        """Tokens without ranges."""
        flags = np.zeros((2, count), dtype=bool)
        return TokenWeights(np.full(count, np.nan, dtype=np.float32), flags[0], flags[1])

    def set(self, places: slice | Index, weights: TokenWeights) -> None:
        """Write the weights of some tokens."""
        self.lowest[places], self.whole[places], self.split[places] = weights.lowest, weights.whole, weights.split

    def take(self, tokens: Index) -> TokenWeights:
        """The weights of these tokens; of those beyond the end, none."""
        known = tokens < len(self.lowest)
        out = TokenWeights.none(len(tokens))
        at = tokens[known]
        out.set(np.flatnonzero(known), TokenWeights(self.lowest[at], self.whole[at], self.split[at]))
        return out


def char_weights(message: Message) -> CharWeights:
    """The weights of the characters of a content."""
    weights = np.full(len(message.content), np.nan, dtype=np.float32)
    for start, stop, weight in message.train_ranges:
        weights[start:stop] = weight
    return weights


def token_weights(weights: CharWeights, places: TokenPlaces) -> TokenWeights:
    """The weights of the tokens at these places of a text; a token without characters has none."""
    begin, end = (np.clip(each, 0, len(weights)) for each in places)
    by_range = ~np.isnan(weights)
    bounds = np.stack([begin, end], axis=1).ravel()

    def reduced(function: np.ufunc, values: NDArray[np.float32]) -> NDArray[np.float32]:
        # One value more, because a token may end at the end of the text.
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
    """Where each token begins and ends in the UTF-8 bytes of a text; None if the tokens do not spell it.

    Some tokenizers put a space before a text: it is no character of it, and goes with the first one.
    """
    pieces = tokenizer.pieces(ids)
    spelled, data = b"".join(pieces), text.encode()
    added = len(spelled) - len(data)
    if spelled[max(added, 0) :] != data or spelled[: max(added, 0)] not in (b"", b" "):
        return None
    end = np.cumsum([len(piece) for piece in pieces], dtype=np.int64) - added
    return TokenPlaces(np.append(-added, end[:-1])[: len(end)], np.maximum(end, 1))


def by_byte(text: str, weights: CharWeights) -> CharWeights:
    """The weight of each UTF-8 byte of a text, from those of its characters."""
    sizes = [len(character.encode()) for character in text] if not text.isascii() else 1
    return np.repeat(weights, sizes)


def apply_ranges(rows: Rows, weights: TokenWeights, ledger: Ledger | None) -> Rows:
    """The same tokens, each with the weight that ranges give it, in spans of their own; `weights` are by token."""
    spans = rows.spans
    span_of = np.repeat(np.arange(len(spans)), spans["length"])
    rule, own = spans["rule"][span_of], spans["weight"][span_of]
    flagged = rule == Rule.FLAG
    decided = ~np.isnan(weights.lowest) & ((rule == Rule.ROLE) | flagged)
    # Where a role decides about some of its characters, and ranges train the others, so does it about the token.
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
    """The fault of a message whose ranges cannot be told in its tokens."""
    what = f"message {number} has train_ranges, but {why}"
    return RecordError(what, right, kind="vague_range").at(record.file, record.line, record.id)
