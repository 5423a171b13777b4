"""Search for control tokens in text."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, count


class ControlTokens:
    """Finds the control tokens of a vocabulary in text, and prefers the longest token at each position."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        self.ids = dict(ids)
        longest_first = sorted(filter(None, ids), key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        characters = {*"".join(ids)}
        self._separator = next(character for character in map(chr, count()) if character not in characters)
        self._first_characters = sorted({token[0] for token in longest_first})

    def find(self, text: str) -> list[re.Match[str]]:
        return list(self.pattern.finditer(text))

    def indices_in(self, texts: Sequence[str]) -> list[int]:
        """Return the indices of the texts that contain a control token."""
        if not self.ids:
            return []
        starts = [*accumulate((len(text) + 1 for text in texts), initial=0)]
        places = [match.start() for match in self.pattern.finditer(self._separator.join(texts))]
        return sorted({bisect_right(starts, place) - 1 for place in places})

    def any_in(self, texts: Iterable[str]) -> bool:
        first = self._first_characters
        return any(character in text and self.pattern.search(text) for text in texts for character in first)

    def may_touch(self, before: str, after: str) -> bool:
        """Whether `before` or `after` contains a control token, or could form one with the text between them."""
        if self.any_in((before, after)):
            return True
        return any(
            before.endswith(token[:at]) or after.startswith(token[at:])
            for token in self.ids
            for at in range(1, len(token))
        )
