"""Stop training runs that have no trained tokens, and explain the cause."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from chatmill.errors import DataError, one_line
from chatmill.load.loader import EpisodeLoader
from chatmill.load.plan import Cursor
from chatmill.load.row_size import marked_tokens
from chatmill.load.source import DataSource
from chatmill.store.layout import MASK
from chatmill.store.mapped import check_mapped, reading
from chatmill.store.primer_cache import PrimerCache
from chatmill.train.step import StepCounts

if TYPE_CHECKING:
    from chatmill.train.setup import TrainState

LIMIT = 20
"""A run stops after this many consecutive steps without trained tokens."""
EXAMINED = 64
"""Maximum number of episodes that are examined to find out why a step has no trained tokens."""
SCAN = 1 << 24
"""Number of bytes of a mask to read at a time."""
UNFINISHED = "answer_unfinished"


def check_trained(loader: EpisodeLoader) -> list[str]:
    """Return notes about the sources in a mix that have no trained tokens; raise `DataError` if no source has trained
    tokens.
    """
    if not loader.config.use_loss_mask:
        return []
    split = loader.split
    empty = [source for source in loader.sources if not has_trained(source, split)]
    if len(empty) == len(loader.sources):
        reason = "no source of the mix has a trained answer; chatmill stats shows the details for each source"
        if len(empty) == 1:
            reason = _empty_reason(empty[0], split)
        raise DataError(f"{loader.dataset_dir}: the split {split} has no trained tokens: {reason}")
    names = ", ".join(one_line(source.name) for source in empty)
    return (
        [
            f"{loader.config.mix_key}: sources without trained tokens in {split}: {names}; remove these sources from "
            f"the mix"
        ]
        if empty
        else []
    )


def has_trained(source: DataSource, split: str) -> bool:
    """Return whether the loss mask of a split marks any token."""
    if not source.is_foreign:
        return marked_tokens(source, split) > 0
    episodes = source.episodes(split)
    with reading():
        for shard in range(len(episodes.shards)):
            mask = episodes.array(shard, MASK)
            # Stop reading once a marked token is found.
            if any(mask[at : at + SCAN].any() for at in range(0, len(mask), SCAN)):
                return True
            check_mapped(mask)
    return False


def _empty_reason(source: DataSource, split: str) -> str:
    why = f"the loss mask does not mark any of the {source.episodes(split).num_tokens:,} tokens"
    metadata = source.dataset.meta if isinstance(source.dataset, PrimerCache) else source.dataset.metadata
    if metadata is None:
        return f"{why}; write the mask again, or set use_loss_mask to false to train on all tokens"
    entries = {} if metadata.ledger is None else metadata.ledger.entries
    unfinished = entries.get(("noted", UNFINISHED))
    if unfinished is not None:
        return f"{why}, because blocks end before the answers end ({UNFINISHED}); prepare the data with larger blocks"
    return f"{why} (see chatmill stats {source.path}); prepare the data again from conversations with answers"


@dataclass
class UntrainedSteps:
    """Counts consecutive steps without trained tokens."""

    count: int = 0
    cursor: Cursor = Cursor()  # noqa: RUF009
    """Cursor of the last step without trained tokens."""

    def check(self, counts: StepCounts, step: int, cursor: Cursor, loader: EpisodeLoader) -> None:
        """Raise `DataError` after `LIMIT` consecutive steps without trained tokens. Post-training runs have no such
        limit.
        """
        self.count = 0 if counts.trained else self.count + 1
        self.cursor = self.cursor if counts.trained else cursor
        if self.count == LIMIT and not loader.config.reads_blocks:
            raise DataError(
                f"steps {step - LIMIT + 1:,} to {step:,} have no trained tokens: {untrained_reason(loader, cursor)}"
            )

    def check_at_end(self, state: TrainState, *, last: bool) -> None:
        """Raise `DataError` at the end of a run in which no step had trained tokens."""
        if last and self.count and not state.totals.trained:
            reason = untrained_reason(state.loader, self.cursor)
            raise DataError(f"no step of the run had trained tokens ({state.step:,} steps): {reason}")


def untrained_reason(loader: EpisodeLoader, cursor: Cursor) -> str:
    """Explain why the step at a cursor has no trained tokens, and suggest a fix."""
    plan = loader.plan(loader.split)
    config, capacity = plan.config, plan.capacity
    episodes = plan.step(cursor).episodes[:EXAMINED]
    which = np.searchsorted(plan.first_of_source, episodes, side="right") - 1
    marked = long = 0
    for source, number in zip(which.tolist(), (episodes - plan.first_of_source[which]).tolist(), strict=True):
        row = plan.sources[source].episodes(plan.split).rows([number])
        is_marked = bool((row.spans["weight"] > 0).any())
        marked += is_marked
        long += is_marked and len(row.ids) > capacity
    if not config.use_loss_mask:
        return "these rows contain only padding or single tokens, which cannot be predicted; raise episode_min_tokens"
    if long:
        return (
            f"{long:,} of {len(episodes):,} conversations are longer than block_size {config.block_size} and lose "
            "their answers, because only their last tokens are kept; "
            f"raise block_size, or prepare the data with --max-tokens {capacity}"
        )
    if marked:
        return (
            "the loss mask marks only the first tokens of conversations, which cannot be predicted; "
            "write the mask again"
        )
    if config.mix is not None:
        names = ", ".join(one_line(plan.sources[number].name) for number in sorted(set(which.tolist())))
        return f"the loss mask does not mark any token in these rows from {names}; remove these rows from the mix"
    return (
        f"the loss mask does not mark any token in these rows; see chatmill stats {loader.dataset_dir}, and remove "
        "these rows"
    )
