"""A plan determines the episodes in each row of each batch of a split, without reading tokens.

    order    positions of an epoch -> episodes
    window   2^16 positions -> rows: one episode each, or packed best fit and permuted by (seed, epoch, window)
    step     batch_size rows: the global batch, the same for any number of ranks, workers and threads

To compute a batch, a plan needs only the `Cursor` of the batch; the plan also returns the cursor of the next batch.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from chatmill.errors import DataError, UsageError
from chatmill.fit import pack_lengths
from chatmill.load.config import LoadConfig
from chatmill.load.mix import MixedOrder, epoch_rows, row_weights, shares
from chatmill.load.order import IdentityOrder, Order, make_order
from chatmill.load.read import EpisodeReader
from chatmill.load.row_size import row_size
from chatmill.load.source import DataSource
from chatmill.rows import Index, offsets

WINDOW = 1 << 16
"""Number of episodes in a window, which is packed into rows as one unit."""
BLOCK = 1 << 12
"""Number of episode indices to compute at a time."""
NO_EPISODES: Index = np.empty(0, dtype=np.int64)


class Cursor(NamedTuple):
    """The position of a batch: its step, and the epoch, window and row at which it starts."""

    step: int = 0
    epoch: int = 0
    window: int = 0
    row: int = 0


class Window(NamedTuple):
    """A range of consecutive rows; row r contains the episodes `episodes[first[r]:first[r + 1]]`."""

    episodes: Index
    first: Index

    @property
    def num_rows(self) -> int:
        return len(self.first) - 1

    def rows(self, start: int, stop: int) -> Window:
        """Return rows [start, stop), or fewer rows if `stop` is past the last row."""
        if start == 0 and stop >= self.num_rows:
            return self
        first = self.first[start : stop + 1]
        if not len(first):
            return Window(NO_EPISODES, np.zeros(1, dtype=np.int64))
        return Window(self.episodes[first[0] : first[-1]], first - first[0])


class PlannedStep(NamedTuple):
    """One global batch; row r contains the episodes `episodes[first[r]:first[r + 1]]`.

    Episodes are numbered across all sources.
    """

    at: Cursor
    after: Cursor
    episodes: Index
    first: Index
    begins_epoch: bool
    ends_epoch: bool
    dropped: Index
    """Episodes at the end of the epoch that are dropped because they do not fill a batch."""

    @property
    def num_rows(self) -> int:
        """Number of rows, which can be less than `batch_size` in the last batch of an epoch."""
        return len(self.first) - 1

    def rows(self, start: int, stop: int) -> Window:
        """Return rows [start, stop) of the batch, or fewer rows if `stop` is past the last row."""
        return Window(self.episodes, self.first).rows(start, stop)


class LoadPlan:
    """Plans the batches of one split; equal sources, configs and cursors always give equal batches."""

    def __init__(
        self, sources: Sequence[DataSource], config: LoadConfig, split: str, *, in_stored_order: bool = False
    ) -> None:
        """If `in_stored_order` is set, read episodes in the stored order, and keep an incomplete last batch."""
        self.sources = tuple(sources)
        self.config = config
        self.split = split
        self.reader = EpisodeReader([source.episodes(split) for source in sources])
        self.capacity = config.block_size + 1
        self.drop_last = config.epoch_drop_last and not in_stored_order
        too_short = [source.short(split, config.episode_min_tokens) for source in sources]
        counts = [len(source.episodes(split)) for source in sources]
        self.first_of_source = offsets(np.array(counts, dtype=np.int64))
        """The first episode of each source, followed by the total number of episodes."""
        self.num_episodes = sum(counts)
        shorts = zip(too_short, self.first_of_source, strict=False)
        self.skipped: Index = np.concatenate([short + first for short, first in shorts])
        """Indices of episodes with fewer than `episode_min_tokens` tokens, in ascending order."""
        self._before_skipped = self.skipped - np.arange(len(self.skipped))
        eligible = [count - len(short) for count, short in zip(counts, too_short, strict=True)]
        for source, count in zip(sources, eligible, strict=True):
            if not count:
                raise DataError(
                    f"{source.path}: no episode of {split} has at least {config.episode_min_tokens} tokens; "
                    "lower episode_min_tokens, or use another dataset"
                )
        self.order = IdentityOrder(sum(eligible)) if in_stored_order else _order(sources, config, split, eligible)
        # Cache several entries, because a prefetching thread and the caller may read different parts of the order.
        self._block = lru_cache(maxsize=4)(self._look_up)
        self._packed = lru_cache(maxsize=4)(self._pack)
        self._packed_rows = lru_cache(maxsize=WINDOW)(lambda epoch, window: self._packed(epoch, window).num_rows)

    @property
    def num_eligible(self) -> int:
        return self.num_episodes - len(self.skipped)

    @cached_property
    def pass_episodes(self) -> int:
        """Number of episodes in one pass over the data.

        These are all episodes with at least `episode_min_tokens` tokens or, with `mix_epochs`, the episodes in one
        epoch of the mix.
        """
        if self.config.mix_epochs is None or not isinstance(self.order, MixedOrder):
            return self.num_eligible
        return sum(epoch_rows(self.config.mix_epochs, self.order.num_rows).values())

    @property
    def pad_token_id(self) -> int:
        """The id of the token that pads rows."""
        if self.config.pad_token_id is None:
            raise UsageError("pad_token_id is null; pass the config that open_sources returns")
        return self.config.pad_token_id

    # Functions that return episodes in the order of an epoch.

    def episodes(self, ordinals: Index) -> Index:
        """Convert indices that skip episodes shorter than `episode_min_tokens` to indices over all episodes."""
        if not len(self.skipped):
            return ordinals
        return ordinals + np.searchsorted(self._before_skipped, ordinals, side="right")

    def ordinal(self, episode: int) -> int:
        """Convert an index over all episodes to an index that skips episodes shorter than `episode_min_tokens`."""
        if not 0 <= episode < self.num_episodes:
            raise UsageError(f"no episode {episode} in {self.split}; expected 0 to {self.num_episodes - 1}")
        before = int(np.searchsorted(self.skipped, episode))
        if before < len(self.skipped) and self.skipped[before] == episode:
            least = self.config.episode_min_tokens
            raise UsageError(
                f"episode {episode} is not in any epoch, because it has fewer than {least} tokens (episode_min_tokens)"
            )
        return episode - before

    def first_episodes(self, epoch: int, count: int) -> Index:
        """Return the first `count` episodes of an epoch."""
        return self.episodes(self.order.block(epoch, 0, self._limited(count)))

    def episodes_from(self, at: Cursor) -> Iterator[Index]:
        """Yield arrays of episode indices, starting at a cursor and continuing through all later epochs, without end.

        With packing, the first array starts at the beginning of the cursor's window.
        """
        epoch, position = at.epoch, at.window * WINDOW + (at.row if self.config.packing == "none" else 0)
        while True:
            stop = self._limited(position + BLOCK)
            yield self.episodes(self.order.block(epoch, position, stop))
            epoch, position = (epoch, stop) if stop != self.order.length else (epoch + 1, 0)

    def _limited(self, position: int) -> int:
        return position if self.order.length is None else min(position, self.order.length)

    def _look_up(self, epoch: int, number: int) -> Index:
        return self.episodes(self.order.block(epoch, number * BLOCK, self._limited((number + 1) * BLOCK)))

    def _at_positions(self, epoch: int, start: int, stop: int) -> Index:
        numbers = range(start // BLOCK, -(-stop // BLOCK))
        parts = [self._block(epoch, number) for number in numbers]
        episodes = parts[0] if len(parts) == 1 else np.concatenate([NO_EPISODES, *parts])
        first = numbers.start * BLOCK
        return episodes[start - first : stop - first]

    # Functions that arrange the episodes of a window in rows.

    def num_windows(self) -> int | None:
        """Return the number of windows in an epoch, or None for random sampling and mixes, which never end."""
        return None if self.order.length is None else -(-self.order.length // WINDOW)

    def _pack(self, epoch: int, window: int) -> Window:
        start = window * WINDOW
        episodes = self._at_positions(epoch, start, self._limited(start + WINDOW))
        lengths = np.minimum(self.reader.locate(episodes).length, self.capacity)
        bins = pack_lengths(lengths, self.capacity, seed=(self.config.epoch_seed, epoch, window))
        return Window(episodes[bins.order], bins.first)

    def _num_rows(self, epoch: int, window: int) -> int:
        if self.config.packing == "none":
            return max(0, self._limited((window + 1) * WINDOW) - window * WINDOW)
        return self._packed_rows(epoch, window)

    def _rows(self, epoch: int, window: int, start: int, stop: int) -> Window:
        if self.config.packing == "none":
            first = window * WINDOW
            return Window(self._at_positions(epoch, first + start, first + stop), _one_each(stop - start))
        return self._packed(epoch, window).rows(start, stop)

    # Epochs.

    def count_rows(self, epoch: int) -> int:
        """Return the number of rows in an epoch, or 0 for random sampling and mixes, which never end."""
        return sum(self._num_rows(epoch, window) for window in range(self.num_windows() or 0))

    def num_steps(self, epoch: int) -> int:
        """Return the number of batches in an epoch; raise `UsageError` if its only batch is incomplete and dropped."""
        steps, remainder = divmod(self.count_rows(epoch), self.config.batch_size)
        if not self.drop_last:
            return steps + (remainder > 0)
        if not steps:
            self.step(Cursor(epoch=epoch))  # Raises an error if the epoch has no batch.
        return steps

    def last_episodes(self, epoch: int, rows: int) -> int:
        """Return the number of episodes in the last `rows` rows of an epoch."""
        episodes = 0
        for window in reversed(range(self.num_windows() or 0)):
            count = self._num_rows(epoch, window)
            start = max(0, count - rows)
            episodes += len(self._rows(epoch, window, start, count).episodes)
            rows -= count - start
        return episodes

    def rows_of_episodes(self, episodes: int) -> int:
        """Return the number of rows that contain the first `episodes` episodes of a mix."""
        if self.config.packing == "none":
            return episodes
        rows = 0
        for window in itertools.count():
            first = self._packed(0, window).first
            if episodes <= first[-1]:
                return rows + int(np.searchsorted(first, episodes))
            rows, episodes = rows + len(first) - 1, episodes - int(first[-1])
        raise AssertionError

    def passes(self, at: Cursor) -> float | None:
        """Return the number of passes over the data up to a cursor, such as 1.5, or None for random sampling.

        One pass over a mix has as many episodes as all sources together; with `mix_epochs`, it is one epoch of the mix.
        """
        if self.config.batch_sampling_mode == "random":
            return None
        start = at.window * WINDOW
        size = self._limited(start + WINDOW) - start
        within = size * at.row / self._num_rows(at.epoch, at.window) if at.row else 0
        return at.epoch + (start + within) / self.pass_episodes

    # Steps.

    def step(self, at: Cursor) -> PlannedStep:
        """Return the batch that starts at a cursor."""
        size, last = self.config.batch_size, self.num_windows()
        begins = at.window == 0 and at.row == 0
        window, row = at.window, at.row
        parts: list[Window] = []
        missing = size
        while missing and (last is None or window < last):
            num_rows = self._num_rows(at.epoch, window)
            stop = min(row + missing, num_rows)
            parts.append(self._rows(at.epoch, window, row, stop))
            missing -= stop - row
            window, row = (window, stop) if stop < num_rows else (window + 1, 0)
        if missing and self.drop_last:
            raise UsageError(
                f"{self.split}: an epoch has {size - missing} rows, but batch_size is {size}; "
                "lower batch_size, or set epoch_drop_last to false"
            )
        dropped = self._incomplete(at.epoch, window, row) if self.drop_last and last is not None else None
        ends = dropped is not None or (last is not None and window >= last)
        after = Cursor(at.step + 1, at.epoch + 1) if ends else Cursor(at.step + 1, at.epoch, window, row)
        return PlannedStep(at, after, *join(parts), begins, ends, NO_EPISODES if dropped is None else dropped)

    def _incomplete(self, epoch: int, window: int, row: int) -> Index | None:
        """Return the episodes from a row to the end of the epoch, or None if they fill at least one batch."""
        remaining: list[Index] = []
        rows = 0
        for number in range(window, self.num_windows() or 0):
            start, stop = row if number == window else 0, self._num_rows(epoch, number)
            rows += stop - start
            if rows >= self.config.batch_size:
                return None
            remaining.append(self._rows(epoch, number, start, stop).episodes)
        return np.concatenate([NO_EPISODES, *remaining])

    def cursor_at(self, step: int) -> Cursor:
        """Return the cursor of the batch with index `step`."""
        epoch, before = self._epoch_of(step)
        window, row = 0, (step - before) * self.config.batch_size
        while row >= (num_rows := self._num_rows(epoch, window)):
            window, row = window + 1, row - num_rows
        return Cursor(step, epoch, window, row)

    def _epoch_of(self, step: int) -> tuple[int, int]:
        """Return the epoch that contains a step, and the number of steps before that epoch."""
        if self.order.length is None:
            return 0, 0
        if self.config.packing == "none":
            in_epoch = self.num_steps(0)
            return step // in_epoch, step - step % in_epoch
        epoch = before = 0
        while before + (in_epoch := self.num_steps(epoch)) <= step:
            epoch, before = epoch + 1, before + in_epoch
        return epoch, before

    def steps(self, at: Cursor) -> Iterator[PlannedStep]:
        """Yield batches indefinitely, starting at a cursor."""
        size = self.config.batch_size
        while True:
            # Fast path: the batch and the next batch are complete and in the same window.
            for row in range(at.row, self._num_rows(at.epoch, at.window) - 2 * size + 1, size):
                after = Cursor(at.step + 1, at.epoch, at.window, row + size)
                rows = self._rows(at.epoch, at.window, row, row + size)
                yield PlannedStep(at, after, *rows, row == 0 and at.window == 0, False, NO_EPISODES)
                at = after
            step = self.step(at)
            yield step
            at = step.after

    def one_epoch(self, epoch: int = 0) -> Iterator[PlannedStep]:
        for step in self.steps(Cursor(epoch=epoch)):
            yield step
            if step.ends_epoch:
                return

    def check(self, at: Cursor) -> None:
        """Raise `UsageError` if no batch can start at this cursor."""
        last = self.num_windows()
        if min(at) < 0 or (last is None and at.epoch) or (last is not None and at.window >= last):
            raise UsageError(f"{self.split}: no batch starts at epoch {at.epoch}, window {at.window}, row {at.row}")
        if at.row >= self._num_rows(at.epoch, at.window):
            raise UsageError(f"{self.split}: window {at.window} of epoch {at.epoch} has no row {at.row}")


@lru_cache(maxsize=8)
def _one_each(rows: int) -> Index:
    """Return the offsets `Window.first` for rows that each contain one episode."""
    first = np.arange(rows + 1, dtype=np.int64)
    first.flags.writeable = False
    return first


def pad_rows(rows: Window, count: int) -> Window:
    """Append empty rows to a window until it has `count` rows."""
    missing = count - rows.num_rows
    return rows if not missing else Window(rows.episodes, np.append(rows.first, np.repeat(rows.first[-1:], missing)))


def join(parts: list[Window]) -> Window:
    if len(parts) == 1:
        return parts[0]
    before = offsets(np.array([len(part.episodes) for part in parts], dtype=np.int64))
    first = np.concatenate([np.zeros(1, dtype=np.int64), *(part.first[1:] for part in parts)])
    first[1:] += np.repeat(before[:-1], [part.num_rows for part in parts])
    return Window(np.concatenate([part.episodes for part in parts]), first)


def _order(sources: Sequence[DataSource], config: LoadConfig, split: str, eligible: list[int]) -> Order:
    orders = [
        make_order(config.batch_sampling_mode, count, seed=config.epoch_seed, shuffle=config.epoch_shuffle)
        for count in eligible
    ]
    if config.mix is None:
        return orders[0]
    by_name = {source.name: order for source, order in zip(sources, orders, strict=True)}
    if config.mix_epochs is not None:
        num_rows = {name: order.num_episodes for name, order in by_name.items()}
        return MixedOrder(by_name, epoch_rows(config.mix_epochs, num_rows))
    sizes = None if config.mix_by == "rows" else {source.name: row_size(source, split, config) for source in sources}
    return MixedOrder(by_name, row_weights(shares(config.mix), row_size=sizes))


def datasets_hash(sources: Sequence[DataSource]) -> str:
    if len(sources) == 1 and not sources[0].name:
        return sources[0].sha256
    return hashlib.sha256(json.dumps([[source.name, source.sha256] for source in sources]).encode()).hexdigest()
