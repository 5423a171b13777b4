"""Text from data as it may be shown: what each token stands for, with nothing in it that could act."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from chatmill.errors import ChatmillError
from chatmill.tokenizer import Tokenizer

JOINERS = "\u200c\u200d"
"""Invisible, but they belong to words and emoji, and do nothing else."""
SPACE = {" ": "·", "\n": "↵", "\t": "→", "\r": "␍"}
"""How a token that is nothing but space is shown."""

_SUSPECT = re.compile(r"[^ -~]")


def visible(text: str, *, keep: str = "", limit: int | None = None) -> str:
    """The text with every character escaped that prints nothing: controls, escapes, direction marks, separators.

    `keep` are such characters that stay, as line ends where lines are shown; of a longer text only `limit` stay.
    """
    kept = text if limit is None else text[:limit]
    shown = kept if kept.isprintable() else _SUSPECT.sub(lambda found: _shown(found[0], keep), kept)
    return shown if len(kept) == len(text) else shown + "…"


def _shown(character: str, keep: str) -> str:
    if character.isprintable() or character in keep or character in JOINERS:
        return character
    return character.encode("unicode_escape").decode()


class TokenText:
    """What ids stand for; without a tokenizer, or for an id that it does not have, the id itself: ⟨812⟩."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self._pieces: dict[int, bytes] = {}

    def piece(self, id: int) -> bytes:
        """The bytes of one token."""
        if id not in self._pieces:
            self._pieces[id] = self._read(id)
        return self._pieces[id]

    def _read(self, id: int) -> bytes:
        if self.tokenizer is not None:
            try:
                return self.tokenizer.piece(id)
            except ChatmillError:
                pass
        return f"⟨{id}⟩".encode()

    def tokens(self, ids: Iterable[int]) -> list[str]:
        """Each token by itself. Of a character that several tokens share, each shows its bytes: \\xe2."""
        return [self.token(id) for id in ids]

    def token(self, id: int) -> str:
        text = self.piece(id).decode("utf-8", "backslashreplace")
        return "".join(SPACE[each] for each in text) if text and set(text) <= SPACE.keys() else visible(text)

    def text(self, ids: Sequence[int], *, keep: str = "", limit: int | None = None) -> str:
        """Tokens read together, as text."""
        # A token stands for a byte or more, but for the rare empty one: so many of them hold `limit` characters.
        few = ids if limit is None else ids[: 4 * limit + 4]
        return visible(b"".join(map(self.piece, few)).decode("utf-8", "backslashreplace"), keep=keep, limit=limit)
