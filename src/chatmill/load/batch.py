"""Build batches, the input arrays of a training step.

`RowTable` builds batches from rows; only this class shifts labels, masks segment boundaries and numbers positions.
`weight[i]` is the loss weight for predicting token i. The label y[i] is token i + 1, with the weight of token i + 1:

    tokens    a b c d e        x  a b c d
    weights   0 0 1 1 1        y  - c - e      - is -100
    segments  0 0 0 1 1

The loss never crosses a segment boundary: the first token of a segment is not predicted, regardless of its weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import add
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.errors import DataError
from chatmill.load.read import ArraySlices, EpisodeSpans, LocatedEpisodes
from chatmill.rows import OWN_ID, Index, Part, Rows, offsets, run_positions
from chatmill.store.mapped import check_mapped, reading

IGNORE_INDEX = -100
"""The label of positions that are excluded from the loss, as in `torch.nn.functional.cross_entropy`."""


class Batch(NamedTuple):
    """A training batch: numpy arrays or torch tensors, all of shape (rows, block_size) except `episode_ids`.

    Each conversation in a row is a segment, and the row's padding is another segment.

    >>> import numpy as np
    >>> from chatmill.rows import rows_from_mask
    >>> rows = rows_from_mask(np.array([5, 6, 7, 8], dtype=np.uint32), np.array([0, 0, 1, 1]), [4])
    >>> batch = chatmill.collate(rows, pad_token_id=0)
    >>> batch.x.tolist(), batch.y.tolist()
    ([[5, 6, 7]], [[-100, 7, 8]])
    """

    x: Any
    """int64: input tokens."""
    y: Any
    """int64: labels, shifted so that y[i] is the label of x[i]; -100 where no loss is computed."""
    loss_mask: Any
    """bool: whether a loss is computed at each position."""
    weights: Any
    """float32: the loss weight of each label; 0 where no loss is computed."""
    positions: Any
    """int32: position ids, which start at 0 in each segment."""
    segments: Any
    """int32: the index of each token's segment within its row; padding is also a segment."""
    episode_ids: Any
    """int64, of shape (rows, maximum number of segments): the episode index of each segment; -1 for unused entries."""

    def each(self, change: Callable[[Any], Any]) -> Batch:
        """Return a batch with the function `change` applied to every array."""
        return Batch(*map(change, self))

    def to_torch(self, device: Any = None) -> Batch:
        """Return the batch as torch tensors, on `device` if given."""
        import torch

        return self.each(lambda array: torch.from_numpy(array).to(device))

    def split(self, parts: int) -> list[Batch]:
        """Split the batch into `parts` micro-batches of equal size, for gradient accumulation."""
        size, remainder = divmod(len(self.x), parts)
        if remainder:
            raise ValueError(
                f"cannot split {len(self.x)} rows into {parts} equal parts; expected a divisor of {len(self.x)}"
            )
        if parts == 1:
            return [self]
        columns = (array.reshape(parts, size, *array.shape[1:]) for array in self)
        return [Batch(*arrays) for arrays in zip(*columns, strict=True)]


def split_batches(batch: Batch, widths: Sequence[int]) -> list[Batch]:
    """Split a batch that combines several batches; `widths` is the number of `episode_ids` columns of each batch."""
    parts = zip(batch.split(len(widths)), widths, strict=True)
    return [part._replace(episode_ids=part.episode_ids[:, :width]) for part, width in parts]


class BatchCounts(NamedTuple):
    """Counts of rows and tokens in one or more batches."""

    rows: int = 0
    """Number of rows, not counting rows that consist only of padding."""
    tokens: int = 0
    """Number of tokens, not counting padding."""
    trained: int = 0
    """Number of positions of y at which a loss is computed."""
    cut_episodes: int = 0
    """Number of episodes that are longer than a row; their start is truncated, as with the fit rule `tail`."""
    cut_tokens: int = 0
    answer_cut: int = 0
    """Number of episodes in which truncation removed part of an answer; the ledger has a count of the same name."""

    def plus(self, other: BatchCounts) -> BatchCounts:
        return BatchCounts(*map(add, self, other))


class HashedRows(NamedTuple):
    """The steps whose rows are hashed, and the position of this rank's first row in each global batch."""

    steps: Sequence[int]
    first_row: int


class BuiltRows(NamedTuple):
    """The batch arrays of several rows, and the token counts of each row."""

    batch: Batch
    counts: Index
    """The fields of `BatchCounts` for each row, with shape (rows, 6)."""
    num_segments: Index
    digests: NDArray[np.uint64] | None = None
    """Results of `sha256_rows`, if they were computed together with the arrays."""


