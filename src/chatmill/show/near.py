"""Find near-duplicates of an episode with MinHash signatures, computed as in `chatmill prepare`.

The signatures of the first episodes of a split are computed on the first request and kept in memory.
"""

from __future__ import annotations

from threading import Lock
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.prepare.dedupe_columns import VALUES, minhash, shingles
from chatmill.rows import Rows
from chatmill.show.dataset import DatasetView
from chatmill.store.episodes import Episodes

MAX_EPISODES = 20_000
"""Maximum number of episodes that an episode is compared with."""
MAX_TOKENS = 1 << 24
"""Approximate maximum number of tokens in the compared episodes."""
CHUNK = 1 << 20
"""Number of tokens read at a time."""
MIN_SIMILARITY = 0.5
LISTED = 20
EMPTY = np.iinfo(np.uint32).max
"""The MinHash value of a row that has no message text."""


class NearDuplicate(NamedTuple):
    episode: int
    similarity: float


class NearDuplicates(NamedTuple):
    episodes: list[NearDuplicate]
    """Episodes with their similarity, most similar first."""
    compared: int
    """Number of episodes that were compared, counted from the start of the split."""


class NearDuplicateFinder:
    """Finds episodes that are similar to one episode of the same split."""

    def __init__(self, view: DatasetView) -> None:
        self._view = view
        self._signatures: dict[str, NDArray[np.uint32]] = {}
        self._lock = Lock()

    def find(self, split: str, number: int) -> NearDuplicates:
        """Return up to LISTED episodes with an estimated similarity of at least MIN_SIMILARITY.

        The similarity of two episodes is the Jaccard index of their sets of 5-token sequences; system messages are
        ignored.
        """
        own = signatures_of(self._view.row(split, number))[0]
        with self._lock:
            if split not in self._signatures:
                self._signatures[split] = _first_signatures(self._view.dataset[split])
        others = self._signatures[split]
        similarity = np.count_nonzero(others == own, axis=1) / VALUES
        similarity[(others == EMPTY).all(axis=1)] = 0
        if number < len(others):
            similarity[number] = 0
        # The sort is stable, so equally similar episodes stay in dataset order.
        best = np.argsort(-similarity, kind="stable")[:LISTED]
        best = best[similarity[best] >= MIN_SIMILARITY]
        return NearDuplicates([NearDuplicate(int(at), float(similarity[at])) for at in best], len(others))


def signatures_of(rows: Rows) -> NDArray[np.uint32]:
    return minhash(*shingles(rows, np.arange(len(rows)), len(rows)))


def _first_signatures(episodes: Episodes) -> NDArray[np.uint32]:
    signatures, count, tokens = [np.empty((0, VALUES), dtype=np.uint32)], 0, 0
    for rows in episodes.sweep(tokens=CHUNK):
        signatures.append(signatures_of(rows)[: MAX_EPISODES - count])
        count, tokens = count + len(rows), tokens + len(rows.ids)
        if count >= MAX_EPISODES or tokens >= MAX_TOKENS:
            break
    return np.concatenate(signatures)
