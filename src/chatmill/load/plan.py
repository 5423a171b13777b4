"""The plan: which episodes stand in which rows of which batch, without a look at a single token.

    order    positions of an epoch -> episodes
    window   2^16 positions -> rows, one episode each, or packed best fit and permuted by (seed, epoch, window)
    step     batch_size rows: the global batch, the same at any number of ranks, workers and threads

A plan keeps no state. Where a run stands is a `Cursor`, and the step at a cursor says where the next one is.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import numpy as np

from chatmill.errors import DataError, UsageError
from chatmill.fit.packing import pack_lengths
from chatmill.load.batch import RowLayout
from chatmill.load.config import LoadConfig
from chatmill.load.mix import MixedOrder, row_weights, shares
from chatmill.load.order import IdentityOrder, Order, make_order
from chatmill.load.read import EpisodeReader
from chatmill.load.source import DataSource
from chatmill.load.source_stats import row_size
from chatmill.rows import Index, offsets

WINDOW = 1 << 16
"""Positions of an epoch that are laid out as rows together."""
DRAWN = 1 << 12
"""Positions that are drawn from the order together."""
REMEMBERED = 3
"""Parts of an epoch that a plan keeps besides the last."""
T = TypeVar("T")
NONE: Index = np.empty(0, dtype=np.int64)


class Cursor(NamedTuple):
    """Where the next batch begins: so many batches were before it, and its first row is this one of this window."""

    step: int = 0
    epoch: int = 0
    window: int = 0
    row: int = 0


class Window(NamedTuple):
    """Rows that were laid out together: row r holds episodes[first[r]:first[r + 1]]."""

    episodes: Index
    first: Index

    @property
    def num_rows(self) -> int:
        return len(self.first) - 1

    def rows(self, start: int, stop: int) -> Window:
        """Some of these rows; those past the last are left out."""
        first = self.first[start : stop + 1]
        if not len(first):
            return Window(NONE, np.zeros(1, dtype=np.int64))
        return Window(self.episodes[first[0] : first[-1]], first - first[0])


class PlannedStep(NamedTuple):
    """One global batch: row r holds episodes[first[r]:first[r + 1]], by global number."""

    at: Cursor
    after: Cursor
    episodes: Index
    first: Index
    begins_epoch: bool
    ends_epoch: bool
    dropped: Index
    """Episodes of the rows after it that would not have filled a batch, and are in none of this epoch."""

    @property
    def num_rows(self) -> int:
        """Rows that hold something; the last batch of an epoch may have fewer than `batch_size`."""
        return len(self.first) - 1

    def rows(self, start: int, stop: int) -> Window:
        """Some of its rows; those past the last are left out."""
        window = Window(self.episodes, self.first)
        return window if start == 0 and stop >= window.num_rows else window.rows(start, stop)


class LoadPlan:
    """The batches of one split, as a pure function of its sources, the config and a cursor."""

    def __init__(
        self, sources: Sequence[DataSource], config: LoadConfig, split: str, *, in_stored_order: bool = False
    ) -> None:
        """`in_stored_order`: every eligible episode once in the order of the files, and the last batch kept."""
        self.sources = tuple(sources)
        self.config = config
        self.split = split
        self.reader = EpisodeReader([source.episodes(split) for source in sources])
        self.capacity = config.block_size + 1
        self.drop_last = config.epoch_drop_last and not in_stored_order
        short = [source.short(split, config.episode_min_tokens) for source in sources]
        counts = [len(source.episodes(split)) for source in sources]
        self.num_episodes = sum(counts)
        firsts = np.cumsum([0, *counts])
        self.skipped: Index = np.concatenate([found + first for found, first in zip(short, firsts, strict=False)])
        """Episodes that are too short, by global number, rising."""
        self._before_skipped = self.skipped - np.arange(len(self.skipped))
        eligible = [count - len(found) for count, found in zip(counts, short, strict=True)]
        for source, count in zip(sources, eligible, strict=True):
            if not count:
                raise DataError(
                    f"{source.path}: no episode of {split} has {config.episode_min_tokens} tokens; "
                    "lower episode_min_tokens, or use another dataset"
                )
        if in_stored_order:
            self.order: Order = IdentityOrder(sum(eligible))
        else:
            self.order = _order(self.sources, config, split, eligible)
        self._kept: dict[tuple[str, int, int], Any] = {}

    @property
    def num_eligible(self) -> int:
        return self.num_episodes - len(self.skipped)

    @property
    def layout(self) -> RowLayout:
        """How its rows are filled."""
        pad = self.config.pad_token_id
        if pad is None:
            raise UsageError("pad_token_id is null; a plan takes the config that open_sources gives")
        return RowLayout(self.config.block_size, pad, self.config.use_loss_mask)

    @property
    def sha256(self) -> str:
        return datasets_hash(self.sources)

    def episodes(self, ordinals: Index) -> Index:
        """The global numbers of eligible episodes, which the order counts from 0."""
        if not len(self.skipped):
            return ordinals
        return ordinals + np.searchsorted(self._before_skipped, ordinals, side="right")

    def ordinal(self, episode: int) -> int:
        """The number of an episode among the eligible ones: the inverse of `episodes`."""
        if not 0 <= episode < self.num_episodes:
            raise UsageError(f"episode {episode}; {self.split} has 0 to {self.num_episodes - 1}")
        before = int(np.searchsorted(self.skipped, episode))
        if before < len(self.skipped) and self.skipped[before] == episode:
            least = f"{self.config.episode_min_tokens} tokens (episode_min_tokens)"
            raise UsageError(f"episode {episode} has fewer than {least} and comes in no epoch")
        return episode - before

    def first_episodes(self, epoch: int, count: int) -> Index:
        """The first episodes of an epoch, in the order that it draws them."""
        stop = count if self.order.length is None else min(count, self.order.length)
        return self.episodes(self.order.block(epoch, 0, stop))

    def num_windows(self) -> int | None:
        """Windows in an epoch; None if it never ends."""
        return None if self.order.length is None else -(-self.order.length // WINDOW)

    def _remembered(self, kind: str, epoch: int, number: int, make: Callable[[int, int], T]) -> T:
        """What `make` gives for a part of an epoch; the last few are kept."""
        found = self._kept.get((kind, epoch, number))
        if found is None:
            found = make(epoch, number)
            # Replaced as one value: a thread that reads ahead may be elsewhere than the one that asks.
            self._kept = {**dict(list(self._kept.items())[-REMEMBERED:]), (kind, epoch, number): found}
        return found

    def _draw(self, epoch: int, number: int) -> Index:
        """The episodes at so many positions of an epoch."""
        stop = (number + 1) * DRAWN
        if self.order.length is not None:
            stop = min(stop, self.order.length)
        return self.episodes(self.order.block(epoch, number * DRAWN, stop))

    def _drawn(self, epoch: int, start: int, stop: int) -> Index:
        """The episodes at positions of an epoch, start to stop, drawn as they are needed."""
        numbers = range(start // DRAWN, -(-stop // DRAWN))
        parts = [self._remembered("draw", epoch, number, self._draw) for number in numbers]
        drawn = parts[0] if len(parts) == 1 else np.concatenate([NONE, *parts])
        first = numbers.start * DRAWN
        return drawn[start - first : stop - first]

    def _pack(self, epoch: int, number: int) -> Window:
        """The rows of one window, packed."""
        start = number * WINDOW
        episodes = self._drawn(epoch, start, start + self._positions(number))
        lengths = np.minimum(self.reader.locate(episodes).length, self.capacity)
        bins = pack_lengths(lengths, self.capacity, seed=(self.config.epoch_seed, epoch, number))
        return Window(episodes[bins.order], bins.first)

    def _positions(self, number: int) -> int:
        """Positions of an epoch that lie in a window."""
        return WINDOW if self.order.length is None else max(0, min(WINDOW, self.order.length - number * WINDOW))

    def _count(self, epoch: int, window: int) -> int:
        """Rows of a window."""
        if self.config.packing == "none":
            return self._positions(window)
        return self._remembered("pack", epoch, window, self._pack).num_rows

    def window(self, epoch: int, number: int) -> Window:
        """All rows of one window of an epoch."""
        return self._rows(epoch, number, 0, self._count(epoch, number))

    def _rows(self, epoch: int, window: int, start: int, stop: int) -> Window:
        """Some rows of a window."""
        if self.config.packing == "none":
            first = window * WINDOW
            return Window(self._drawn(epoch, first + start, first + stop), _counted(stop - start))
        return self._remembered("pack", epoch, window, self._pack).rows(start, stop)

    def step(self, at: Cursor) -> PlannedStep:
        """The batch at a cursor."""
        size, last = self.config.batch_size, self.num_windows()
        begins = at.window == 0 and at.row == 0
        window, row = at.window, at.row
        parts: list[Window] = []
        missing = size
        while missing and (last is None or window < last):
            stop = min(row + missing, self._count(at.epoch, window))
            parts.append(self._rows(at.epoch, window, row, stop))
            missing -= stop - row
            window, row = (window, stop) if stop < self._count(at.epoch, window) else (window + 1, 0)
        if missing and self.drop_last:
            raise UsageError(
                f"{self.split}: an epoch has {size - missing} rows, and a batch {size}; "
                "lower batch_size, or set epoch_drop_last to false"
            )
        dropped = self._incomplete(at.epoch, window, row) if self.drop_last and last is not None else None
        ends = dropped is not None or (last is not None and window >= last)
        after = Cursor(at.step + 1, at.epoch + 1) if ends else Cursor(at.step + 1, at.epoch, window, row)
        return PlannedStep(at, after, *join(parts), begins, ends, NONE if dropped is None else dropped)

    def _incomplete(self, epoch: int, window: int, row: int) -> Index | None:
        """The episodes of the rows from here to the end of the epoch if they fill no batch, else None."""
        rest: list[Index] = []
        rows = 0
        for number in range(window, self.num_windows() or 0):
            start, stop = row if number == window else 0, self._count(epoch, number)
            rows += stop - start
            if rows >= self.config.batch_size:
                return None
            rest.append(self._rows(epoch, number, start, stop).episodes)
        return np.concatenate([NONE, *rest])

    def steps(self, at: Cursor) -> Iterator[PlannedStep]:
        """All batches from a cursor on, without end."""
        size = self.config.batch_size
        while True:
            # Deep inside a window, where another whole batch follows, there is nothing to decide.
            for row in range(at.row, self._count(at.epoch, at.window) - 2 * size + 1, size):
                after = Cursor(at.step + 1, at.epoch, at.window, row + size)
                begins = row == 0 and at.window == 0
                yield PlannedStep(at, after, *self._rows(at.epoch, at.window, row, row + size), begins, False, NONE)
                at = after
            step = self.step(at)
            yield step
            at = step.after

    def one_epoch(self, epoch: int = 0) -> Iterator[PlannedStep]:
        """The batches of one epoch."""
        for step in self.steps(Cursor(epoch=epoch)):
            yield step
            if step.ends_epoch:
                return

    def check(self, at: Cursor) -> None:
        """Raise `UsageError` unless a batch may begin there."""
        last = self.num_windows()
        if min(at) < 0 or (last is None and at.epoch) or (last is not None and at.window >= last):
            raise UsageError(f"{self.split}: no batch begins at epoch {at.epoch}, window {at.window}, row {at.row}")
        if at.row >= self._count(at.epoch, at.window):
            raise UsageError(f"{self.split}: window {at.window} of epoch {at.epoch} has no row {at.row}")


@lru_cache(maxsize=8)
def _counted(rows: int) -> Index:
    """Where rows of one episode each begin."""
    first = np.arange(rows + 1, dtype=np.int64)
    first.flags.writeable = False
    return first


def fill(rows: Window, count: int) -> Window:
    """The same with as many rows without an episode as are missing."""
    missing = count - rows.num_rows
    return rows if not missing else Window(rows.episodes, np.append(rows.first, np.repeat(rows.first[-1:], missing)))


def join(parts: list[Window]) -> Window:
    """The rows of several windows, one after the other."""
    if len(parts) == 1:
        return parts[0]
    before = offsets(np.array([len(part.episodes) for part in parts], dtype=np.int64))
    counts = [part.num_rows for part in parts]
    first = np.concatenate([np.zeros(1, dtype=np.int64), *(part.first[1:] for part in parts)])
    first[1:] += np.repeat(before[:-1], counts)
    return Window(np.concatenate([part.episodes for part in parts]), first)


def _order(sources: tuple[DataSource, ...], config: LoadConfig, split: str, eligible: list[int]) -> Order:
    def order(count: int) -> Order:
        return make_order(config.batch_sampling_mode, count, seed=config.epoch_seed, shuffle=config.epoch_shuffle)

    if config.mix_sft is None:
        return order(eligible[0])
    sizes = None
    if config.mix_by != "rows":
        sizes = {source.name: row_size(source, split, config) for source in sources}
    orders = {source.name: order(count) for source, count in zip(sources, eligible, strict=True)}
    return MixedOrder(orders, row_weights(shares(config.mix_sft), row_size=sizes))


def datasets_hash(sources: Sequence[DataSource]) -> str:
    """The hash that stands for all that a run reads."""
    if len(sources) == 1 and not sources[0].name:
        return sources[0].sha256
    return hashlib.sha256(json.dumps([[source.name, source.sha256] for source in sources]).encode()).hexdigest()
