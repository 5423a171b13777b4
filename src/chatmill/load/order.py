"""Orders: which episode is at which position of an epoch, as a pure function that anyone can recompute.

An order keeps no state: `at` computes any positions of any epoch. Its name carries a version and never changes its
meaning, so the name, the seed and the number of episodes define the order for good.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import isqrt

import numpy as np
from numpy.typing import ArrayLike, NDArray

from chatmill.errors import UsageError, one_line
from chatmill.rows import Index

EPOCH_LIMIT = 1 << 24
"""The most episodes of the order `epoch`, whose permutation is held in memory, 8 bytes each."""
EPISODE_LIMIT = 1 << 62
SEED_LIMIT = 1 << 32
ROUNDS = 8

Bits = NDArray[np.uint64]


class Order(ABC):
    """Maps the positions of an epoch to episodes, which are numbered from 0."""

    name: str
    """Name and version, as they are written in the audit log."""
    num_episodes: int
    length: int | None
    """Positions in an epoch; None for an order without end, all of which is epoch 0."""

    @abstractmethod
    def at(self, epoch: int, positions: ArrayLike) -> Index:
        """The episodes at these positions of an epoch."""

    @abstractmethod
    def find(self, epoch: int, episode: int) -> int:
        """The position of an episode in an epoch: the inverse of `at`."""

    def block(self, epoch: int, start: int, stop: int) -> Index:
        """The episodes at positions start to stop of an epoch."""
        return self.at(epoch, np.arange(start, stop, dtype=np.int64))


def make_order(mode: str, num_episodes: int, *, seed: int, shuffle: bool = True) -> Order:
    """Make the order of a sampling mode: `epoch`, `feistel` or `random`.

    Without `shuffle` the modes with epochs keep the stored order; `random` has no epochs to shuffle.

    >>> from chatmill.load import make_order
    >>> make_order("epoch", 10, seed=42).block(0, 0, 5).tolist()
    [8, 1, 5, 0, 7]
    """
    if type(num_episodes) is not int or not 0 < num_episodes <= EPISODE_LIMIT:
        raise UsageError(f"an order of {num_episodes} episodes; expected 1 to {EPISODE_LIMIT}")
    if type(seed) is not int or not 0 <= seed < SEED_LIMIT:
        raise UsageError(f"seed {one_line(str(seed))}; expected a whole number from 0 to {SEED_LIMIT - 1}")
    if mode == "random":
        return RandomOrder(num_episodes, seed)
    if mode not in MODES:
        raise UsageError(f'no order "{one_line(str(mode))}"; there are {", ".join(MODES)}')
    if not shuffle:
        return IdentityOrder(num_episodes)
    if mode == "feistel":
        return FeistelOrder(num_episodes, seed)
    if num_episodes > EPOCH_LIMIT:
        raise UsageError(
            f"{num_episodes:,} episodes are more than the order epoch keeps in memory ({EPOCH_LIMIT:,}); use feistel"
        )
    return EpochOrder(num_episodes, seed)


MODES = ("epoch", "feistel", "random")


def effective_seed(seed: int, epoch: int) -> int:
    """The seed that an epoch is shuffled with: seed + epoch."""
    if type(epoch) is not int or epoch < 0:
        raise UsageError(f"epoch {epoch}; expected a whole number from 0 on")
    if seed + epoch >= SEED_LIMIT:
        raise UsageError(f"seed {seed} and epoch {epoch} add up to {seed + epoch}; at most {SEED_LIMIT - 1} can be")
    return seed + epoch


class IdentityOrder(Order):
    """The stored order, in every epoch. Base of the orders whose epochs hold every episode once."""

    name = "identity/1"

    def __init__(self, num_episodes: int, seed: int = 0) -> None:
        self.num_episodes = self.length = num_episodes
        self._seed = seed

    def at(self, epoch: int, positions: ArrayLike) -> Index:
        return self._map(epoch, check_numbers("position", positions, self.num_episodes), inverse=False)

    def find(self, epoch: int, episode: int) -> int:
        return int(self._map(epoch, check_numbers("episode", episode, self.num_episodes), inverse=True)[0])

    def _map(self, epoch: int, numbers: Index, *, inverse: bool) -> Index:
        """The episodes at these positions, or, inverted, the position of one episode."""
        effective_seed(0, epoch)
        return numbers


class EpochOrder(IdentityOrder):
    """`RandomState(seed + epoch).permutation(num_episodes)`, as numpy draws it in every version."""

    name = "epoch/1"

    def __init__(self, num_episodes: int, seed: int) -> None:
        super().__init__(num_episodes, seed)
        self._last: tuple[int, Index] | None = None

    def _map(self, epoch: int, numbers: Index, *, inverse: bool) -> Index:
        seed = effective_seed(self._seed, epoch)
        # Replaced as one value: a prefetching thread may be in another epoch than the caller.
        last = self._last
        if last is None or last[0] != epoch:
            last = epoch, np.random.RandomState(seed).permutation(self.num_episodes).astype(np.int64, copy=False)
            self._last = last
        return np.flatnonzero(last[1] == numbers) if inverse else last[1][numbers]


class FeistelOrder(IdentityOrder):
    """A keyed bijection that is computed for the requested positions; its memory does not grow with the episodes.

    A number is written as a pair, n = left * width + right, on a nearly square grid that covers all episodes. Each of
    eight rounds adds a hash of one half to the other, modulo its size, and is inverted by subtracting. A result past
    the last episode goes through the rounds again until it is an episode.
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
    """Uniform with replacement: draw p is a hash of (seed, p), scaled to the episodes. All of it is epoch 0."""

    name = "random/1"
    length = None

    def __init__(self, num_episodes: int, seed: int) -> None:
        self.num_episodes = num_episodes
        self._key = _mixed(np.array([seed], dtype=np.uint64))

    def at(self, epoch: int, positions: ArrayLike) -> Index:
        if epoch != 0:
            raise UsageError(f"epoch {epoch} of the order random; it has no epochs, only positions from 0 on")
        return _scaled(
            _hashed(check_numbers("position", positions, None).astype(np.uint64), self._key), self.num_episodes
        )

    def find(self, epoch: int, episode: int) -> int:
        raise UsageError("the order random draws with replacement; an episode has no one position in it")


