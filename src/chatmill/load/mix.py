"""Mixing: which source's turn it is at a position, and the order that several sources make together.

Weights become whole numbers whose sum is the period of a table; from it any position is answered, so that nothing
drifts and nothing is remembered. Each source runs through epochs of its own, wherever a batch ends.
"""

from __future__ import annotations

import heapq
import math
import sys
from collections.abc import Mapping
from fractions import Fraction
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from chatmill.errors import DataError, UsageError, one_line
from chatmill.load.order import Order
from chatmill.rows import Index, offsets

MIX_SFT: Mapping[str, float] = {"primer": 0.10, "oasst1": 0.70, "dolly15k": 0.20}
"""How much of each source a fine-tuning run takes if its config does not say."""
PERIOD = 1 << 16
"""Rows after which the table of turns begins anew, at most."""
MixBy = Literal["rows", "tokens", "trained_tokens"]
MIX_BY: tuple[MixBy, ...] = ("rows", "tokens", "trained_tokens")


def shares(weights: Mapping[str, object]) -> dict[str, Fraction]:
    """What part of the whole each source is to have, from its weight as it is written: 0.1 is a tenth.

    All faults of the weights are one error.
    """
    if not weights:
        raise DataError("mix_sft names no source; expected at least one with its weight")
    faults = [fault for name, weight in weights.items() if (fault := _weight_fault(name, weight))]
    if faults:
        raise DataError("; ".join(faults))
    exact = {name: Fraction(str(weight)) for name, weight in weights.items()}
    total = sum(exact.values())
    return {name: weight / total for name, weight in exact.items()}


def _weight_fault(name: str, weight: object) -> str | None:
    shown = f"mix_sft: the weight of {one_line(name)} is {one_line(str(weight))}"
    if type(weight) not in (int, float) or not abs(weight) <= sys.float_info.max:  # type: ignore[arg-type]
        return f"{shown}; expected a finite number over 0"
    if weight < 0:  # type: ignore[operator]
        return f"{shown}; a weight is over 0"
    return f"{shown}; leave out what is not to be mixed" if weight == 0 else None


