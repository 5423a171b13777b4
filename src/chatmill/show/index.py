"""The index of a split: what its episodes can be filtered and searched by, made once and kept in a cache folder.

    columns    for each episode: its tokens and how many are trained, its roles, rules and sources
    text.bin   the folded text of all episodes, one after the other, each with END after it
    ends       where the text of each episode begins, with the end of all
    grams.bin  for each block of the text one bit for every (hashed) run of four bytes that begins in it: a block
               without a run of what is searched for is never read

It can be asked while it is being made, and then knows the episodes before `filtered` and before `searched`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from time import monotonic
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.store.read import Episodes

COLUMNS = {"tokens": "<u8", "trained": "<u8", "sources": "<u8", "rules": "<u4", "roles": "u1"}
MOST_SOURCES = 64
"""Sources that have a bit of their own; any further ones share the last."""
BLOCK = 1 << 15
BITS = 1 << 15
GRAM = 4
RUN = 1 << 20
"""Bytes of text that are looked through at a time."""


@dataclass(frozen=True)
class Filter:
    """Which episodes are wanted; None and 0 leave a choice open."""

    roles: int = 0
    """Bits of roles, all of which must speak."""
    rules: int = 0
    """Bits of rules, all of which must have decided something."""
    source: int | None = None
    least: int | None = None
    most: int | None = None
    share_from: float | None = None
    share_to: float | None = None

    @property
    def is_open(self) -> bool:
        return self == Filter()


class SearchHits(NamedTuple):
    episodes: list[int]
    after: int
    """The episode to go on from."""
    ended: bool
    """All that is known was looked through."""


class SplitIndex:
    """The index of one split, perhaps still growing."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.filtered = 0
        """Episodes whose columns are known."""
        self.searched = 0
        """Episodes whose text is known."""
        self.error: str | None = None
        # What the files hold; whoever makes or opens the index sets them, and then counts up.
        self.columns: dict[str, NDArray[Any]] = {}
        self.ends: NDArray[np.int64] = np.zeros(1, dtype=np.int64)
        self.text = -1
        """The open file of the text."""
        self.grams: NDArray[np.uint8] = np.empty((0, BITS // 8), dtype=np.uint8)
        self.blocks = 0
        """Blocks of the text that have their bits."""

    @property
    def is_complete(self) -> bool:
        return self.filtered == self.searched == self.count

    def mask(self, wanted: Filter) -> NDArray[np.bool_]:
        """Which of the first `filtered` episodes are wanted."""
        count = self.filtered
        column = {name: values[:count] for name, values in self.columns.items()}
        kept = np.ones(count, dtype=np.bool_)
        if wanted.is_open or not count:
            return kept
        if wanted.roles:
            kept &= column["roles"] & wanted.roles == wanted.roles
        if wanted.rules:
            kept &= column["rules"] & wanted.rules == wanted.rules
        if wanted.source is not None:
            kept &= column["sources"] & np.uint64(1 << source_bit(wanted.source)) != 0
        if wanted.least is not None:
            kept &= column["tokens"] >= wanted.least
        if wanted.most is not None:
            kept &= column["tokens"] <= wanted.most
        if wanted.share_from is not None or wanted.share_to is not None:
            share = column["trained"] / np.maximum(column["tokens"], 1)
            kept &= (share >= (wanted.share_from or 0)) & (share <= (1 if wanted.share_to is None else wanted.share_to))
        return kept

    def search(
        self, needle: bytes, start: int, limit: int, *, kept: NDArray[np.bool_] | None = None, seconds: float = 0.3
    ) -> SearchHits:
        """Up to `limit` episodes from `start` on that hold the needle, as many as are found in about that time."""
        deadline, found = monotonic() + seconds, list[int]()
        searched, blocks = self.searched, self.blocks
        if start >= searched:
            return SearchHits(found, start, ended=True)
        ends, begun = self.ends, start
        stop = int(ends[searched])
        for first, last in self._runs(needle, int(ends[start]), stop, blocks):
            # What was found before may have led past the beginning of this run.
            at = max(first, int(ends[start]))
            text = os.pread(self.text, last + len(needle) - 1 - at, at) if at < last else b""
            place = text.find(needle)
            while 0 <= place < last - at:
                episode = int(np.searchsorted(ends[: searched + 1], at + place, side="right")) - 1
                start = episode + 1
                if kept is None or (episode < len(kept) and kept[episode]):
                    found.append(episode)
                    if len(found) == limit:
                        return SearchHits(found, start, ended=start >= searched)
                place = text.find(needle, int(ends[start]) - at)
            # Whoever asks goes on from here, so at least one whole episode was looked through.
            reached = max(start, int(np.searchsorted(ends[: searched + 1], last, side="right")) - 1)
            if monotonic() > deadline and reached > begun:
                return SearchHits(found, reached, ended=reached >= searched)
        return SearchHits(found, searched, ended=True)

    def _runs(self, needle: bytes, start: int, stop: int, blocks: int) -> Iterator[tuple[int, int]]:
        """Ranges of the text in which the needle may begin, rising, each of at most RUN bytes."""
        first = start // BLOCK
        if len(needle) < GRAM or first >= blocks:
            yield from _cut(start, stop)
            return
        may = np.ones(blocks - first, dtype=np.bool_)
        for gram in np.unique(grams_of(np.frombuffer(needle, dtype=np.uint8))).tolist():
            here = self.grams[first:blocks, gram // 8] & (128 >> gram % 8) != 0
            # What begins in a block may end in the next one.
            here[:-1] |= here[1:]
            here[-1] = True
            may &= here
        edges = np.flatnonzero(np.diff(may, prepend=False, append=False)) + first
        for begin, end in edges.reshape(-1, 2).tolist():
            yield from _cut(max(start, begin * BLOCK), min(stop, end * BLOCK))
        if blocks * BLOCK < stop:
            yield from _cut(max(start, blocks * BLOCK), stop)


def source_bit(source: int) -> int:
    return min(source, MOST_SOURCES - 1)


def _cut(start: int, stop: int) -> Iterator[tuple[int, int]]:
    while start < stop:
        end = min(stop, start + RUN)
        yield start, end
        start = end


def grams_of(text: NDArray[np.uint8]) -> NDArray[np.int64]:
    """The bit of each run of four bytes."""
    wide = text.astype(np.uint32)
    runs = wide[:-3] | wide[1:-2] << np.uint32(8) | wide[2:-1] << np.uint32(16) | wide[3:] << np.uint32(24)
    bits: NDArray[np.int64] = (runs * np.uint32(0x9E3779B1) >> np.uint32(33 - BITS.bit_length())).astype(np.int64)
    return bits


def sources_of(episodes: Episodes) -> list[str]:
    """The names of the sources of a split, in order of first use."""
    return list(dict.fromkeys(file.source for file in episodes.files))
