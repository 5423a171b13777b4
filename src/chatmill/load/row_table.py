"""Rows to batch arrays: the one place that shifts x against y, applies the border rule and numbers positions.

`weight[i]` belongs to predicting token i, so y[i] is token i + 1 and has its weight:

    tokens    a b c d e        x  a b c d
    weights   0 0 1 1 1        y  - c - e      - is -100
    segments  0 0 0 1 1

No loss crosses a border: the first token of a segment is never predicted, whatever its weight.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from chatmill.errors import DataError
from chatmill.load.batch import IGNORE_INDEX, Batch, BatchCounts
from chatmill.load.read import ArraySlices, EpisodeSpans, Places
from chatmill.rows import OWN_ID, Index, Part, Rows, offsets, run_positions


class RowReader(Protocol):
    """Episodes by number: those of datasets on disk, or rows in memory."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of token ids."""

    def locate(self, episodes: Index) -> Places: ...

    def token_arrays(self, shards: Index) -> tuple[list[NDArray[Any]], Index]:
        """The token arrays of these shards, and for each shard which of the arrays is its own."""

    def spans(self, places: Places, cut: Index) -> EpisodeSpans:
        """The spans of these episodes without the first `cut` tokens of each."""


class RowTable:
    """What is known of some rows before a token is copied: row r is episodes[first[r]:first[r + 1]], then padding.

    A row has block_size + 1 tokens: those of x and one more to predict. An episode that is longer keeps its last
    tokens. Many rows are looked up together; `arrays` copies a few at a time, which keeps them in the CPU cache.
    """

    def __init__(
        self,
        reader: RowReader,
        episodes: Index,
        first: Index,
        *,
        block_size: int,
        pad_token_id: int,
        use_loss_mask: bool,
    ) -> None:
        self._block_size, capacity = block_size, block_size + 1
        places = reader.locate(episodes)
        kept = np.minimum(places.length, capacity)
        cut = places.length - kept
        filled = _sums(kept, first)
        padding = capacity - filled

        tokens = _PaddedRuns(first)
        arrays, array_of = reader.token_arrays(places.shard)
        self._token_edges = tokens.edges
        self._tokens = ArraySlices(
            [*(array.data for array in arrays), np.full(capacity, pad_token_id, dtype=reader.dtype).data],
            tokens.put(array_of, len(arrays)).tolist(),
            tokens.put(places.start + cut, 0).tolist(),
            tokens.put(places.start + places.length, padding).tolist(),
            reader.dtype,
        )

        # Segments, as runs of x, which lacks the last token of a row.
        spans = reader.spans(places, cut)
        self._first_segment = spans.first_segment[first]
        self._num_segments = np.diff(self._first_segment)
        self._row = np.repeat(np.arange(len(filled)), self._num_segments)
        self._number = run_positions(self._num_segments)
        self._episode = np.repeat(episodes, np.diff(spans.first_segment))
        size = _sums(spans.length, spans.segment_first)
        begin = offsets(size)
        column = begin[:-1] - begin[self._first_segment][self._row]
        inputs = _PaddedRuns(self._first_segment)
        start = inputs.put(column, filled)
        stop = start + inputs.put(size, padding)
        self._x_edges = inputs.edges
        self._x_length = np.minimum(stop, block_size) - np.minimum(start, block_size)
        self._x_segment = inputs.put(self._number, self._num_segments).astype(np.int32)

        # Spans, as runs of y. The first token of a segment is a run of its own without loss, and nothing at all at the
        # beginning of a row, where no token of x predicts it.
        border, not_empty = spans.segment_first[:-1], size > 0
        length = spans.length.copy()
        length[border[not_empty]] -= 1
        weight = spans.weight if use_loss_mask else (~spans.is_padding).astype(np.float32)
        labels = _PaddedRuns((spans.first + spans.first_segment)[first], border + np.arange(len(border)) + self._row)
        self._y_edges = labels.edges
        self._y_length = labels.put(length, padding - (filled == 0), not_empty & (column > 0))
        self._weight = labels.put(weight, 0)
        self._target = None if spans.target is None else labels.put(spans.target, int(OWN_ID), int(OWN_ID))

        trained = _sums(np.where(self._weight > 0, self._y_length, 0), self._y_edges)
        self._counts = np.stack([filled > 0, filled, trained, _sums(cut > 0, first), _sums(cut, first)])

    def counts(self, size: int) -> list[BatchCounts]:
        """The counts of each `size` rows."""
        by_batch = self._counts.reshape(len(self._counts), -1, size).sum(axis=2)
        return [BatchCounts(*columns) for columns in by_batch.T.tolist()]

    def arrays(self, start: int, stop: int) -> BatchArrays:
        """The arrays of rows start to stop."""
        shape = stop - start, self._block_size
        ids = self._tokens.read(self._token_edges[start], self._token_edges[stop]).reshape(shape[0], shape[1] + 1)
        runs = slice(self._y_edges[start], self._y_edges[stop])
        weights = np.repeat(self._weight[runs], self._y_length[runs]).reshape(shape)
        loss_mask = weights > 0
        y = np.full(shape, IGNORE_INDEX, dtype=np.int64)
        np.copyto(y, ids[:, 1:], where=loss_mask)
        if self._target is not None:
            target = np.repeat(self._target[runs], self._y_length[runs]).reshape(shape)
            np.copyto(y, target, where=loss_mask & (target >= 0))

        runs = slice(self._x_edges[start], self._x_edges[stop])
        lengths = self._x_length[runs]
        num_segments = self._num_segments[start:stop]
        episode_ids = np.full((shape[0], max(1, int(num_segments.max(initial=0)))), -1, dtype=np.int64)
        segments = slice(self._first_segment[start], self._first_segment[stop])
        episode_ids[self._row[segments] - start, self._number[segments]] = self._episode[segments]
        batch = Batch(
            ids[:, :-1].astype(np.int64),
            y,
            loss_mask,
            weights,
            run_positions(lengths, width=shape[1], dtype=np.int32).reshape(shape),
            np.repeat(self._x_segment[runs], lengths).reshape(shape),
            episode_ids,
        )
        return BatchArrays(batch, num_segments)