def row_weights(requested: Mapping[str, Fraction], *, row_size: Mapping[str, Fraction] | None = None) -> dict[str, int]:
    """Whole numbers, with a sum of at most 2^16, in which sources get turns so that shares come out as requested.

    `row_size` says how much of what is shared a row of each source holds on average: its tokens, or those
    that are trained. Without it rows themselves are shared. Exact wherever the sum allows it, else each within one
    turn in 2^16.
    """
    rows = {name: share / _size(name, row_size) for name, share in requested.items()}
    total = sum(rows.values())
    parts = {name: Fraction(share, total) for name, share in rows.items()}
    period = math.lcm(*(part.denominator for part in parts.values()))
    if period <= PERIOD:
        return {name: int(part * period) for name, part in parts.items()}
    turns = {name: math.floor(part * PERIOD) for name, part in parts.items()}
    # The largest remainders get what rounding down left over.
    by_rest = sorted(parts, key=lambda name: turns[name] - parts[name] * PERIOD)
    for name in by_rest[: PERIOD - sum(turns.values())]:
        turns[name] += 1
    for name, count in turns.items():
        if count == 0:
            raise DataError(
                f"mix_sft: {one_line(name)} comes less than once in {PERIOD} rows; give it more weight, or leave it out"
            )
    divisor = math.gcd(*turns.values())
    return {name: count // divisor for name, count in turns.items()}


def _size(name: str, row_size: Mapping[str, Fraction] | None) -> Fraction:
    size = Fraction(1) if row_size is None else row_size[name]
    if size <= 0:
        raise DataError(f"mix_sft: {one_line(name)} holds nothing of what is mixed by; mix by rows, or leave it out")
    return size


class MixSchedule:
    """Turns for sources with whole weights: before every position each has had its share, to less than one row.

        weights 1 2, one period  ->  sources 1 0 1, ordinals 0 0 1

    Row j of a source with weight w of W in sum may come from one position on and must come by another, such that
    its count stays within 1 - 1/(2n-2) of its share, n being the number of sources. Tijdeman proved (The chairman
    assignment problem, 1980) that giving each position to the row which is due first never comes too late.
    """

    def __init__(self, weights: ArrayLike) -> None:
        self.weights: Index = np.asarray(weights, dtype=np.int64)
        if self.weights.ndim != 1 or not len(self.weights) or self.weights.min() <= 0:
            raise UsageError("a schedule needs a weight over 0 for each of at least one source")
        self.period = int(self.weights.sum())
        if self.period > PERIOD:
            raise UsageError(f"weights sum to {self.period}; at most {PERIOD} can be tabulated")
        self._source = _turns(self.weights)
        by_source = np.argsort(self._source, kind="stable")
        self._turns = np.split(by_source, np.cumsum(self.weights)[:-1])
        """The positions of each source within a period."""
        self._ordinal = np.empty(self.period, dtype=np.int64)
        self._ordinal[by_source] = np.concatenate([np.arange(count) for count in self.weights])

    def at(self, positions: ArrayLike) -> tuple[Index, Index]:
        """Whose turn these positions are, and how many turns that source had before."""
        periods, within = np.divmod(np.asarray(positions, dtype=np.int64), self.period)
        source = self._source[within]
        return source, periods * self.weights[source] + self._ordinal[within]

    def find(self, source: int, ordinal: int) -> int:
        """The position of a source's turn: the inverse of `at`."""
        periods, within = divmod(ordinal, int(self.weights[source]))
        return periods * self.period + int(self._turns[source][within])

    def counts(self, stop: int) -> Index:
        """How many turns each source has before this position."""
        periods, within = divmod(stop, self.period)
        rest = np.array([np.searchsorted(turns, within) for turns in self._turns], dtype=np.int64)
        return periods * self.weights + rest


def _turns(weights: Index) -> Index:
    """The source at each position of one period."""
    total, slack = int(weights.sum()), 2 * len(weights) - 2
    if slack == 0:
        return np.zeros(total, dtype=np.int64)
    source = np.repeat(np.arange(len(weights)), weights)
    row = np.concatenate([np.arange(count) for count in weights])
    # Positions count from 1 here; the numerators stay below 2^16 * 2^17 * 2^16 and so within 64 bits.
    scale = slack * weights[source]
    release = -((-(slack * row + 1) * total) // scale)
    due = (slack * (row + 1) - 1) * total // scale
    by_release = np.argsort(release, kind="stable")
    waiting: list[tuple[int, int]] = []
    turns = np.empty(total, dtype=np.int64)
    rows = iter(zip(release[by_release].tolist(), due[by_release].tolist(), source[by_release].tolist(), strict=True))
    coming = next(rows, None)
    for position in range(1, total + 1):
        while coming is not None and coming[0] <= position:
            heapq.heappush(waiting, (coming[1], coming[2]))
            coming = next(rows, None)
        turns[position - 1] = heapq.heappop(waiting)[1]
    return turns


class MixedOrder:
    """Several sources as one order without end: turns by the schedule, and in each source its own order.

    Episodes are numbered over all sources, one after the other. A source that has come to the end of its
    epoch begins its next. In a source drawn at random, draw p is that of the mixed position p.
    """

    length = None

    def __init__(self, orders: Mapping[str, Order], weights: Mapping[str, int]) -> None:
        for name in weights:
            if name not in orders:
                raise DataError(f"mix_sft: no source {one_line(name)}; there are {', '.join(orders) or 'none'}")
        self.sources = tuple(weights)
        self.schedule = MixSchedule(list(weights.values()))
        self._orders = [orders[name] for name in self.sources]
        self._first = offsets(np.array([order.num_episodes for order in self._orders], dtype=np.int64))

    @property
    def name(self) -> str:
        parts = (
            f"{name}={weight}*{order.name}"
            for name, weight, order in zip(self.sources, self.schedule.weights, self._orders, strict=True)
        )
        return f"mix/1({', '.join(parts)})"

    @property
    def num_episodes(self) -> int:
        return int(self._first[-1])

    def source_of(self, episodes: ArrayLike) -> Index:
        """Which source each of these episodes belongs to, as its place in `sources`."""
        return np.searchsorted(self._first, np.asarray(episodes, dtype=np.int64), side="right") - 1

    def at(self, epoch: int, positions: ArrayLike) -> Index:
        _only_epoch(epoch)
        chosen = np.array(positions, dtype=np.int64, ndmin=1)
        if chosen.size and chosen.min() < 0:
            raise UsageError(f"position {chosen.min()}; expected one from 0")
        source, ordinal = self.schedule.at(chosen)
        episodes = np.empty(len(chosen), dtype=np.int64)
        for number, order in enumerate(self._orders):
            mine = source == number
            episodes[mine] = self._first[number] + _running(order, ordinal[mine], chosen[mine])
        return episodes

    def block(self, epoch: int, start: int, stop: int) -> Index:
        return self.at(epoch, np.arange(start, stop, dtype=np.int64))

    def find(self, epoch: int, episode: int) -> int:
        """The position at which this episode comes in the given epoch of its own source."""
        if not 0 <= episode < self.num_episodes:
            raise UsageError(f"episode {episode}; expected one from 0 to {self.num_episodes - 1}")
        number = int(self.source_of([episode])[0])
        order = self._orders[number]
        within = order.find(epoch, episode - int(self._first[number]))
        return self.schedule.find(number, epoch * order.num_episodes + within)


def _only_epoch(epoch: int) -> None:
    if epoch != 0:
        raise UsageError(f"epoch {epoch} of a mixed order; only its sources have epochs, it has positions from 0 on")


def _running(order: Order, ordinals: Index, positions: Index) -> Index:
    """The episodes of one source at these turns of it, which may lie in several of its epochs."""
    if order.length is None:
        return order.at(0, positions)
    epochs, within = np.divmod(ordinals, order.length)
    by_epoch = np.argsort(epochs, kind="stable")
    begins = np.flatnonzero(np.diff(epochs[by_epoch], prepend=-1))
    episodes = np.empty(len(ordinals), dtype=np.int64)
    for there in np.split(by_epoch, begins[1:]) if len(ordinals) else ():
        episodes[there] = order.at(int(epochs[there[0]]), within[there])
    return episodes
