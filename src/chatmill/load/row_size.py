"""Compute the average number of tokens per row of a source, which is needed to mix sources by tokens."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from chatmill.load.config import LoadConfig
from chatmill.load.source import SCAN, DataSource
from chatmill.rows import Index
from chatmill.store.episodes import Episodes
from chatmill.store.foreign import coverage
from chatmill.store.layout import INDEX, MASK
from chatmill.store.mapped import check_mapped, reading
from chatmill.store.primer_cache import PrimerCache


def row_size(source: DataSource, split: str, config: LoadConfig) -> Fraction:
    """Return the average number of tokens, or of trained tokens (see `mix_by`), that an episode contributes to a batch.

    The token counts are read from the metadata. The episode index is scanned if episodes are skipped or truncated. The
    index is also scanned if trained tokens are counted by the loss mask, because the first token of each row has no
    loss.
    """
    episodes = source.episodes(split)
    by_mask = config.mix_by == "trained_tokens" and config.use_loss_mask
    longest = source.longest(split)
    short = len(source.short(split, config.episode_min_tokens))
    count = len(episodes) - short
    if source.is_foreign:
        total = sum(_kept(source, split, shard, config, by_mask=by_mask) for shard in range(len(episodes.shards)))
        return Fraction(total - (count if config.mix_by == "trained_tokens" and not by_mask else 0), max(1, count))
    total = marked_tokens(source, split) if by_mask else episodes.num_tokens
    if by_mask or short or longest is None or longest > config.block_size + 1:
        total -= sum(_lost(source, split, shard, config, by_mask=by_mask) for shard in range(len(episodes.shards)))
    if config.mix_by == "trained_tokens" and not by_mask:
        total -= count
    return Fraction(total, max(1, count))


def episode_tokens(source: DataSource, split: str) -> int:
    """Count the tokens in all episodes of a split; episodes written by other programs may overlap or leave gaps."""
    episodes = source.episodes(split)
    return int(episodes.lengths.sum()) if source.is_foreign else episodes.num_tokens


def marked_tokens(source: DataSource, split: str) -> int:
    """Count the tokens that the loss mask selects in the episodes of a split."""
    dataset = source.dataset
    if isinstance(dataset, PrimerCache):
        return dataset.meta.splits[split].num_label_tokens
    if dataset.metadata is not None:
        return dataset.metadata.splits[split].num_trained_tokens
    episodes, marked = source.episodes(split), 0
    for shard in range(len(episodes.shards)):
        start, length = _ranges(episodes, shard)
        marked += _marked(episodes, shard, start, start + length)
    return marked


def _kept(source: DataSource, split: str, shard: int, config: LoadConfig, *, by_mask: bool) -> int:
    """Count the tokens of a shard that appear in batches, for a dataset that another program wrote.

    With `by_mask`, count only trained tokens, without the first token of each row.
    """
    episodes = source.episodes(split)
    start, length = _ranges(episodes, shard)
    kept = np.where(length < config.episode_min_tokens, 0, np.minimum(length, config.block_size + 1))
    if not by_mask:
        return int(kept.sum())
    stop, rows = start + length, kept > 0
    return _marked(episodes, shard, (stop - kept + 1)[rows], stop[rows])


def _ranges(episodes: Episodes, shard: int) -> tuple[Index, Index]:
    with reading():
        index = episodes.array(shard, INDEX)
        start, length = (index[name].astype(np.int64) for name in ("start", "length"))
        check_mapped(index)
    return start, length


def _marked(episodes: Episodes, shard: int, start: Index, stop: Index) -> int:
    """Count the tokens that the loss mask selects in the given ranges; a token in several ranges is counted once per
    range.
    """
    with reading():
        mask = episodes.array(shard, MASK)
        marked = sum(int(count[mask[here] > 0].sum()) for here, count in coverage(start, stop, len(mask)))
        check_mapped(mask)
    return marked


def _lost(source: DataSource, split: str, shard: int, config: LoadConfig, *, by_mask: bool) -> int:
    """Count the tokens of a shard that are not in batches: skipped episodes and truncated starts of episodes.

    With `by_mask`, count only tokens that the loss mask selects, including the first token of each row, which has no
    loss.
    """
    episodes = source.episodes(split)
    lost = 0
    with reading():
        index = episodes.array(shard, INDEX)
        for at in range(0, len(index), SCAN):
            start, length = (index[name][at : at + SCAN].astype(np.int64) for name in ("start", "length"))
            kept = np.where(length < config.episode_min_tokens, 0, np.minimum(length, config.block_size + 1))
            cut = length - kept
            if not by_mask:
                lost += int(cut.sum())
                continue
            mask = episodes.array(shard, MASK)
            lost += int(np.count_nonzero(mask[(start + cut)[kept > 0]]))
            for number in np.flatnonzero(cut):
                lost += int(np.count_nonzero(mask[start[number] : start[number] + cut[number]]))
        episodes.check([shard])
    return lost