class BatchArrays(NamedTuple):
    """The arrays of one or several batches."""

    batch: Batch
    num_segments: Index
    """Segments of each row, without padding."""

    def split(self, size: int) -> list[Batch]:
        """Batches of `size` rows each, as they would be if made one by one."""
        shape = len(self.num_segments) // size, size, -1
        *arrays, episode_ids = (array.reshape(shape) for array in self.batch)
        if episode_ids.shape[2] > 1:
            widths = np.maximum(self.num_segments.reshape(shape[:2]).max(axis=1), 1).tolist()
            episode_ids = [ids[:, :width] for ids, width in zip(episode_ids, widths, strict=True)]
        return [Batch(*columns) for columns in zip(*arrays, episode_ids, strict=True)]


def collate(rows: Rows, *, pad_token_id: int, length: int | None = None) -> Batch:
    """Collate rows in memory into one batch, padded on the right to `length` tokens or to the longest row.

    The batch has one position less than that, because y is shifted by one. `episode_ids` are row numbers.

    >>> renderer = chatmill.open_renderer("chatml", "bytes")
    >>> chat = [chatmill.Message("user", "2+2?"), chatmill.Message("assistant", "4")]
    >>> rows = renderer.render([chatmill.Record(chat)])
    >>> batch = chatmill.collate(rows, pad_token_id=0, length=64)
    >>> batch.x.shape, int(batch.loss_mask.sum())
    ((1, 63), 2)
    """
    longest = int(rows.lengths.max(initial=2))
    if length is not None and length < rows.lengths.max(initial=0):
        raise DataError(f"a row has {longest} tokens, more than the length {length}; truncate it first")
    first = np.arange(len(rows) + 1)
    block_size = (length or longest) - 1
    reader = _MemoryReader(rows)
    table = RowTable(reader, first[:-1], first, block_size=block_size, pad_token_id=pad_token_id, use_loss_mask=True)
    return table.arrays(0, len(rows)).batch


class _MemoryReader:
    """All rows of `Rows`, in their order."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self.dtype = rows.ids.dtype

    def locate(self, episodes: Index) -> Places:
        return Places(np.zeros_like(episodes), episodes, self._rows.row_start[:-1], self._rows.lengths)

    def token_arrays(self, shards: Index) -> tuple[list[NDArray[Any]], Index]:
        return [np.ascontiguousarray(self._rows.ids)], shards

    def spans(self, places: Places, cut: Index) -> EpisodeSpans:
        rows, spans = self._rows, self._rows.spans
        return EpisodeSpans(
            length=spans["length"].astype(np.int64),
            weight=spans["weight"],
            is_padding=spans["part"] == Part.PAD,
            target=spans["target"].astype(np.int64),
            first=rows.first_span[rows.first_segment],
            segment_first=rows.first_span,
            first_segment=rows.first_segment,
        )


class _PaddedRuns:
    """Runs of several rows one after the other, each row followed by one run of padding.

    first 0 2 3  ->  a a - b -        edges 0 3 5
    """

    def __init__(self, first: Index, borders: Index | None = None) -> None:
        """`borders`: runs, counted with padding, that get values of their own."""
        self.edges = offsets(np.diff(first) + 1)
        self._padding, self._borders = self.edges[1:] - 1, borders
        self._real = np.ones(self.edges[-1], dtype=np.bool_)
        self._real[self._padding] = False
        if borders is not None:
            self._real[borders] = False

    def put(self, values: NDArray[Any], padding: NDArray[Any] | int, borders: NDArray[Any] | int = 0) -> NDArray[Any]:
        """The values of all runs, with these for padding and borders."""
        out = np.empty(len(self._real), dtype=values.dtype)
        out[self._real], out[self._padding] = values, padding
        if self._borders is not None:
            out[self._borders] = borders
        return out


def _sums(values: NDArray[Any], first: Index) -> Index:
    """The sum of each range of values."""
    return np.diff(offsets(values)[first])
