"""Mix several sources: select a source, and an episode of this source, for each position of the mix.

Weights are converted to integers. A periodic table, whose period is the sum of these integers, maps every position of
the mix to a source. Because the table is periodic, the fraction of rows from each source does not drift during a run,
and checkpoints need no sampling state. Each source starts its next epoch as soon as all of its episodes have been used,
even in the middle of a batch.
"""

from __future__ import annotations

import heapq
import math
import sys
from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike

from chatmill.errors import DataError, UsageError, one_line
from chatmill.load.order import Order, check_numbers
from chatmill.rows import Index, offsets

MIX_SFT: Mapping[str, float] = {"primer": 0.10, "oasst1": 0.70, "dolly15k": 0.20}
"""Default sources and weights of a fine-tuning run."""
PERIOD = 1 << 16
"""Maximum period of a `MixSchedule`, in rows."""
MOST_ROWS = 1 << 38
"""Maximum period of a `LongMixSchedule`, in rows."""
BLOCK = 1 << 14
"""Approximate number of rows in a block of a `LongMixSchedule`."""
MIX_BY = ("rows", "tokens", "trained_tokens")


def shares(weights: Mapping[str, object], key: str = "mix_sft") -> dict[str, Fraction]:
    """Normalize weights to exact fractions that sum to 1; the weight 0.1 is treated as exactly one tenth.

    Raise one `DataError` that lists all invalid weights; `key` is the config key in its message.

    >>> from chatmill.load import shares
    >>> shares({"a": 0.5, "b": 1.5})
    {'a': Fraction(1, 4), 'b': Fraction(3, 4)}
    """
    if not weights:
        number = "weight" if key == "mix_sft" else "epochs"
        raise DataError(f"{key} is empty; expected at least one source with its {number}")
    if faults := [fault for name, weight in weights.items() if (fault := _weight_fault(name, weight, key))]:
        raise DataError("; ".join(faults))
    exact = {name: Fraction(str(weight)) for name, weight in weights.items()}
    total = sum(exact.values())
    return {name: weight / total for name, weight in exact.items()}


def _weight_fault(name: str, weight: object, key: str) -> str | None:
    numbers = "the weight of {} is" if key == "mix_sft" else "the number of epochs of {} is"
    shown = f"{key}: {numbers.format(one_line(name))} {one_line(str(weight))}"
    if type(weight) not in (int, float) or not abs(weight) <= sys.float_info.max:  # type: ignore[arg-type]
        return f"{shown}; expected a finite number above 0"
    if weight < 0:  # type: ignore[operator]
        return f"{shown}; expected a number above 0"
    return f"{shown}; expected a number above 0; to leave out a source, remove it" if weight == 0 else None