def segments_from_end(episode_ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Number the segments of each episode backward from -1, because truncation removes the first segments.

    7 7 7 4 9 9 -1  ->  -3 -2 -1 -1 -2 -1 -1
    """
    reversed_ids = episode_ids[:, ::-1]
    columns = np.arange(reversed_ids.shape[1])
    begins = np.ones(reversed_ids.shape, dtype=np.bool_)
    np.not_equal(reversed_ids[:, 1:], reversed_ids[:, :-1], out=begins[:, 1:])
    last = np.maximum.accumulate(np.where(begins, columns, 0), axis=1)
    return (last - columns - 1)[:, ::-1]


class RowTable:
    """The layout of rows whose tokens are not copied yet: row r consists of episodes[first[r]:first[r + 1]] and
    padding.

    A row has block_size + 1 tokens: the tokens of x, and the label of the last token.
    """

    def __init__(
        self,
        located: LocatedEpisodes,
        spans: EpisodeSpans,
        episodes: Index,
        first: Index,
        *,
        block_size: int,
        pad_token_id: int,
        use_loss_mask: bool,
    ) -> None:
        self._block_size, capacity = block_size, block_size + 1
        self._arrays, cut = located.arrays, located.cut
        arrays = self._arrays
        filled = _sums(located.stop - located.start, first)
        padding = capacity - filled

        tokens = _PaddedRuns(first)
        self._token_edges = tokens.edges
        self._tokens = ArraySlices(
            [*(array.data for array in arrays), np.full(capacity, pad_token_id, dtype=located.dtype).data],
            tokens.put(located.which, len(arrays)).tolist(),
            tokens.put(located.start, 0).tolist(),
            tokens.put(located.stop, padding).tolist(),
            located.dtype,
        )

        # Convert segments to runs of positions in x, which does not include the last token of a row.
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

        # Convert spans to runs of positions in y. The first token of a segment is a separate run without loss. The run
        # for the first token of a row is empty, because no token of x predicts that token.
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
        self._counts = np.stack(
            [filled > 0, filled, trained, _sums(cut > 0, first), _sums(cut, first), _sums(spans.answer_cut, first)],
            axis=1,
        )

    def trained_weights(self, size: int) -> tuple[Index, NDArray[np.float64]]:
        """For each group of `size` rows, return the number of trained positions and the sum of their weights."""
        trained = self._counts[:, BatchCounts._fields.index("trained")]
        of_runs = self._weight.astype(np.float64) * self._y_length
        weights = np.add.reduceat(of_runs, self._y_edges[:-1])
        return trained.reshape(-1, size).sum(axis=1), weights.reshape(-1, size).sum(axis=1)

    def build(self, start: int, stop: int, hashed: HashedRows | None = None) -> BuiltRows:
        """Return the batch arrays and the token counts of rows `start` to `stop`; digests are not computed."""
        with reading():
            try:
                batch = self.arrays(start, stop)
            finally:
                for array in self._arrays:
                    check_mapped(array)
        return BuiltRows(batch, self._counts[start:stop], self._num_segments[start:stop])

    def arrays(self, start: int, stop: int) -> Batch:
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
        most_segments = int(self._num_segments[start:stop].max(initial=1))
        episode_ids = np.full((shape[0], most_segments), -1, dtype=np.int64)
        segments = slice(self._first_segment[start], self._first_segment[stop])
        episode_ids[self._row[segments] - start, self._number[segments]] = self._episode[segments]
        return Batch(
            ids[:, :-1].astype(np.int64),
            y,
            loss_mask,
            weights,
            run_positions(lengths, width=shape[1], dtype=np.int32).reshape(shape),
            np.repeat(self._x_segment[runs], lengths).reshape(shape),
            episode_ids,
        )


def collate(rows: Rows, *, pad_token_id: int, length: int | None = None) -> Batch:
    """Collate rows into one batch, padded on the right to `length` tokens or to the longest row.

    Because labels are shifted by one, x and y are one position shorter than the padded rows. `episode_ids` contains the
    index of each row in `rows`.

    >>> renderer = chatmill.open_renderer("chatml", "bytes")
    >>> chat = [chatmill.Message("user", "2+2?"), chatmill.Message("assistant", "4")]
    >>> rows = renderer.render([chatmill.Record(chat)])
    >>> batch = chatmill.collate(rows, pad_token_id=0, length=64)
    >>> batch.x.shape, int(batch.loss_mask.sum())
    ((1, 63), 2)
    """
    longest = int(rows.lengths.max(initial=2))
    if length is not None and length < rows.lengths.max(initial=0):
        raise DataError(f"a row has {longest} tokens, but length is {length}; truncate the row first")
    spans = EpisodeSpans(
        length=rows.spans["length"].astype(np.int64),
        weight=rows.spans["weight"],
        is_padding=rows.spans["part"] == Part.PAD,
        target=rows.spans["target"].astype(np.int64),
        first=rows.first_span[rows.first_segment],
        segment_first=rows.first_span,
        first_segment=rows.first_segment,
        answer_cut=np.zeros(len(rows), dtype=bool),
    )
    first, zeros = np.arange(len(rows) + 1), np.zeros(len(rows), dtype=np.int64)
    start, stop, ids = rows.row_start[:-1], rows.row_start[1:], np.ascontiguousarray(rows.ids)
    located = LocatedEpisodes([ids], zeros, start, stop, zeros, ids.dtype)
    size = (length or longest) - 1
    table = RowTable(located, spans, first[:-1], first, block_size=size, pad_token_id=pad_token_id, use_loss_mask=True)
    return table.arrays(0, len(rows))


class _PaddedRuns:
    """Runs of equal values in several rows, concatenated, with one run of padding after each row.

    first 0 2 3  ->  a a - b -        edges 0 3 5
    """

    def __init__(self, first: Index, borders: Index | None = None) -> None:
        self.edges = offsets(np.diff(first) + 1)
        self._padding, self._borders = self.edges[1:] - 1, borders
        self._real = np.ones(self.edges[-1], dtype=np.bool_)
        self._real[self._padding] = False
        if borders is not None:
            self._real[borders] = False

    def put(self, values: NDArray[Any], padding: NDArray[Any] | int, borders: NDArray[Any] | int = 0) -> NDArray[Any]:
        """Return one value per run: `padding` for padding runs, `borders` for the runs listed in `self._borders`, and
        `values` for all other runs.
        """
        out = np.empty(len(self._real), dtype=values.dtype)
        out[self._real], out[self._padding] = values, padding
        if self._borders is not None:
            out[self._borders] = borders
        return out


def _sums(values: NDArray[Any], first: Index) -> Index:
    """Return the sum of values[first[i]:first[i + 1]] for each i."""
    return np.diff(offsets(values)[first])
