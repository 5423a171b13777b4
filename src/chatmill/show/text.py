"""Decode tokens to text for display, and search the text of episodes, ignoring case."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from chatmill.errors import ChatmillError, DataError, UsageError, one_line
from chatmill.rows import Index, Rows, copy_tokens, offsets
from chatmill.store.episodes import Episodes
from chatmill.tokenizer import Tokenizer

JOINERS = "\u200c\u200d"
"""Zero-width joiners, which are invisible but harmless parts of words and emoji."""
SPACE = {" ": "·", "\n": "↵", "\t": "→", "\r": "␍"}
"""The displayed form of tokens that consist only of whitespace."""
END = b"\xff"
"""The byte after the text of an episode; no query contains it, because it is not valid in UTF-8."""
CONTEXT = 40
"""Number of characters shown before and after a match."""


def visible(text: str, *, keep: str = "", limit: int | None = None) -> str:
    """Like `one_line`, but keep zero-width joiners, which occur in conversation text."""
    return one_line(text, limit, keep=keep + JOINERS)


class TokenText:
    """Decodes token ids. Without a tokenizer, or for an id outside the vocabulary, the text is the id: ⟨812⟩."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self._pieces: dict[int, bytes] = {}

    def piece(self, id: int) -> bytes:
        """Return the bytes of one token."""
        if id not in self._pieces:
            self._pieces[id] = f"⟨{id}⟩".encode()
            if self.tokenizer is not None:
                with suppress(ChatmillError):
                    self._pieces[id] = self.tokenizer.piece(id)
        return self._pieces[id]

    def tokens(self, ids: Iterable[int]) -> list[str]:
        """Return the text of each token, decoded separately. Incomplete characters are shown as bytes: \\xe2."""
        return [self.token(id) for id in ids]

    def token(self, id: int) -> str:
        text = self.piece(id).decode("utf-8", "backslashreplace")
        return "".join(SPACE[each] for each in text) if text and set(text) <= SPACE.keys() else visible(text)

    def text(self, ids: Sequence[int], *, keep: str = "", limit: int | None = None) -> str:
        """Decode a sequence of tokens to one string."""
        # A character spans at most four tokens, so 4 * limit nonempty tokens contain at least `limit` characters.
        ids = ids if limit is None else ids[: 4 * limit + 4]
        return visible(b"".join(map(self.piece, ids)).decode("utf-8", "backslashreplace"), keep=keep, limit=limit)


# Search.


def fold(text: bytes) -> bytes:
    """Case-fold UTF-8 text; bytes that are not valid UTF-8, such as END, do not change."""
    if text.replace(END, b"").isascii():
        return text.lower()
    return text.decode("utf-8", "surrogateescape").casefold().encode("utf-8", "surrogateescape")


def folded_query(query: str) -> bytes:
    """Return the case-folded search string as UTF-8; raise `UsageError` if it is empty."""
    folded = query.casefold().encode("utf-8", "replace")
    if not folded:
        raise UsageError("the search text is empty; enter at least one character")
    return folded


class PieceTable:
    """The bytes of all tokens of a vocabulary in one array, for decoding many tokens at once."""

    def __init__(self, text: TokenText) -> None:
        if text.tokenizer is None:
            raise DataError("the tokens cannot be decoded without their tokenizer; pass it with --tokenizer")
        # Add an empty piece for all ids beyond the vocabulary, and a piece for the end of an episode.
        pieces = [text.piece(id).replace(END, b"?") for id in range(text.tokenizer.vocab_size)] + [b"", END]
        self._length = np.array([len(piece) for piece in pieces], dtype=np.int64)
        self._start = offsets(self._length)
        self._bytes = np.frombuffer(b"".join(pieces), dtype=np.uint8).astype(np.uint32)

    def folded(self, rows: Rows) -> tuple[bytes, Index]:
        """Return the case-folded text of all rows, with END after each row, and the byte offsets of the rows in this
        text.
        """
        end = len(self._length) - 1
        ids = np.insert(np.minimum(rows.ids, end - 1).astype(np.int64), rows.row_start[1:], end)
        text = fold(copy_tokens(self._bytes, self._start[ids], self._length[ids]).astype(np.uint8).tobytes())
        return text, np.append(0, np.flatnonzero(np.frombuffer(text, dtype=np.uint8) == END[0]) + 1)


def find(
    episodes: Episodes, text: TokenText, query: str, *, progress: Callable[[int], None] = lambda count: None
) -> Iterator[int]:
    """Yield the numbers of the episodes that contain the search string, ignoring case."""
    wanted, table, first = folded_query(query), PieceTable(text), 0
    for rows in episodes.sweep(tokens=1 << 20):
        folded, start = table.folded(rows)
        at = folded.find(wanted)
        while at >= 0:
            row = int(np.searchsorted(start, at, side="right")) - 1
            yield first + row
            at = folded.find(wanted, int(start[row + 1]))
        first += len(rows)
        progress(len(rows))


class TextMatch(NamedTuple):
    """A match at tokens [start, stop) of an episode, and the text around it."""

    start: int
    stop: int
    before: str
    match: str
    after: str


def locate(ids: list[int], text: TokenText, query: str) -> TextMatch | None:
    """Return the first match of the search string in the decoded tokens, ignoring case, or None."""
    pieces = [text.piece(id) for id in ids]
    whole = b"".join(pieces).decode("utf-8", "surrogateescape")
    folded = [character.casefold() for character in whole]
    at = "".join(folded).find(query.casefold())
    if at < 0:
        return None
    # Case folding can change the number of characters, so map the match back to characters, bytes and tokens.
    folded_start = offsets(np.fromiter(map(len, folded), dtype=np.int64, count=len(folded)))
    first = int(np.searchsorted(folded_start, at, side="right")) - 1
    last = int(np.searchsorted(folded_start, at + len(query.casefold()), side="left"))
    first_byte, last_byte = (len(whole[:stop].encode("utf-8", "surrogateescape")) for stop in (first, last))
    piece_start = offsets(np.fromiter(map(len, pieces), dtype=np.int64, count=len(pieces)))
    return TextMatch(
        int(np.searchsorted(piece_start, first_byte, side="right")) - 1,
        int(np.searchsorted(piece_start, last_byte, side="left")),
        ("…" if first > CONTEXT else "") + _readable(whole[max(0, first - CONTEXT) : first]),
        _readable(whole[first:last]),
        _readable(whole[last : last + CONTEXT]) + ("…" if last + CONTEXT < len(whole) else ""),
    )


def _readable(text: str) -> str:
    return visible(text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace"))