def row_weights(requested: Mapping[str, Fraction], *, row_size: Mapping[str, Fraction] | None = None) -> dict[str, int]:
    """Return the number of rows from each source in one period of the mix, which has at most 2^16 rows.

    To mix by tokens or trained tokens, pass the average number of these tokens in a row of each source as `row_size`.
    If exact fractions would need a longer period, each fraction is rounded to a multiple of 1/2^16.

    >>> from chatmill.load import row_weights, shares
    >>> row_weights(shares({"a": 0.5, "b": 1.5}))
    {'a': 1, 'b': 3}
    """
    rows: dict[str, Fraction] = {}
    for name, share in requested.items():
        size = Fraction(1) if row_size is None else row_size[name]
        if size <= 0:
            raise DataError(
                f"mix_sft: {one_line(name)} has no tokens that mix_by counts; set mix_by to rows, or remove the source"
            )
        rows[name] = share / size
    total = sum(rows.values())
    parts = {name: Fraction(share, total) for name, share in rows.items()}
    period = math.lcm(*(part.denominator for part in parts.values()))
    if period <= PERIOD:
        return {name: int(part * period) for name, part in parts.items()}
    counts = {name: math.floor(part * PERIOD) for name, part in parts.items()}
    # Rounding down leaves some rows unassigned; assign them to the sources with the largest remainders.
    by_remainder = sorted(parts, key=lambda name: counts[name] - parts[name] * PERIOD)
    for name in by_remainder[: PERIOD - sum(counts.values())]:
        counts[name] += 1
    for name, count in counts.items():
        if count == 0:
            raise DataError(
                f"mix_sft: {one_line(name)} would get less than one of {PERIOD} rows; increase its weight or remove it"
            )
    divisor = math.gcd(*counts.values())
    return {name: count // divisor for name, count in counts.items()}


def epoch_rows(epochs: Mapping[str, float], num_rows: Mapping[str, int]) -> dict[str, int]:
    """Return the number of rows from each source in one epoch of the mix: the epochs of the source times its rows,
    rounded to an integer of at least 1.

    >>> from chatmill.load.mix import epoch_rows
    >>> epoch_rows({"a": 2, "b": 0.5}, {"a": 10, "b": 7})
    {'a': 20, 'b': 4}
    """
    rows = {
        name: max(1, math.floor(Fraction(str(count)) * num_rows[name] + Fraction(1, 2)))
        for name, count in epochs.items()
    }
    if sum(rows.values()) > MOST_ROWS:
        raise DataError(
            f"mix_epochs: an epoch of the mix would have {sum(rows.values())} rows; expected at most {MOST_ROWS}"
        )
    return rows


class MixSchedule:
    """Maps each position of a mix to a source, in proportion to integer weights. Before any position, the number of
    rows from each source differs by less than one row from the exact proportion.

        weights 1 2, one period  ->  sources 1 0 1, ordinals 0 0 1

    The positions are assigned by the earliest-deadline-first algorithm in Tijdeman, "The chairman assignment problem"
    (1980). With n > 1 sources, no source deviates from its exact proportion by more than 1 - 1/(2n-2) rows.

    >>> from chatmill.load import MixSchedule
    >>> MixSchedule([1, 2]).at([0, 1, 2])[0].tolist()
    [1, 0, 1]
    """

    def __init__(self, weights: ArrayLike) -> None:
        self.weights: Index = np.asarray(weights, dtype=np.int64)
        if self.weights.ndim != 1 or not len(self.weights) or self.weights.min() <= 0:
            raise UsageError("a schedule requires at least one source, each with a weight above 0")
        self.period = int(self.weights.sum())
        if self.period > PERIOD:
            raise UsageError(f"weights sum to {self.period}; expected at most {PERIOD}")
        self._source = _sources(self.weights)
        by_source = np.argsort(self._source, kind="stable")
        self._positions = np.split(by_source, np.cumsum(self.weights)[:-1])
        """For each source, its positions within a period."""
        self._ordinal = np.empty(self.period, dtype=np.int64)
        self._ordinal[by_source] = np.concatenate([np.arange(count) for count in self.weights])

    def at(self, positions: ArrayLike) -> tuple[Index, Index]:
        """Return the source index of each position, and the number of earlier positions with the same source."""
        periods, within = np.divmod(np.asarray(positions, dtype=np.int64), self.period)
        source = self._source[within]
        return source, periods * self.weights[source] + self._ordinal[within]

    def find(self, source: int, ordinal: int) -> int:
        """Return the position of row number `ordinal` of a source; this method is the inverse of `at`."""
        periods, within = divmod(ordinal, int(self.weights[source]))
        return periods * self.period + int(self._positions[source][within])

    def counts(self, stop: int) -> Index:
        """Return the number of rows from each source before position `stop`."""
        periods, within = divmod(stop, self.period)
        in_period = [np.searchsorted(positions, within) for positions in self._positions]
        return periods * self.weights + np.array(in_period, dtype=np.int64)


class LongMixSchedule:
    """Like `MixSchedule`, but for integer weights with a sum of up to `MOST_ROWS`.

    A period is divided into blocks of nearly equal size. The rows of each source are spread evenly over the blocks, and
    each block has its own `MixSchedule`. Before any position, the number of rows from each source differs by at most
    two rows from the exact proportion.

    >>> from chatmill.load.mix import LongMixSchedule
    >>> LongMixSchedule([100_003, 50_000]).counts(150_003).tolist()
    [100003, 50000]
    """

    def __init__(self, weights: ArrayLike) -> None:
        self.weights: Index = np.asarray(weights, dtype=np.int64)
        self.period = int(self.weights.sum())
        self._blocks = -(-self.period // BLOCK)
        # Only a few schedules are distinct, because the row counts of a source in two blocks differ by at most 1.
        self._schedule = lru_cache(maxsize=16)(lambda rows: MixSchedule([count for count in rows if count]))

    def at(self, positions: ArrayLike) -> tuple[Index, Index]:
        """Return the source index of each position, and the number of earlier positions with the same source."""
        periods, within = np.divmod(np.asarray(positions, dtype=np.int64), self.period)
        block = self._block(within)
        source, ordinal = np.empty_like(within), np.empty_like(within)
        for number in np.unique(block).tolist():
            here = block == number
            names, before, schedule = self._part(number)
            of_block, in_block = schedule.at(within[here] - before.sum())
            source[here] = names[of_block]
            ordinal[here] = before[source[here]] + in_block
        return source, periods * self.weights[source] + ordinal

    def find(self, source: int, ordinal: int) -> int:
        """Return the position of row number `ordinal` of a source; this method is the inverse of `at`."""
        periods, within = divmod(ordinal, int(self.weights[source]))
        number = ((within + 1) * self._blocks - 1) // int(self.weights[source])
        names, before, schedule = self._part(number)
        in_block = schedule.find(int(np.flatnonzero(names == source)[0]), within - int(before[source]))
        return periods * self.period + int(before.sum()) + in_block

    def counts(self, stop: int) -> Index:
        """Return the number of rows from each source before position `stop`."""
        periods, within = divmod(stop, self.period)
        names, before, schedule = self._part(int(self._block(np.array([within]))[0]))
        counts = before.copy()
        counts[names] += schedule.counts(within - int(before.sum()))
        return periods * self.weights + counts

    def _before(self, block: int) -> Index:
        return self.weights * block // self._blocks

    def _block(self, positions: Index) -> Index:
        """Return the index of the block that contains each position in a period."""
        block = positions * self._blocks // self.period
        # Row counts are rounded down per source, so a block may start a few rows earlier than in an exact division.
        following = (self.weights[:, None] * (block + 1) // self._blocks).sum(axis=0)
        return block + (positions >= following)

    def _part(self, block: int) -> tuple[Index, Index, MixSchedule]:
        """Return the sources in a block, the row count of each source before the block, and the block's schedule."""
        before = self._before(block)
        rows = self._before(block + 1) - before
        return np.flatnonzero(rows), before, self._schedule(tuple(rows.tolist()))


def _sources(weights: Index) -> Index:
    total, slack = int(weights.sum()), 2 * len(weights) - 2
    if slack == 0:
        return np.zeros(total, dtype=np.int64)
    source = np.repeat(np.arange(len(weights)), weights)
    row = np.concatenate([np.arange(count) for count in weights])
    # In these formulas, positions start at 1. The numerators are below 2^16 * 2^17 * 2^16, so they fit in 64 bits.
    scale = slack * weights[source]
    release = -((-(slack * row + 1) * total) // scale)
    due = (slack * (row + 1) - 1) * total // scale
    by_release = np.argsort(release, kind="stable")
    waiting: list[tuple[int, int]] = []
    chosen = np.empty(total, dtype=np.int64)
    rows = iter(zip(release[by_release].tolist(), due[by_release].tolist(), source[by_release].tolist(), strict=True))
    coming = next(rows, None)
    for position in range(1, total + 1):
        while coming is not None and coming[0] <= position:
            heapq.heappush(waiting, (coming[1], coming[2]))
            coming = next(rows, None)
        chosen[position - 1] = heapq.heappop(waiting)[1]
    return chosen


class MixedOrder(Order):
    """An infinite order that mixes several sources: for each position, a schedule selects a source, and the order of
    that source selects an episode.

    Episodes are numbered consecutively across all sources. When all episodes of a source have been used, the source
    starts its next epoch. For a source in `random` order, the episode depends on the position in the mix, not on the
    position in the source.
    """

    length = None

    def __init__(self, orders: Mapping[str, Order], weights: Mapping[str, int]) -> None:
        for name in weights:
            if name not in orders:
                raise DataError(
                    f"mix_sft: unknown source {one_line(name)}; expected one of {', '.join(orders) or 'none'}"
                )
        self.sources = tuple(weights)
        divisor = math.gcd(*weights.values())
        weights = {name: weight // divisor for name, weight in weights.items()}
        is_long = sum(weights.values()) > PERIOD
        self.schedule: MixSchedule | LongMixSchedule = (LongMixSchedule if is_long else MixSchedule)(
            list(weights.values())
        )
        self._orders = [orders[name] for name in self.sources]
        self._first = offsets(np.array([order.num_episodes for order in self._orders], dtype=np.int64))
        self.num_episodes = int(self._first[-1])
        parts = (f"{name}={weight}*{orders[name].name}" for name, weight in weights.items())
        self.name = f"{'mix-long/1' if is_long else 'mix/1'}({', '.join(parts)})"

    def source_of(self, episodes: ArrayLike) -> Index:
        """Return, for each episode, the index of its source in `sources`."""
        return np.searchsorted(self._first, np.asarray(episodes, dtype=np.int64), side="right") - 1

    @property
    def num_rows(self) -> dict[str, int]:
        """Maps each source to its number of episodes."""
        return dict(zip(self.sources, np.diff(self._first).tolist(), strict=True))

    @property
    def shares(self) -> dict[str, Fraction]:
        """Maps each source to its fraction of the rows in the mix."""
        weights = zip(self.sources, self.schedule.weights.tolist(), strict=True)
        return {name: Fraction(weight, self.schedule.period) for name, weight in weights}

    def passes(self, stop: int) -> dict[str, float]:
        """Return how many epochs of each source precede position `stop`, including fractions of an epoch."""
        counts = self.schedule.counts(stop) / np.diff(self._first)
        return dict(zip(self.sources, counts.tolist(), strict=True))

    def at(self, epoch: int, positions: ArrayLike) -> Index:
        if epoch != 0:
            raise UsageError(
                f"epoch is {epoch}; expected 0, because a mixed order is infinite and only its sources have epochs"
            )
        chosen = check_numbers("position", positions, None)
        source, ordinal = self.schedule.at(chosen)
        episodes = np.empty(len(chosen), dtype=np.int64)
        for number, order in enumerate(self._orders):
            mine = source == number
            episodes[mine] = self._first[number] + _at_ordinals(order, ordinal[mine], chosen[mine])
        return episodes

    def find(self, epoch: int, episode: int) -> int:
        """Return the position in the mix at which an episode occurs during epoch `epoch` of its source."""
        check_numbers("episode", episode, self.num_episodes)
        number = int(self.source_of([episode])[0])
        order = self._orders[number]
        within = order.find(epoch, episode - int(self._first[number]))
        return self.schedule.find(number, epoch * order.num_episodes + within)


def _at_ordinals(order: Order, ordinals: Index, positions: Index) -> Index:
    """Return the episodes of a source for the given row numbers, which can span several epochs of the source."""
    if order.length is None:
        return order.at(0, positions)
    epochs, within = np.divmod(ordinals, order.length)
    by_epoch = np.argsort(epochs, kind="stable")
    begins = np.flatnonzero(np.diff(epochs[by_epoch], prepend=-1))
    episodes = np.empty(len(ordinals), dtype=np.int64)
    for there in np.split(by_epoch, begins[1:]) if len(ordinals) else ():
        episodes[there] = order.at(int(epochs[there[0]]), within[there])
    return episodes
