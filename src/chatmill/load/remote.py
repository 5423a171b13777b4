"""Prefetch datasets at URLs: download the objects that the next batches need, in order of first use.

In a shuffled epoch, the first few batches already need nearly all shards. The index files of all shards are downloaded
first, because packing reads them; the other files of each shard follow.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from chatmill.load.plan import Cursor, LoadPlan
from chatmill.remote.cache_settings import SIZE, cache_size
from chatmill.remote.prefetch import Prefetch, RemoteObject
from chatmill.store.layout import INDEX, MASK, ORIGINS, SPANS, TARGETS, TOKENS
from chatmill.store.remote_files import RemoteFiles

FILES = (TOKENS, ORIGINS, SPANS, TARGETS)
"""The files that batches need in addition to the index; the mask is read only if a shard has no spans."""
MOST_POSITIONS = 1 << 22
"""Maximum number of upcoming episodes whose shards are prefetched in order of use; other shards are downloaded last."""


def is_remote(plan: LoadPlan) -> bool:
    """Return whether any source of a plan is at a URL."""
    return any(isinstance(part.stored, RemoteFiles) for part, _ in plan.reader.shards)


def start_prefetch(plan: LoadPlan, at: Cursor, steps: int | None) -> tuple[Prefetch, str | None] | None:
    """Start downloading the data that the next `steps` batches need or, if `steps` is None, the data of a whole epoch.

    Return the running download, and a warning if the data does not fit in the cache. Return None if all data is local.
    """
    if not is_remote(plan):
        return None
    objects = needed_objects(plan, at, steps)
    needed, size = sum(each.size for each in objects), cache_size()
    # If the data does not fit, reserve part of the cache for files that are in use.
    prefetch = Prefetch(objects, size if needed <= size else size // 2)
    return prefetch, None if needed <= size else _warning(plan, needed)


def needed_objects(plan: LoadPlan, at: Cursor, steps: int | None) -> list[RemoteObject]:
    """Return the objects that the next `steps` batches need, in order of download."""
    shards = shards_in_order(plan, at, steps)
    files = (each for names in ((INDEX,), FILES) for shard in shards for each in _objects(plan, shard, names))
    # Files with equal content are stored as one object.
    return list({each.sha256: each for each in files}.values())


def shards_in_order(plan: LoadPlan, at: Cursor, steps: int | None) -> list[int]:
    """Return the shards that the next `steps` batches need, in order of first use."""
    shards: dict[int, None] = {}
    count, looked_up = _num_positions(plan, steps), 0
    for episodes in plan.episodes_from(at):
        part = episodes[: count - looked_up]
        numbers, first = np.unique(plan.reader.shard_of(part), return_index=True)
        shards.update(dict.fromkeys(numbers[np.argsort(first)].tolist()))
        looked_up += len(part)
        if looked_up >= min(count, MOST_POSITIONS) or len(shards) == len(plan.reader.shards):
            break
    if looked_up < count:
        after = max(shards, default=-1) + 1
        total = len(plan.reader.shards)
        shards.update(dict.fromkeys((after + number) % total for number in range(total)))
    return list(shards)


def _num_positions(plan: LoadPlan, steps: int | None) -> int:
    """Estimate the number of episodes in `steps` batches or, if `steps` is None, in an epoch or a pass over a mix."""
    if steps is None:
        return plan.pass_episodes
    rows = steps * plan.config.batch_size
    if plan.config.packing == "none":
        return rows
    tokens = sum(source.episodes(plan.split).num_tokens for source in plan.sources)
    return int(rows * plan.capacity * plan.num_episodes / max(1, tokens))


def _objects(plan: LoadPlan, shard: int, names: tuple[str, ...]) -> Iterator[RemoteObject]:
    part, number = plan.reader.shards[shard]
    if not isinstance(part.stored, RemoteFiles):
        return
    records = part.shards[number].records
    for name in names if SPANS in records or names == (INDEX,) else (TOKENS, MASK):
        if name in records:
            url, info = part.stored.object_of(part.shards[number].folder / name)
            yield RemoteObject(url, info.size, info.sha256)


def _warning(plan: LoadPlan, needed: int) -> str:
    where = ", ".join(dict.fromkeys(str(source.path) for source in plan.sources))
    unit, name = (10**9, "GB") if needed >= 10**9 else (10**6, "MB") if needed >= 10**6 else (1, "")
    return (
        f"the cache size is {cache_size():,} bytes, but the next batches need {needed:,} bytes of {where}, "
        f"so files will be downloaded repeatedly; set {SIZE} or cache_size to {-(-needed // unit)}{name} or more"
    )
