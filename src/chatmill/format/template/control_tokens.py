"""Control tokens in text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping


class ControlTokens:
    """Finds the control tokens of a vocabulary in text; of several that begin at one place, the longest."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        self.ids = dict(ids)
        longest_first = sorted(filter(None, ids), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._first_characters = sorted({token[0] for token in longest_first})

    def find(self, text: str) -> list[re.Match[str]]:
        return list(self._pattern.finditer(text))

    def any_in(self, texts: Iterable[str]) -> bool:
        """Whether one of the texts holds a control token; fast where none does."""
        first = self._first_characters
        return any(character in text and self._pattern.search(text) for text in texts for character in first)
