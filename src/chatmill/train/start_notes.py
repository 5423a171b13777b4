"""Notes about the data and the config that a run prints before the first step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from chatmill.load.loader import EpisodeLoader
from chatmill.load.row_size import episode_tokens, marked_tokens
from chatmill.load.source import DataSource
from chatmill.store.primer_cache import PrimerCache


class NonAnswers(NamedTuple):
    """Token counts of a run that also trains on tokens outside answers, because `use_loss_mask` is false."""

    non_answers: int
    """Number of trained tokens that the loss mask does not mark."""
    trained: int
    """Number of tokens that the run trains on: all tokens except the first token of each conversation."""

    def __str__(self) -> str:
        share = f"{self.non_answers / self.trained:.0%}"
        return (
            f"use_loss_mask is false, so the run also trains on {self.non_answers:,} tokens in the train split that "
            f"are not part of answers ({share} of all trained tokens); add --use_loss_mask to train only on answers"
        )

    def to_metrics(self) -> Mapping[str, Any]:
        return {"non_answer_tokens": self.non_answers, "train_tokens": self.trained}


def count_non_answers(loader: EpisodeLoader) -> NonAnswers | None:
    """Count the tokens outside answers that the run trains on in each epoch. Return None if the run trains only on
    answers, or if no source has a loss mask.

    The counts are read from the metadata or, for datasets without metadata, computed from the loss masks.
    """
    sources = [source for source in loader.sources if source.has_mask]
    if loader.config.use_loss_mask or not sources:
        return None
    trained = sum(episode_tokens(source, loader.split) - _conversations(source, loader.split) for source in sources)
    non_answers = trained - sum(marked_tokens(source, loader.split) for source in sources)
    return NonAnswers(non_answers, trained) if non_answers > 0 else None


def _conversations(source: DataSource, split: str) -> int:
    """Return the number of conversations in a split. An episode contains several conversations if it is a packed
    row.
    """
    metadata = source.dataset.metadata
    if metadata is None:
        return len(source.episodes(split))
    return sum(shard.num_segments for shard in metadata.splits[split].shards)


def cache_lengths(loader: EpisodeLoader) -> Iterator[str]:
    """Yield a note if the maximum row length `T_max` of a cache differs from `block_size`. The note says how many rows
    are truncated.
    """
    block_size = loader.config.block_size
    caches = [source.dataset for source in loader.sources if isinstance(source.dataset, PrimerCache)]
    others = [cache for cache in caches if cache.meta.T_max != block_size]
    if not others:
        return
    lengths = np.concatenate([cache[loader.split].lengths for cache in others]).astype(np.int64)
    # A row of block_size + 1 tokens fits, because its last token is only a target.
    cut = np.maximum(lengths - (block_size + 1), 0)
    effect = "no row is truncated"
    if rows := int(np.count_nonzero(cut)):
        effect = (
            f"{rows:,} of {len(lengths):,} rows lose {int(cut.sum()):,} tokens at the start; set block_size to "
            f"{max(cache.meta.T_max for cache in others)}, or build the cache with --t-max {block_size}"
        )
    built = ", ".join(f"{cache.path} has T_max {cache.meta.T_max}" for cache in others)
    yield f"block_size is {block_size}, but {built}: {effect}"
