"""Byte offsets in encoded texts to token positions."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.rows import offsets
from chatmill.tokenizer.backend import Offsets


class TokenPositions(NamedTuple):
    """For each byte offset: the first token that begins at or after it."""

    position: Offsets
    inside: NDArray[np.bool_]
    """Whether the token before that position extends past the offset."""
    exact: NDArray[np.bool_]
    """False where the tokens do not spell the text, so that the position is a guess."""


def token_positions(
    byte_lengths: NDArray[np.int64], start: Offsets, stop: Offsets, *, size: Offsets, offset: Offsets
) -> TokenPositions:
    """The token position of each `offset` into a text of `size` bytes that was encoded as tokens [start, stop).

        text     Hello|world      offset 5
        tokens   Hel lo wor ld    position 2
        tokens   Hel low or ld    position 2, inside a token

    The rule: a token belongs to the side of the border on which it begins. Offsets are counted from the end of the
    text, since some tokenizers put one space before its first token. A tokenizer that normalizes a text changes its
    length in bytes; its borders are not exact then. `byte_lengths` are those of all tokens that the ranges refer to.
    """
    begin = offsets(byte_lengths)
    added = begin[stop] - begin[start] - size
    target = begin[stop] - size + offset
    position = np.clip(np.searchsorted(begin, target), start, stop)
    return TokenPositions(position, begin[position] != target, (added == 0) | (added == 1))
