"""Batches: the only place where x and y are shifted against each other.

`weight[i]` belongs to predicting token i, so y[i] is token i+1 and it is trained if token i+1 is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.load.read import Reader
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


class Counts(NamedTuple):
    """What became of the tokens of some rows."""

    rows: int = 0
    """Rows that hold something."""
    tokens: int = 0
    """Tokens in them, padding left out."""
    trained: int = 0
    """Positions of y that are predicted."""
    cut_rows: int = 0
    """Episodes that were longer than a row, of which the last tokens stay."""
    cut_tokens: int = 0

    def plus(self, other: Counts) -> Counts:
        return Counts(*(mine + yours for mine, yours in zip(self, other, strict=True)))


def shift(
    ids: NDArray[np.int64],
    trained: NDArray[np.bool_],
    *,
    targets: NDArray[np.int64] | None = None,
    segments: NDArray[Any] | None = None,
    ignore_index: int = IGNORE_INDEX,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """x, y and the loss mask of y, each (rows, length - 1), from ids, mask and segments of (rows, length).

        ids       a b c d e        x  a b c d
        trained   0 0 1 1 1        y  - c - e      - is `ignore_index`
        segments  0 0 0 1 1

    The first token of a segment is never predicted from the segment before it, whatever its weight. `targets` say
    what a token is to be predicted as, where that is not the token itself.
    """
    loss_mask = trained[:, 1:]
    if segments is not None:
        loss_mask = loss_mask & (segments[:, 1:] == segments[:, :-1])
    wanted = ids if targets is None else targets
    return ids[:, :-1], np.where(loss_mask, wanted[:, 1:], ignore_index), loss_mask


def assemble(
    reader: Reader,
    episodes: Index,
    first: Index,
    *,
    num_rows: int,
    block_size: int,
    pad_token_id: int,
    use_loss_mask: bool,
) -> tuple[Batch, Counts]:
    """Rows of `block_size` tokens, of which row r holds episodes[first[r]:first[r + 1]]; those after the last are empty.

    Of an episode that is longer than a row the last tokens stay.
    """
    capacity = block_size + 1
    places = reader.locate(episodes)
    kept = np.minimum(places.length, capacity)
    cut = places.length - kept
    begin = offsets(kept)
    filled = np.diff(begin[first])
    row = np.repeat(np.arange(len(first) - 1), np.diff(first))
    to = row * capacity + begin[:-1] - begin[first[:-1]][row]

    ids = np.full(num_rows * capacity, pad_token_id, dtype=np.int64)
    reader.copy("tokens.bin", places, places.start + cut, kept, to, ids)

    spans = reader.spans(places)
    owner = np.repeat(np.arange(len(episodes)), np.diff(spans.first))
    end = np.cumsum(spans.length) - offsets(places.length)[owner]
    length = np.minimum(spans.length, np.maximum(end - cut[owner], 0))
    weight = spans.weight if use_loss_mask else (~spans.is_padding).astype(np.float32)

    room = np.full(num_rows, capacity, dtype=np.int64)
    room[: len(filled)] -= filled
    per_row = np.zeros(num_rows, dtype=np.int64)
    per_row[: len(filled)] = np.diff(spans.first[first])
    pads = np.cumsum(per_row + 1) - 1
    is_pad = np.zeros(len(length) + num_rows, dtype=np.bool_)
    is_pad[pads] = True

    def with_pads(values: NDArray[Any], pad: Any) -> NDArray[Any]:
        out = np.empty(len(is_pad), dtype=values.dtype)
        out[is_pad], out[~is_pad] = pad, values
        return out

    lengths = with_pads(length, room)
    weights = np.repeat(with_pads(weight, 0), lengths).reshape(num_rows, capacity)
    # A segment of which a cut left nothing does not count.
    span_segment = np.cumsum(spans.begins_segment) - 1
    segment_length = np.bincount(span_segment, weights=length, minlength=0).astype(np.int64)
    segment_episode = episodes[owner[spans.begins_segment]]
    segment_row = row[owner[spans.begins_segment]]
    real = segment_length > 0
    segment_length, segment_episode, segment_row = segment_length[real], segment_episode[real], segment_row[real]
    per_row_segments = np.bincount(segment_row, minlength=num_rows)
    number = np.arange(len(segment_row)) - offsets(per_row_segments)[segment_row]
    pads = np.cumsum(per_row_segments + 1) - 1
    is_pad = np.zeros(len(segment_length) + num_rows, dtype=np.bool_)
    is_pad[pads] = True
    lengths_s = with_pads(segment_length, room)
    segments = np.repeat(with_pads(number.astype(np.int32), per_row_segments), lengths_s).reshape(num_rows, capacity)
    starts = offsets(lengths_s)[:-1]
    positions = (np.arange(num_rows * capacity) - np.repeat(starts, lengths_s)).astype(np.int32)
    positions = positions.reshape(num_rows, capacity)
    episode_ids = np.full((num_rows, max(1, int(per_row_segments.max(initial=0)))), -1, dtype=np.int64)
    episode_ids[segment_row, number] = segment_episode

    targets = None
    if reader.has_targets and np.any(spans.target >= 0):
        is_pad = np.zeros(len(length) + num_rows, dtype=np.bool_)
        is_pad[np.cumsum(per_row + 1) - 1] = True
        named = np.repeat(with_pads(spans.target, -1), lengths)
        targets = np.where(named >= 0, named, ids).reshape(num_rows, capacity)
    x, y, loss_mask = shift(ids.reshape(num_rows, capacity), weights > 0, targets=targets, segments=segments)
    batch = Batch(
        np.ascontiguousarray(x),
        y,
        loss_mask,
        np.where(loss_mask, weights[:, 1:], np.float32(0)),
        np.ascontiguousarray(positions[:, :-1]),
        np.ascontiguousarray(segments[:, :-1]),
        episode_ids,
    )
    long = cut > 0
    counts = Counts(len(first) - 1, int(kept.sum()), int(np.count_nonzero(loss_mask)), int(long.sum()), int(cut.sum()))
    return batch, counts


def row_digests(batch: Batch, *, step: int, first_row: int) -> NDArray[np.uint64]:
    """A hash of every row as it is delivered, (rows, 2): of its step and place, its episodes, tokens and targets.

    Digests of several rows, ranks or steps are combined by adding them, modulo 2^64 in each column.
    """
    digests = np.empty((len(batch.x), 2), dtype=np.uint64)
    for number, (x, y, weights, episodes) in enumerate(
        zip(batch.x, batch.y, batch.weights, batch.episode_ids, strict=True)
    ):
        digest = hashlib.blake2b(digest_size=16)
        digest.update(np.array([step, first_row + number], dtype="<i8").data)
        digest.update(np.append(episodes[episodes >= 0], -1).astype("<i8").data)
        digest.update(x.astype("<u4").data)
        digest.update(y.astype("<i8").data)
        digest.update(weights.astype("<f4").data)
        digests[number] = np.frombuffer(digest.digest(), dtype="<u8")
    return digests
