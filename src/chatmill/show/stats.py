"""Statistics of a split, counted in one pass over its spans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.fit import pack_lengths
from chatmill.load.plan import WINDOW
from chatmill.rows import NO_FILE, Index, Part, Role, Rows, Rule, offsets
from chatmill.show.row_view import Origin, origin_of
from chatmill.store.episodes import Episodes

QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)
SHARES = 20
"""Number of bins in the histogram of trained shares."""
LONGEST = 10
BLOCK_SIZES = (512, 1024, 2048, 4096, 8192)
UNKNOWN = "(unknown)"
"""The source name for segments that have no file."""


@dataclass
class TokenCount:
    tokens: int = 0
    trained: int = 0
    segments: int = 0
    """Number of segments that contain the counted tokens; set only in the counts by source."""


@dataclass(frozen=True)
class LongRow:
    episode: int
    tokens: int
    trained: int
    file: str | None
    line: int | None


@dataclass(frozen=True)
class RowFill:
    """The fraction of tokens that are not padding for one block size, with one episode per row and with packing."""

    block_size: int
    alone: float
    packed: float
    rows: int
    """Number of rows after packing."""
    cut: int
    """Number of episodes that are longer than a row; their start is truncated."""


@dataclass
class SplitStats:
    split: str
    rows: int = 0
    segments: int = 0
    """Number of segments other than padding."""
    tokens: int = 0
    trained: int = 0
    untrained_rows: int = 0
    """Number of rows without trained tokens."""
    roles: dict[str, TokenCount] = field(default_factory=dict)
    parts: dict[str, TokenCount] = field(default_factory=dict)
    rules: dict[str, TokenCount] = field(default_factory=dict)
    sources: dict[str, TokenCount] = field(default_factory=dict)
    length_counts: Index = field(default_factory=lambda: np.zeros(1, dtype=np.int64))
    """Numbers of rows with 0, 1, 2, … tokens."""
    share_counts: Index = field(default_factory=lambda: np.zeros(SHARES, dtype=np.int64))
    """Numbers of rows with a trained share from 0 to 1/20, from 1/20 to 2/20, …"""
    longest: list[LongRow] = field(default_factory=list)
    fills: list[RowFill] = field(default_factory=list)

    @property
    def share(self) -> float:
        return self.trained / self.tokens if self.tokens else 0.0

    def quantile(self, share: float) -> int:
        """Return a quantile of the row lengths, such as the median if `share` is 0.5."""
        if not self.rows:
            return 0
        rows_up_to = np.cumsum(self.length_counts)
        return int(np.searchsorted(rows_up_to, max(1, np.ceil(share * self.rows)), side="left"))

    def to_json(self) -> dict[str, Any]:
        return {
            **{name: getattr(self, name) for name in ("rows", "segments", "tokens", "trained")},
            "trained_share": self.share,
            "untrained_rows": self.untrained_rows,
            **{
                table: {name: {"tokens": each.tokens, "trained": each.trained} for name, each in counts.items()}
                for table, counts in (("roles", self.roles), ("parts", self.parts), ("rules", self.rules))
            },
            "sources": {name: asdict(count) for name, count in self.sources.items()},
            "length_quantiles": {f"{share:g}": self.quantile(share) for share in QUANTILES},
            "longest": [asdict(row) for row in self.longest],
            "fill": [asdict(fill) for fill in self.fills],
        }


def split_stats(
    episodes: Episodes,
    split: str,
    *,
    block_sizes: Sequence[int] = BLOCK_SIZES,
    progress: Callable[[int], None] = lambda rows: None,
) -> SplitStats:
    """Compute the statistics of a split. Memory use depends on the longest row, not on the number of rows."""
    stats = SplitStats(split)
    for rows in episodes.sweep():
        _add(stats, rows)
        progress(len(rows))
    stats.fills = [_fill(episodes, size) for size in block_sizes]
    return stats


def _add(stats: SplitStats, rows: Rows) -> None:
    spans, row_length = rows.spans, rows.lengths
    length = spans["length"].astype(np.int64)
    trained = np.where(spans["weight"] > 0, length, 0)
    trained_before = offsets(trained)
    row_trained = np.diff(trained_before[rows.first_span[rows.first_segment]])
    _add_longest(stats, rows, row_length, row_trained)
    for table, column, codes in ((stats.roles, "role", Role), (stats.parts, "part", Part), (stats.rules, "rule", Rule)):
        _count(table, {code: code.name.lower() for code in codes}, spans[column], length, trained)
    _add_sources(stats, rows, np.diff(trained_before[rows.first_span]))
    stats.rows += len(rows)
    stats.tokens += len(rows.ids)
    stats.trained += int(trained_before[-1])
    stats.untrained_rows += int(np.count_nonzero(row_trained == 0))
    length_counts = np.bincount(row_length, minlength=len(stats.length_counts))
    length_counts[: len(stats.length_counts)] += stats.length_counts
    stats.length_counts = length_counts
    # Put fully trained rows into the last bin.
    share = np.minimum(row_trained * SHARES // np.maximum(row_length, 1), SHARES - 1)
    stats.share_counts = stats.share_counts + np.bincount(share, minlength=SHARES)


def _add_sources(stats: SplitStats, rows: Rows, trained: Index) -> None:
    """Count segments by source; padding and empty segments are not counted."""
    first, has_spans = rows.first_span[:-1], np.diff(rows.first_span) > 0
    counted = np.zeros(len(rows.origins), dtype=np.bool_)
    counted[has_spans] = rows.spans["part"][first[has_spans]] != Part.PAD
    file = np.where(rows.origins["file"] == NO_FILE, len(rows.files), rows.origins["file"]).astype(np.int64)
    names = dict(enumerate([*(each.source for each in rows.files), UNKNOWN]))
    tokens = np.diff(rows.segment_start)
    _count(stats.sources, names, file[counted], tokens[counted], trained[counted], segments=True)
    stats.segments += int(counted.sum())


def _count(
    table: dict[str, TokenCount],
    names: dict[Any, str],
    codes: NDArray[Any],
    tokens: Index,
    trained: Index,
    *,
    segments: bool = False,
) -> None:
    """Add the numbers of tokens and trained tokens of each role, part, rule or source to `table`, which is keyed by
    name.
    """
    occurrences = np.bincount(codes)
    token_sums, trained_sums = (np.bincount(codes, weights=values) for values in (tokens, trained))
    for code in np.flatnonzero(occurrences).tolist():
        count = table.setdefault(names[code], TokenCount())
        count.tokens += int(token_sums[code])
        count.trained += int(trained_sums[code])
        count.segments += int(occurrences[code]) if segments else 0


def _add_longest(stats: SplitStats, rows: Rows, length: Index, trained: Index) -> None:
    longest = np.argsort(-length, kind="stable")[:LONGEST]
    if len(stats.longest) == LONGEST:
        longest = longest[length[longest] > stats.longest[-1].tokens]
    for row in longest.tolist():
        segment, last = rows.first_segment[row : row + 2].tolist()
        origin = origin_of(rows, segment) if segment < last else Origin(None, None, None)
        stats.longest.append(LongRow(stats.rows + row, int(length[row]), int(trained[row]), origin.file, origin.line))
    stats.longest.sort(key=lambda each: (-each.tokens, each.episode))
    del stats.longest[LONGEST:]


def _fill(episodes: Episodes, block_size: int) -> RowFill:
    """Compute how full rows of block_size + 1 tokens are, with and without the loader's packing."""
    capacity, tokens, rows, cut = block_size + 1, 0, 0, 0
    for start in range(0, len(episodes), WINDOW):
        length = episodes.lengths_of(np.arange(start, min(len(episodes), start + WINDOW)))
        cut += int(np.count_nonzero(length > capacity))
        kept = np.minimum(length[length > 0], capacity)
        tokens += int(kept.sum())
        rows += len(pack_lengths(kept, capacity))
    alone, packed = (tokens / (count * capacity) if count else 0.0 for count in (len(episodes), rows))
    return RowFill(block_size, alone, packed, rows, cut)
