"""Control tokens in text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple


class ControlTokenMatch(NamedTuple):
    start: int
    stop: int
    token: str


class ControlTokens:
    """Finds the control tokens of a vocabulary in text; of several that begin at one place, the longest."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        self.ids = dict(ids)
        longest_first = sorted(filter(None, ids), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._first_characters = sorted({token[0] for token in longest_first})

    def find(self, text: str) -> list[ControlTokenMatch]:
        return [ControlTokenMatch(*match.span(), match[0]) for match in self._pattern.finditer(text)]

    def any_in(self, texts: Iterable[str]) -> bool:
        """Whether one of the texts holds a control token; fast where none does."""
        for text in texts:
            for character in self._first_characters:
                if character in text and self._pattern.search(text):
                    return True
        return False


def common_length(one: str, other: str) -> int:
    """The length of the common prefix of two texts."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
