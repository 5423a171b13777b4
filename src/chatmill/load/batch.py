"""Batches: the only place where x and y are shifted against each other.

`weight[i]` belongs to predicting token i, so y[i] is token i+1 and it is trained if token i+1 is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from operator import add
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.load.read import EpisodeReader
from chatmill.rows import Index, offsets

IGNORE_INDEX = -100
"""The target that no loss is computed for."""


class Batch(NamedTuple):
    """Rows to train on: arrays of numpy, or tensors, all of (rows, block_size) but for the last.

    A row holds one segment for each conversation and one for its padding, which nothing is predicted in.
    """

    x: Any
    """int64: the tokens."""
    y: Any
    """int64: what is to be predicted after each token of x; -100 where nothing is."""
    loss_mask: Any
    """bool: where something is."""
    weights: Any
    """float32: how much it counts; 0 where nothing is predicted."""
    positions: Any
    """int32: 0, 1, 2 … from the first token of each segment."""
    segments: Any
    """int32: 0, 1, 2 … for the segments of a row, its padding included."""
    episode_ids: Any
    """int64 (rows, most segments of a row): the episode that each segment is of, by global number; -1 for none."""

    def each(self, change: Callable[[Any], Any]) -> Batch:
        """The same batch with every array changed."""
        return Batch(*(change(array) for array in self))

    def split(self, parts: int) -> list[Batch]:
        """So many batches of equally many rows: the parts that gradients are accumulated over."""
        size, rest = divmod(len(self.x), parts)
        if rest:
            raise ValueError(f"{len(self.x)} rows in {parts} parts; expected a divisor")
        return [self.each(lambda array, at=at: array[at * size : (at + 1) * size]) for at in range(parts)]  # type: ignore[misc]


class BatchCounts(NamedTuple):
    """What became of the tokens of some rows."""

    rows: int = 0
    """Rows that hold something."""
    tokens: int = 0
    """Tokens in them, padding left out."""
    trained: int = 0
    """Positions of y that are predicted."""
    cut_episodes: int = 0
    """Episodes that were longer than a row, of which the last tokens stay."""
    cut_tokens: int = 0

    def plus(self, other: BatchCounts) -> BatchCounts:
        return BatchCounts(*map(add, self, other))


def shift(
    ids: NDArray[Any],
    trained: NDArray[np.bool_],
    *,
    segments: NDArray[Any] | None = None,
    ignore_index: int = IGNORE_INDEX,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """x, y and the loss mask of y, each (rows, length - 1), from ids, mask and segments of (rows, length).

        ids       a b c d e        x  a b c d
        trained   0 0 1 1 1        y  - c - e      - is `ignore_index`
        segments  0 0 0 1 1

    The first token of a segment is never predicted from the segment before it, whatever its weight.
    """
    loss_mask = trained[:, 1:]
    if segments is not None:
        loss_mask = loss_mask & (segments[:, 1:] == segments[:, :-1])
    return *_pair(ids, loss_mask, ignore_index), loss_mask


def _pair(
    ids: NDArray[Any], loss_mask: NDArray[np.bool_], ignore_index: int = IGNORE_INDEX
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """x and y: the tokens before and after each step, y only where the loss mask says so."""
    x = ids[:, :-1].astype(np.int64)
    y = np.full(loss_mask.shape, ignore_index, dtype=np.int64)
    np.copyto(y, ids[:, 1:], where=loss_mask)
    return x, y


class RowLayout(NamedTuple):
    """How to fill rows: which tokens come before padding, and which of them count."""

    block_size: int
    pad_token_id: int
    use_loss_mask: bool


class RowTable:
    """All that is known of some rows before a token is copied: row r is episodes[first[r]:first[r + 1]], and padding.

    A row has `block_size` tokens and one more to be predicted; of an episode that is longer the last tokens stay.
    Looking up many rows at once costs little more than one; copying few of them at a time keeps them in the cache.
    """

    def __init__(self, reader: EpisodeReader, episodes: Index, first: Index, layout: RowLayout) -> None:
        capacity, num_rows = layout.block_size + 1, len(first) - 1
        self._block_size = layout.block_size
        places = reader.locate(episodes)
        kept = np.minimum(places.length, capacity)
        cut = places.length - kept
        filled = _sums(kept, first)
        room = capacity - filled

        tokens = _Runs(first)
        self._token_edges = tokens.edges
        self._tokens = reader.tokens(
            tokens.put(places.shard, -1),
            tokens.put(places.start + cut, 0),
            tokens.put(places.start + places.length, room),
            pad=layout.pad_token_id,
            longest=capacity,
        )

        spans = reader.spans(places, cut)
        weight = spans.weight if layout.use_loss_mask else (~spans.is_padding).astype(np.float32)
        of_rows = _Runs(spans.first[first])
        self._y_edges = of_rows.edges
        self._y_length = of_rows.put(spans.length, room)
        # The first token of a row is never predicted.
        self._y_length[of_rows.begin] -= 1
        self._weight = of_rows.put(weight, 0)
        self._target = None if spans.target is None else of_rows.put(spans.target, -1)

        self._first_segment = np.searchsorted(spans.first_of_segment, spans.first[first])
        counts = np.diff(self._first_segment)
        sizes = _sums(spans.length, spans.first_of_segment)
        begin = offsets(sizes)
        self._row = np.repeat(np.arange(num_rows), counts)
        self._number = np.arange(len(sizes)) - self._first_segment[self._row]
        self._inside = begin[:-1] - begin[self._first_segment][self._row]
        owner = np.searchsorted(spans.first, spans.first_of_segment[:-1], side="right") - 1
        self._episode = episodes[owner]
        segments = _Runs(self._first_segment)
        self._x_edges = segments.edges
        self._x_length = segments.put(sizes, room)
        # The last token of a row is not in x.
        self._x_length[segments.end - (room == 0)] -= 1
        self._x_number = segments.put(self._number, counts).astype(np.int32)
        self._x_start = segments.put(self._inside, filled).astype(np.int32)
        self._segments = counts
        trained = _sums(np.where(self._weight > 0, self._y_length, 0), self._y_edges)
        # A later segment that begins with a trained token: what is not predicted there was counted.
        border = (self._number > 0) & (weight[spans.first_of_segment[:-1]] > 0)
        trained -= np.bincount(self._row[border], minlength=num_rows)
        self._counts = np.stack([filled > 0, filled, trained, _sums(cut > 0, first), _sums(cut, first)])

    def counts(self, size: int) -> list[BatchCounts]:
        """What becomes of the tokens of each so many rows."""
        by_batch = self._counts.reshape(len(self._counts), -1, size).sum(axis=2)
        return [BatchCounts(*columns) for columns in by_batch.T.tolist()]

    def make(self, start: int, stop: int) -> BatchArrays:
        """The arrays of some of the rows."""
        shape = stop - start, self._block_size
        ids = self._tokens.read(self._token_edges[start], self._token_edges[stop]).reshape(shape[0], shape[1] + 1)
        runs = slice(self._y_edges[start], self._y_edges[stop])
        weights = np.repeat(self._weight[runs], self._y_length[runs]).reshape(shape)
        of = slice(self._first_segment[start], self._first_segment[stop])
        row, number, inside = self._row[of] - start, self._number[of], self._inside[of]
        # No loss crosses a border: neither is the first token of any later segment predicted.
        if len(later := np.flatnonzero(number)):
            weights[row[later], inside[later] - 1] = 0
        loss_mask = weights > 0
        x, y = _pair(ids, loss_mask)
        if self._target is not None:
            target = np.repeat(self._target[runs], self._y_length[runs]).reshape(shape)
            np.copyto(y, target, where=loss_mask & (target >= 0))

        runs = slice(self._x_edges[start], self._x_edges[stop])
        length = self._x_length[runs]
        segments = np.repeat(self._x_number[runs], length).reshape(shape)
        positions = np.repeat(self._x_start[runs], length).reshape(shape)
        np.subtract(np.arange(shape[1], dtype=np.int32), positions, out=positions)
        count = self._segments[start:stop]
        episode_ids = np.full((shape[0], max(1, int(count.max(initial=0)))), -1, dtype=np.int64)
        episode_ids[row, number] = self._episode[of]
        return BatchArrays(Batch(x, y, loss_mask, weights, positions, segments, episode_ids), count)


class BatchArrays(NamedTuple):
    """The arrays of one or several batches."""

    batch: Batch
    segments: Index
    """Segments of each row, without padding."""

    def split(self, size: int) -> list[Batch]:
        """Batches of so many rows each: the same, whatever other rows were made with them."""
        shape = len(self.segments) // size, size, -1
        *arrays, episode_ids = (array.reshape(shape) for array in self.batch)
        if episode_ids.shape[2] > 1:
            most = np.maximum(self.segments.reshape(shape[:2]).max(axis=1), 1).tolist()
            episode_ids = [ids[:, :width] for ids, width in zip(episode_ids, most, strict=True)]
        return [Batch(*columns) for columns in zip(*arrays, episode_ids, strict=True)]


class _Runs:
    """Places for runs of several rows one after the other, each followed by one of padding.

    first 0 2 3  ->  a a - b -        edges 0 3 5
    """

    def __init__(self, first: Index) -> None:
        self.edges = offsets(np.diff(first) + 1)
        self.begin, self.end = self.edges[:-1], self.edges[1:] - 1
        """The first run of each row, and its padding."""
        self._real = np.ones(self.edges[-1], dtype=np.bool_)
        self._real[self.end] = False

    def put(self, values: NDArray[Any], padding: NDArray[Any] | int) -> NDArray[Any]:
        out = np.empty(len(self._real), dtype=values.dtype)
        out[self._real], out[self.end] = values, padding
        return out


def _sums(values: NDArray[Any], first: Index) -> Index:
    """The sum of each range of values."""
    return np.diff(offsets(values)[first])


def from_the_end(episode_ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Which segment of its episode each one is, counted back: an episode that is cut loses its first ones.

    7 7 7 4 9 9 -1  ->  -3 -2 -1 -1 -2 -1 -1
    """
    turned = episode_ids[:, ::-1]
    places = np.arange(turned.shape[1])
    begins = np.ones(turned.shape, dtype=np.bool_)
    np.not_equal(turned[:, 1:], turned[:, :-1], out=begins[:, 1:])
    last = np.maximum.accumulate(np.where(begins, places, 0), axis=1)
    return (last - places - 1)[:, ::-1]


def row_digests(batch: Batch, *, step: int, first_row: int) -> NDArray[np.uint64]:
    """A hash of every row as it is delivered, (rows, 2): of its step and place, its episodes, tokens and targets.

    Digests of several rows, ranks or steps are combined by adding them, modulo 2^64 in each column.
    """
    # -100 becomes a number that no token has: the width of tokens is all that targets need.
    parts = (batch.x.astype("<u4"), batch.y.astype("<u4"), batch.weights.astype("<f4").view("<u4"))
    digests = np.empty((len(batch.x), 2), dtype=np.uint64)
    for number, (row, episodes) in enumerate(zip(np.concatenate(parts, axis=1), batch.episode_ids, strict=True)):
        digest = hashlib.blake2b(row.data, digest_size=16)
        digest.update(np.append(episodes[episodes >= 0], (-1, step, first_row + number)).astype("<i8").data)
        digests[number] = np.frombuffer(digest.digest(), dtype="<u8")
    return digests
