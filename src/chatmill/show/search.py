"""Search: the text of many episodes at once, folded so that case makes no difference, and where a text is in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from chatmill.errors import DataError, UsageError
from chatmill.rows import Index, Rows, copy_tokens, offsets
from chatmill.show.dataset import DatasetView
from chatmill.show.text import TokenText, visible

END = 0xFF
"""What ends the text of an episode: a byte that is in no UTF-8 text, and so in nothing that is searched for."""
AROUND = 40
"""Characters that are shown before and after what was found."""


class TextMatch(NamedTuple):
    """Where a text stands in an episode: its first token and the one after its last, and the words around it."""

    start: int
    stop: int
    before: str
    found: str
    after: str


def fold(text: bytes) -> bytes:
    """Text such that case makes no difference; bytes that are no UTF-8 stay as they are."""
    if text.isascii():
        return text.lower()
    return text.decode("utf-8", "surrogateescape").casefold().encode("utf-8", "surrogateescape")


def needle_of(text: str) -> bytes:
    """What to look for in folded text."""
    needle = text.casefold().encode("utf-8", "replace")
    if not needle:
        raise UsageError("there is nothing to search for; give a text")
    return needle


class PieceTable:
    """The bytes of every id of a vocabulary side by side, so that any number of tokens becomes text in one go."""

    def __init__(self, text: TokenText) -> None:
        if text.tokenizer is None:
            raise DataError("without its tokenizer a dataset has no text; name it with --tokenizer")
        pieces = [text.piece(id).replace(bytes([END]), b"?") for id in range(text.tokenizer.vocab_size)]
        # The last one, empty, stands for every id beyond the vocabulary.
        self._start = offsets(np.array([len(piece) for piece in [*pieces, b""]], dtype=np.int64))
        self._bytes = np.frombuffer(b"".join(pieces), dtype=np.uint8).astype(np.uint32)

    def folded(self, rows: Rows) -> tuple[bytes, Index]:
        """The text of some rows, folded, each with END after it; and where each begins, with the end of all."""
        ids = np.minimum(rows.ids, len(self._start) - 2).astype(np.int64)
        length = np.diff(self._start)[ids]
        text = copy_tokens(self._bytes, self._start[ids], length).astype(np.uint8)
        edges = offsets(length)[rows.row_start]
        joined = np.full(len(text) + len(rows), END, dtype=np.uint8)
        of_text = np.ones(len(joined), dtype=np.bool_)
        of_text[edges[1:] + np.arange(len(rows))] = False
        if not len(text) or text.max() < 0x80:
            joined[of_text] = np.frombuffer(text.tobytes().lower(), dtype=np.uint8)
        else:
            joined[of_text] = text
            joined = np.frombuffer(fold(joined.tobytes()), dtype=np.uint8)
        return joined.tobytes(), np.append(0, np.flatnonzero(joined == END) + 1)


def found_in(text: bytes, edges: Index, needle: bytes, start: int = 0) -> Iterator[int]:
    """The rows of folded text, from `start` on, that hold the needle."""
    at = text.find(needle, int(edges[start]))
    while at >= 0:
        row = int(np.searchsorted(edges, at, side="right")) - 1
        yield row
        at = text.find(needle, int(edges[row + 1]))


def find(
    shown: DatasetView, split: str, text: str, *, progress: Callable[[int], None] = lambda count: None
) -> Iterator[int]:
    """The episodes of a split that hold a text, whatever its case, in order. Reads all of it, some at a time."""
    needle, table = needle_of(text), PieceTable(shown.text)
    first = 0
    for rows in shown.dataset[split].sweep(tokens=1 << 20):
        for row in found_in(*table.folded(rows), needle):
            yield first + row
        first += len(rows)
        progress(len(rows))


def locate(ids: list[int], text: TokenText, query: str) -> TextMatch | None:
    """Where a text first stands in these tokens, whatever its case."""
    pieces = [text.piece(id) for id in ids]
    said = b"".join(pieces).decode("utf-8", "surrogateescape")
    folded = [character.casefold() for character in said]
    sizes = offsets(np.fromiter(map(len, folded), dtype=np.int64, count=len(folded)))
    at = "".join(folded).find(query.casefold())
    if at < 0:
        return None
    first = int(np.searchsorted(sizes, at, side="right")) - 1
    last = int(np.searchsorted(sizes, at + len(query.casefold()), side="left"))
    bytes_before = [len(said[:stop].encode("utf-8", "surrogateescape")) for stop in (first, last)]
    edges = offsets(np.fromiter(map(len, pieces), dtype=np.int64, count=len(pieces)))
    return TextMatch(
        int(np.searchsorted(edges, bytes_before[0], side="right")) - 1,
        int(np.searchsorted(edges, bytes_before[1], side="left")),
        _shown(said[max(0, first - AROUND) : first], cut_before=first > AROUND),
        _shown(said[first:last]),
        _shown(said[last : last + AROUND], cut_after=last + AROUND < len(said)),
    )


def _shown(text: str, *, cut_before: bool = False, cut_after: bool = False) -> str:
    readable = text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return f"{'…' if cut_before else ''}{visible(readable)}{'…' if cut_after else ''}"
