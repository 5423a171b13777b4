"""Build batches with the C extension, directly from the memory-mapped tokens and spans of a dataset.

If the C extension is not available or an episode has targets, `RowTable` builds the same arrays with numpy.
"""

from __future__ import annotations

import numpy as np

from chatmill.load.batch import Batch, BuiltRows, HashedRows, RowTable
from chatmill.load.plan import LoadPlan, Window
from chatmill.load.read import EpisodeReader, StoredEpisodes
from chatmill.rows import Index, Part, as_bytes, offsets
from chatmill.store.mapped import mapped_file, reading

try:
    from chatmill._native import _batch
except ImportError:
    _batch = None  # type: ignore[assignment]

NUM_COUNTS = 7
"""Number of counts that the C extension returns per row: the fields of `BatchCounts` and the number of segments."""


class StoredRows:
    """Builds rows from stored episodes. Row r consists of episodes[first[r]:first[r + 1]], followed by padding."""

    def __init__(self, plan: LoadPlan, rows: Window, stored: StoredEpisodes) -> None:
        tokens, spans = stored.tokens, stored.spans
        self._reader: EpisodeReader = plan.reader
        self._stored = stored
        self._first = np.ascontiguousarray(rows.first, dtype=np.int64)
        self._tokens, self._spans = tokens.arrays, [as_bytes(table) for table in spans.tables]
        self._files = [file for array in (*self._tokens, *self._spans) if (file := mapped_file(array)) is not None]
        self._borders = np.ascontiguousarray(spans.borders)
        columns = (
            *(rows.episodes, tokens.which, tokens.start, tokens.stop, tokens.cut),
            *(spans.which, spans.begin, spans.end, spans.first_border[:-1], spans.first_border[1:]),
        )
        self._episodes = np.stack(columns, axis=1)
        segments = offsets(np.maximum(np.diff(spans.first_border), 1))[rows.first]
        self._most_segments: Index = np.diff(segments)
        config = plan.config
        self._size, self._width = config.block_size, tokens.dtype.itemsize
        self._options = plan.pad_token_id, config.use_loss_mask, int(Part.PAD)

    def build(self, start: int, stop: int, hashed: HashedRows | None = None) -> BuiltRows:
        """Build the rows from `start` up to but not including `stop`. Also count the tokens of each row and, if
        `hashed` is given, compute a digest of each row.
        """
        rows, most = stop - start, int(self._most_segments[start:stop].max(initial=1))
        shape, first = (rows, self._size), self._first[start : stop + 1]
        batch = Batch(
            np.empty(shape, dtype=np.int64),
            np.empty(shape, dtype=np.int64),
            np.empty(shape, dtype=np.bool_),
            np.empty(shape, dtype=np.float32),
            np.empty(shape, dtype=np.int32),
            np.empty(shape, dtype=np.int32),
            np.empty((rows, most), dtype=np.int64),
        )
        counts = np.empty((rows, NUM_COUNTS), dtype=np.int64)
        digests = None if hashed is None else np.empty((rows, 2), dtype="<u8")
        hashes = () if hashed is None else (digests, np.array(hashed.steps, dtype=np.int64), hashed.first_row)
        inputs = self._tokens, self._spans, self._episodes, first, self._borders
        with reading():
            try:
                wrong = _batch.rows(*batch, counts, *inputs, self._size, most, self._width, *self._options, *hashes)
                if wrong >= 0:
                    raise self._reader.untiled(self._stored, wrong)
            finally:
                for file in self._files:
                    file.check()
        return BuiltRows(batch, counts[:, :-1], counts[:, -1], digests)


def look_up(plan: LoadPlan, rows: Window) -> StoredRows | RowTable:
    """Find the tokens and spans of the episodes in each row, without copying them."""
    stored = plan.reader.last_tokens(rows.episodes, plan.capacity)
    if _batch is None or plan.reader.has_targets(stored.shards):
        return row_table(plan, rows, stored)
    return StoredRows(plan, rows, stored)


def row_table(plan: LoadPlan, rows: Window, stored: StoredEpisodes | None = None) -> RowTable:
    """Return a `RowTable` for the rows of a window."""
    stored = stored or plan.reader.last_tokens(rows.episodes, plan.capacity)
    return RowTable(
        stored.tokens,
        plan.reader.spans(stored),
        *rows,
        block_size=plan.config.block_size,
        pad_token_id=plan.pad_token_id,
        use_loss_mask=plan.config.use_loss_mask,
    )
