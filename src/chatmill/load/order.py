"""Orders are pure functions that map each position of an epoch to an episode.

An order has no state: `at` computes the episode at any position of any epoch. The name of an order includes a version
number; the same name, seed and number of episodes always give the same order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import isqrt

import numpy as np
from numpy.typing import ArrayLike, NDArray

from chatmill.errors import UsageError, one_line
from chatmill.rows import Index

EPOCH_LIMIT = 1 << 24
"""Maximum number of episodes for the order `epoch`, which keeps a permutation in memory (8 bytes per episode)."""
EPISODE_LIMIT = 1 << 62
SEED_LIMIT = 1 << 32
ROUNDS = 8

Bits = NDArray[np.uint64]


class Order(ABC):
    """Maps the positions of an epoch to episodes, which are numbered from 0."""

    name: str
    """Name and version of the order, as written to the audit log."""
    num_episodes: int
    length: int | None
    """Number of positions in an epoch, or None for an infinite order, which has only epoch 0."""

    @abstractmethod
    def at(self, epoch: int, positions: ArrayLike) -> Index:
        """Return the episodes at the given positions of an epoch."""

    @abstractmethod
    def find(self, epoch: int, episode: int) -> int:
        """Return the position of an episode in an epoch; the inverse of `at`."""

    def block(self, epoch: int, start: int, stop: int) -> Index:
        """Return the episodes at positions `start` to `stop` of an epoch."""
        return self.at(epoch, np.arange(start, stop, dtype=np.int64))


def make_order(mode: str, num_episodes: int, *, seed: int, shuffle: bool = True) -> Order:
    """Create the order for a sampling mode: `epoch`, `feistel` or `random`.

    With `shuffle=False`, `epoch` and `feistel` keep the stored order; `random` ignores `shuffle`.

    >>> from chatmill.load import make_order
    >>> make_order("epoch", 10, seed=42).block(0, 0, 5).tolist()
    [8, 1, 5, 0, 7]
    """
    if type(num_episodes) is not int or not 0 < num_episodes <= EPISODE_LIMIT:
        raise UsageError(f"the number of episodes is {num_episodes}; expected 1 to {EPISODE_LIMIT}")
    if type(seed) is not int or not 0 <= seed < SEED_LIMIT:
        raise UsageError(f"seed is {one_line(str(seed))}; expected an integer from 0 to {SEED_LIMIT - 1}")
    if mode == "random":
        return RandomOrder(num_episodes, seed)
    if mode not in MODES:
        raise UsageError(f'unknown order "{one_line(str(mode))}"; expected one of {", ".join(MODES)}')
    if not shuffle:
        return IdentityOrder(num_episodes)
    if mode == "feistel":
        return FeistelOrder(num_episodes, seed)
    if num_episodes > EPOCH_LIMIT:
        raise UsageError(
            f"{num_episodes:,} episodes are too many for the order epoch (at most {EPOCH_LIMIT:,}); use feistel"
        )
    return EpochOrder(num_episodes, seed)


MODES = ("epoch", "feistel", "random")


def effective_seed(seed: int, epoch: int) -> int:
    """Return the seed for shuffling an epoch: seed + epoch."""
    if type(epoch) is not int or epoch < 0:
        raise UsageError(f"epoch is {epoch}; expected an integer of at least 0")
    if seed + epoch >= SEED_LIMIT:
        raise UsageError(f"seed {seed} plus epoch {epoch} is {seed + epoch}; expected at most {SEED_LIMIT - 1}")
    return seed + epoch


class IdentityOrder(Order):
    """Keeps the stored order in every epoch; the base class of all orders that contain every episode once per epoch."""

    name = "identity/1"

    def __init__(self, num_episodes: int, seed: int = 0) -> None:
        self.num_episodes = self.length = num_episodes
        self._seed = seed

    def at(self, epoch: int, positions: ArrayLike) -> Index:
        return self._map(epoch, check_numbers("position", positions, self.num_episodes), inverse=False)

    def find(self, epoch: int, episode: int) -> int:
        return int(self._map(epoch, check_numbers("episode", episode, self.num_episodes), inverse=True)[0])

    def _map(self, epoch: int, numbers: Index, *, inverse: bool) -> Index:
        """Return the episodes at the given positions or, with `inverse`, the position of one episode."""
        effective_seed(0, epoch)
        return numbers


class EpochOrder(IdentityOrder):
    """The order `RandomState(seed + epoch).permutation(num_episodes)`, which is the same in every numpy version."""

    name = "epoch/1"

    def __init__(self, num_episodes: int, seed: int) -> None:
        super().__init__(num_episodes, seed)
        self._last: tuple[int, Index] | None = None

    def _map(self, epoch: int, numbers: Index, *, inverse: bool) -> Index:
        seed = effective_seed(self._seed, epoch)
        # Assign the cached epoch and permutation as one tuple, because a prefetching thread may read another epoch.
        last = self._last
        if last is None or last[0] != epoch:
            last = epoch, np.random.RandomState(seed).permutation(self.num_episodes).astype(np.int64, copy=False)
            self._last = last
        return np.flatnonzero(last[1] == numbers) if inverse else last[1][numbers]


class FeistelOrder(IdentityOrder):
    """A keyed permutation that is computed only for the requested positions, in constant memory.

    An index n is split into two halves with nearly equal ranges, n = left * width + right. Each of eight rounds adds a
    hash of one half to the other half, modulo the range of the other half; subtracting the hash inverts a round. The
    rounds are repeated until the result is the index of an episode.
    """

    name = "feistel/1"

    def __init__(self, num_episodes: int, seed: int) -> None:
        super().__init__(num_episodes, seed)
        root = isqrt(num_episodes - 1) + 1
        self._height, self._width = np.uint64(root), np.uint64(-(-num_episodes // root))

    def _map(self, epoch: int, numbers: Index, *, inverse: bool) -> Index:
        seed = np.array([effective_seed(self._seed, epoch)], dtype=np.uint64)
        keys = _hashed(np.arange(ROUNDS, dtype=np.uint64), _mixed(seed))
        values = self._pass(numbers.astype(np.uint64), keys, inverse)
        while np.any(outside := values >= self.num_episodes):
            values[outside] = self._pass(values[outside], keys, inverse)
        return values.astype(np.int64)

    def _pass(self, values: Bits, keys: Bits, inverse: bool) -> Bits:
        left, right = np.divmod(values, self._width)
        for number in reversed(range(ROUNDS)) if inverse else range(ROUNDS):
            if number % 2 == 0:
                left = _round(left, right, keys[number], self._height, inverse)
            else:
                right = _round(right, left, keys[number], self._width, inverse)
        return np.asarray(left * self._width + right)


class RandomOrder(Order):
    """Uniform sampling with replacement: the draw at position p is a hash of (seed, p), scaled to the number of
    episodes.

    The sequence of samples is infinite and is not divided into epochs, so `epoch` must be 0.
    """

    name = "random/1"
    length = None

    def __init__(self, num_episodes: int, seed: int) -> None:
        self.num_episodes = num_episodes
        self._key = _mixed(np.array([seed], dtype=np.uint64))

    def at(self, epoch: int, positions: ArrayLike) -> Index:
        if epoch != 0:
            raise UsageError(f'epoch is {epoch}; expected 0, because the order "random" has no epochs')
        return _scaled(
            _hashed(check_numbers("position", positions, None).astype(np.uint64), self._key), self.num_episodes
        )

    def find(self, epoch: int, episode: int) -> int:
        raise UsageError('the order "random" samples with replacement, so an episode has no unique position')


def check_numbers(what: str, numbers: ArrayLike, limit: int | None) -> Index:
    """Return one or more indices as an array; raise `UsageError` if an index is below 0 or not below `limit`."""
    chosen = np.array(numbers, dtype=np.int64, ndmin=1)
    if chosen.size and (chosen.min() < 0 or (limit is not None and chosen.max() >= limit)):
        wrong = chosen.min() if chosen.min() < 0 else chosen.max()
        raise UsageError(f"{what} is {wrong}; expected " + ("at least 0" if limit is None else f"0 to {limit - 1}"))
    return chosen


# Arithmetic modulo 2^64. Use arrays for all values, because numpy warns about overflow of scalars.


def _mixed(values: Bits) -> Bits:
    """Apply the SplitMix64 finalizer, a bijection on 64-bit integers."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(values ^ (values >> np.uint64(31)))


def _hashed(values: Bits, key: NDArray[np.uint64] | np.uint64) -> Bits:
    """Return, for each n in `values`, the n-th number of the SplitMix64 stream that starts at `key`."""
    return _mixed(np.asarray((values + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + key))


def _round(half: Bits, other: Bits, key: np.uint64, size: np.uint64, inverse: bool) -> Bits:
    """Add a hash of `other` to `half`, modulo `size`; with `inverse`, subtract the hash instead."""
    step = _hashed(other, key) % size
    return np.asarray((half + (size - step if inverse else step)) % size)


def _scaled(values: Bits, count: int) -> Index:
    """Compute floor(values / 2^64 * count) exactly: the upper 64 bits of the 128-bit product."""
    low_mask, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    high, low = values >> half, values & low_mask
    count_high, count_low = np.uint64(count >> 32), np.uint64(count & 0xFFFFFFFF)
    middle = high * count_low + ((low * count_low) >> half)
    other = low * count_high + (middle & low_mask)
    return np.asarray(high * count_high + (middle >> half) + (other >> half)).astype(np.int64)