def check_numbers(what: str, numbers: ArrayLike, limit: int | None) -> Index:
    """One or several numbers as an array; `UsageError` for one outside 0 to limit - 1."""
    chosen = np.array(numbers, dtype=np.int64, ndmin=1)
    if chosen.size and (chosen.min() < 0 or (limit is not None and chosen.max() >= limit)):
        wrong = chosen.min() if chosen.min() < 0 else chosen.max()
        raise UsageError(f"{what} {wrong}; expected one from 0" + ("" if limit is None else f" to {limit - 1}"))
    return chosen


# Arithmetic modulo 2^64. numpy warns of overflow for single numbers, but not for arrays.


def _mixed(values: Bits) -> Bits:
    """The finaliser of SplitMix64: a bijection of 64 bits in which each bit depends on all."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(values ^ (values >> np.uint64(31)))


def _hashed(values: Bits, key: NDArray[np.uint64] | np.uint64) -> Bits:
    """Value n of the SplitMix64 stream that begins at `key`."""
    return _mixed(np.asarray((values + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + key))


def _round(half: Bits, other: Bits, key: np.uint64, size: np.uint64, inverse: bool) -> Bits:
    """Add a hash of one half to the other, or subtract it again."""
    step = _hashed(other, key) % size
    return np.asarray((half + (size - step if inverse else step)) % size)


def _scaled(values: Bits, count: int) -> Index:
    """floor(values / 2^64 * count), exactly: the upper half of a product of 64 by 64 bits."""
    low_mask, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    high, low = values >> half, values & low_mask
    count_high, count_low = np.uint64(count >> 32), np.uint64(count & 0xFFFFFFFF)
    middle = high * count_low + ((low * count_low) >> half)
    other = low * count_high + (middle & low_mask)
    return np.asarray(high * count_high + (middle >> half) + (other >> half)).astype(np.int64)
