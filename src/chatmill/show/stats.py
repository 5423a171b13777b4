"""A survey of a split: all that statistics and the report say of it, counted in one pass over its spans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from chatmill.fit.packing import pack_lengths
from chatmill.load.plan import WINDOW
from chatmill.rows import NO_FILE, Index, Part, Role, Rows, Rule, offsets
from chatmill.show.explain import origin_of
from chatmill.store.read import Episodes

QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)
SHARES = 20
"""Parts that shares from 0 to 1 are counted in."""
LONGEST = 10
BLOCK_SIZES = (512, 1024, 2048, 4096, 8192)
UNKNOWN = "(unknown)"
"""The source of rows that no file is known of."""


@dataclass
class TokenCount:
    """Tokens, and how many of them are trained."""

    tokens: int = 0
    trained: int = 0
    segments: int = 0
    """Segments that they stand in; counted by source only."""


@dataclass(frozen=True)
class LongRow:
    episode: int
    tokens: int
    trained: int
    file: str | None
    line: int | None


@dataclass(frozen=True)
class RowFill:
    """How full rows of a block size are: one episode a row, and packed as the loader packs them."""

    block_size: int
    alone: float
    packed: float
    rows: int
    """Rows that packing gives."""
    cut: int
    """Episodes that are longer, and lose their beginning."""


@dataclass
class SplitStats:
    split: str
    rows: int = 0
    segments: int = 0
    """Conversations, or the parts of them that rows hold; padding is none."""
    tokens: int = 0
    trained: int = 0
    untrained_rows: int = 0
    """Rows without a trained token."""
    roles: dict[str, TokenCount] = field(default_factory=dict)
    parts: dict[str, TokenCount] = field(default_factory=dict)
    rules: dict[str, TokenCount] = field(default_factory=dict)
    sources: dict[str, TokenCount] = field(default_factory=dict)
    length_counts: Index = field(default_factory=lambda: np.zeros(1, dtype=np.int64))
    """How many rows have 0, 1, 2 … tokens."""
    share_counts: Index = field(default_factory=lambda: np.zeros(SHARES, dtype=np.int64))
    """How many rows have a trained share from 0 to 1/20, 1/20 to 2/20 …"""
    longest: list[LongRow] = field(default_factory=list)
    fills: list[RowFill] = field(default_factory=list)

    @property
    def share(self) -> float:
        return self.trained / self.tokens if self.tokens else 0.0

    def quantile(self, share: float) -> int:
        """The length that this share of all rows does not exceed; exact, as a row has it."""
        if not self.rows:
            return 0
        until = np.cumsum(self.length_counts)
        return int(np.searchsorted(until, max(1, np.ceil(share * self.rows)), side="left"))


def survey(
    episodes: Episodes,
    split: str,
    *,
    block_sizes: Sequence[int] = BLOCK_SIZES,
    progress: Callable[[int], None] = lambda rows: None,
) -> SplitStats:
    """Count a split. Reads every span once; memory grows with the longest row, not with their number."""
    found = SplitStats(split)
    for rows in episodes.sweep():
        _add(found, rows)
        progress(len(rows))
    found.fills = [_fill(episodes, size) for size in block_sizes]
    return found


def _add(found: SplitStats, rows: Rows) -> None:
    spans = rows.spans
    length = spans["length"].astype(np.int64)
    trained_length = np.where(spans["weight"] > 0, length, 0)
    trained = offsets(trained_length)
    first = rows.first_span[rows.first_segment]
    row_trained = trained[first[1:]] - trained[first[:-1]]
    row_length = rows.lengths
    _longest(found, rows, row_length, row_trained)
    for table, column, names in (
        (found.roles, "role", Role),
        (found.parts, "part", Part),
        (found.rules, "rule", Rule),
    ):
        tokens, learned = (_sums(spans[column], values) for values in (length, trained_length))
        for code in np.flatnonzero(tokens).tolist():
            _count(table, names(code).name.lower(), int(tokens[code]), int(learned[code]))
    _add_sources(found, rows, trained)
    found.rows += len(rows)
    found.tokens += len(rows.ids)
    found.trained += int(trained[-1])
    found.untrained_rows += int(np.count_nonzero(row_trained == 0))
    found.length_counts = _added(found.length_counts, np.bincount(row_length))
    # A row of which all is trained belongs to the last part.
    share = np.minimum(row_trained * SHARES // np.maximum(row_length, 1), SHARES - 1)
    found.share_counts = found.share_counts + np.bincount(share, minlength=SHARES)


def _add_sources(found: SplitStats, rows: Rows, trained: Index) -> None:
    """Segments, tokens and trained tokens of each source; padding is none of them."""
    first, has_spans = rows.first_span[:-1], np.diff(rows.first_span) > 0
    is_talk = np.zeros(len(rows.origins), dtype=np.bool_)
    is_talk[has_spans] = rows.spans["part"][first[has_spans]] != Part.PAD
    file = np.where(rows.origins["file"] == NO_FILE, len(rows.files), rows.origins["file"]).astype(np.int64)
    tokens = np.diff(rows.segment_start)
    learned = np.diff(trained[rows.first_span])
    names = [*(each.source for each in rows.files), UNKNOWN]
    counts = [np.bincount(file[is_talk], weights=values[is_talk], minlength=len(names)) for values in (tokens, learned)]
    talks = np.bincount(file[is_talk], minlength=len(names))
    for number in np.flatnonzero(talks).tolist():
        _count(found.sources, names[number], int(counts[0][number]), int(counts[1][number]), int(talks[number]))
    found.segments += int(is_talk.sum())


def _longest(found: SplitStats, rows: Rows, length: Index, trained: Index) -> None:
    few = np.argsort(-length, kind="stable")[:LONGEST]
    if len(found.longest) == LONGEST:
        few = few[length[few] > found.longest[-1].tokens]
    for row in few.tolist():
        segment = int(rows.first_segment[row])
        known = segment < int(rows.first_segment[row + 1])
        file, line, _ = origin_of(rows, segment) if known else (None, None, None)
        found.longest.append(LongRow(found.rows + row, int(length[row]), int(trained[row]), file, line))
    found.longest.sort(key=lambda each: (-each.tokens, each.episode))
    del found.longest[LONGEST:]


def _fill(episodes: Episodes, block_size: int) -> RowFill:
    """Packed as the loader would in stored order: windows of its size, rows of one token more than x has."""
    capacity, tokens, rows, cut = block_size + 1, 0, 0, 0
    for start in range(0, len(episodes), WINDOW):
        length = episodes.lengths_of(np.arange(start, min(len(episodes), start + WINDOW)))
        cut += int(np.count_nonzero(length > capacity))
        kept = np.minimum(length[length > 0], capacity)
        tokens += int(kept.sum())
        rows += len(pack_lengths(kept, capacity))
    return RowFill(
        block_size,
        tokens / (len(episodes) * capacity) if len(episodes) else 0.0,
        tokens / (rows * capacity) if rows else 0.0,
        rows,
        cut,
    )


def _count(table: dict[str, TokenCount], name: str, tokens: int, trained: int, segments: int = 0) -> None:
    count = table.setdefault(name, TokenCount())
    count.tokens += tokens
    count.trained += trained
    count.segments += segments


def _sums(codes: NDArray[np.uint8], values: Index) -> Index:
    return np.bincount(codes, weights=values, minlength=256).astype(np.int64)


def _added(one: Index, other: Index) -> Index:
    longer, shorter = (one, other) if len(one) >= len(other) else (other, one)
    total = longer.copy()
    total[: len(shorter)] += shorter
    return total
