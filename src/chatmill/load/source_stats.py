"""The average number of tokens, or of trained tokens, in a row of a source."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from chatmill.load.config import LoadConfig
from chatmill.load.source import SCAN, DataSource
from chatmill.store.layout import INDEX, MASK
from chatmill.store.primer_cache import PrimerCache


def row_size(source: DataSource, split: str, config: LoadConfig) -> Fraction:
    """What `mix_by` counts, averaged over the eligible episodes of a split as they are in batches.

    Totals come from the metadata. The index is scanned only if episodes are skipped or cut, or for the mask of first
    tokens: the first token of a row is never trained, because nothing predicts it.
    """
    episodes = source.episodes(split)
    by_mask = config.mix_by == "trained_tokens" and config.use_loss_mask
    longest = source.longest(split)
    short = len(source.short(split, config.episode_min_tokens))
    count = len(episodes) - short
    total = _trained(source, split) if by_mask else episodes.num_tokens
    if by_mask or short or longest is None or longest > config.block_size + 1:
        total -= sum(_lost(source, split, shard, config, by_mask=by_mask) for shard in range(len(episodes.shards)))
    if config.mix_by == "trained_tokens" and not by_mask:
        total -= count
    return Fraction(total, max(1, count))


def _trained(source: DataSource, split: str) -> int:
    """Tokens of a split that the mask marks."""
    dataset = source.dataset
    if isinstance(dataset, PrimerCache):
        return dataset.meta.splits[split].num_label_tokens
    if dataset.metadata is not None:
        return dataset.metadata.splits[split].num_trained_tokens
    episodes = dataset[split]
    return sum(int(np.count_nonzero(episodes.array(shard, MASK))) for shard in range(len(episodes.shards)))


def _lost(source: DataSource, split: str, shard: int, config: LoadConfig, *, by_mask: bool) -> int:
    """Tokens of a shard in no batch: all of a skipped episode, what is cut from the front of a long one.

    `by_mask`: trained tokens instead, and the first token of each row too.
    """
    episodes = source.episodes(split)
    index = episodes.array(shard, INDEX)
    lost = 0
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
    return lost
