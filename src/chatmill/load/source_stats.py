"""How much of what is mixed a row of a source holds on average: its tokens, or those of them that are trained."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from chatmill.load.config import LoadConfig
from chatmill.load.source import DataSource
from chatmill.rows import Index
from chatmill.store.layout import INDEX, MASK
from chatmill.store.primer_cache import PrimerCache

SCAN = 1 << 20


def row_size(source: DataSource, split: str, config: LoadConfig) -> Fraction:
    """Tokens that `mix_by` counts, in the mean over the eligible episodes of a split as they are delivered.

    Read off the metadata; only rows that are skipped or cut are looked at, in case there are any. The first token of
    a row is never trained, for nothing stands before it that could predict it.
    """
    episodes = source.episodes(split)
    by_mask = config.mix_by == "trained_tokens" and config.use_loss_mask
    longest = source.longest(split)
    short = len(source.short(split, config.episode_min_tokens))
    count = len(episodes) - short
    total = _trained(source, split) if by_mask else episodes.num_tokens
    if short or longest is None or longest > config.block_size + 1:
        total -= sum(_lost(source, split, shard, config, by_mask=by_mask) for shard in range(len(episodes.shards)))
    if by_mask:
        total -= sum(_first_trained(source, split, shard, config) for shard in range(len(episodes.shards)))
    elif config.mix_by == "trained_tokens":
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


def _first_trained(source: DataSource, split: str, shard: int, config: LoadConfig) -> int:
    """Rows of a shard whose mask marks the first token that a batch will hold of them."""
    episodes = source.episodes(split)
    index, mask = episodes.array(shard, INDEX), episodes.array(shard, MASK)
    found = 0
    for at in range(0, len(index), SCAN):
        length = index["length"][at : at + SCAN].astype(np.int64)
        cut = np.maximum(length - (config.block_size + 1), 0)
        held = length >= max(1, config.episode_min_tokens)
        found += int(np.count_nonzero(mask[(index["start"][at : at + SCAN].astype(np.int64) + cut)[held]]))
    return found


def _lost(source: DataSource, split: str, shard: int, config: LoadConfig, *, by_mask: bool) -> int:
    """Tokens of a shard that no batch will hold: of short episodes all, of long ones what is cut from the front."""
    episodes = source.episodes(split)
    index = episodes.array(shard, INDEX)
    lost = 0
    for at in range(0, len(index), SCAN):
        length = index["length"][at : at + SCAN].astype(np.int64)
        kept = np.where(length < config.episode_min_tokens, 0, np.minimum(length, config.block_size + 1))
        cut: Index = length - kept
        if not by_mask:
            lost += int(cut.sum())
            continue
        mask = episodes.array(shard, MASK)
        for number in np.flatnonzero(cut).tolist():
            start = int(index["start"][at + number])
            lost += int(np.count_nonzero(mask[start : start + int(cut[number])]))
    return lost
