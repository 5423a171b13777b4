"""Write rows to shards. The calling thread converts rows to bytes; another thread hashes the bytes and writes them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.errors import DataError
from chatmill.rows import NO_FILE, OWN_ID, File, Rows, Table
from chatmill.store import layout
from chatmill.store.files import make_folder, sync_tree
from chatmill.store.hashed import HashedFile
from chatmill.store.layout import INDEX, MASK, ORIGINS, SPANS, STORED_SPAN, TARGETS, TOKENS, shard_name
from chatmill.store.metadata import ShardInfo, SplitInfo

CHUNK_TOKENS = 1 << 18
"""Number of tokens converted to bytes at a time, so that copies stay in the CPU cache."""
QUEUED = 24
"""Maximum number of chunks in the queue of the writing thread."""


class SplitWriter:
    """Writes the rows of one split to the folders `shard_00000`, `shard_00001` and so on.

    A new shard starts if the next row would make the current shard longer than `shard_tokens` tokens; a row longer than
    `shard_tokens` is written to a separate shard. The written bytes depend only on the rows, not on how the rows are
    divided between calls to `append`. Call `close` to complete the split. The writer is also a context manager, which
    closes the files if the `with` block fails.

    If several processes each write some shards of the split, `first` is the index of this process's first shard, and
    `files` maps input files to their indices in the whole split. `on_shard` is called with the folder and the
    `ShardInfo` of each completed shard.
    """

    def __init__(
        self,
        folder: Path,
        *,
        vocab_size: int,
        shard_tokens: int,
        first: int = 0,
        files: Mapping[File, int] = MappingProxyType({}),
        on_shard: Callable[[Path, ShardInfo], None] = lambda folder, info: None,
    ) -> None:
        if shard_tokens < 1:
            raise ValueError(f"shard_tokens is {shard_tokens}; expected at least 1")
        self._dtype = layout.token_dtype(vocab_size)
        self._vocab_size = vocab_size
        self._shard_tokens = shard_tokens
        self._folder = folder
        self._first = first
        self._done: list[ShardInfo] = []
        self._shard: _ShardWriter | None = None
        self._files = FileTable(files)
        self._thread = _WriterThread()
        self._on_shard = on_shard
        make_folder(folder)

    def append(self, rows: Rows, *, source: str | None = None) -> None:
        """Append rows; raise `DataError` if `rows.check()` fails, or if a token id or target is not in the vocabulary.

        A new shard starts if `source` differs from that of the previous rows.
        """
        if self._shard is not None and self._shard.source != source:
            self._finish()
        rows.check()
        self._check_ids(rows)
        start, at = rows.row_start, 0
        while at < len(rows):
            if self._shard is None:
                name = shard_name(self._first + len(self._done))
                self._shard = _ShardWriter(self._folder / name, self._dtype, self._thread, source)
            shard = self._shard
            free = self._shard_tokens - shard.num_tokens
            # Take all rows that fit into the rest of the shard, but at most one chunk.
            stop = int(np.searchsorted(start, start[at] + min(free, CHUNK_TOKENS), side="right")) - 1
            if stop <= at:
                if shard.num_episodes and start[at + 1] - start[at] > free:
                    self._finish()
                    continue
                stop = at + 1
            shard.put(rows[at:stop], self._files)
            at = stop

    def close(self) -> SplitInfo:
        """Complete the last shard; return the counts and file hashes of all shards."""
        self._finish()
        self._thread.wait()
        self._thread.abandon()
        return SplitInfo(tuple(self._done), self._files.table())

    def __enter__(self) -> SplitWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.abandon()
        if self._shard is not None:
            self._shard.abandon()
            self._shard = None

    def _finish(self) -> None:
        if self._shard is not None:
            info = self._shard.close()
            self._done.append(info)
            self._on_shard(self._folder / shard_name(self._first + len(self._done) - 1), info)
            self._shard = None

    def _check_ids(self, rows: Rows) -> None:
        for what, values, start in (
            ("token id", rows.ids, rows.segment_start),
            ("target", rows.spans["target"], rows.first_span),
        ):
            if len(values) and (largest := int(values.max())) >= self._vocab_size:
                origin = rows.origins[int(np.searchsorted(start, int(values.argmax()), side="right")) - 1]
                known = origin["file"] != NO_FILE
                place = f"{rows.files[origin['file']].path}:{origin['line']}" if known else "a row"
                raise DataError(f"{place}: {what} {largest}; expected an id below {self._vocab_size}")


class FileTable:
    """Assigns an index to each input file, in the order in which rows first refer to the files."""

    def __init__(self, numbers: Mapping[File, int] = MappingProxyType({})) -> None:
        self._numbers = dict(numbers)
        self._of: tuple[File, ...] = ()
        self._map = np.empty(0, dtype=np.int64)

    def number(self, files: tuple[File, ...], file: NDArray[np.uint32]) -> NDArray[np.uint32]:
        if files is not self._of:
            self._of = files
            self._map = np.array([self._numbers.get(name, -1) for name in files], dtype=np.int64)
        named = file != NO_FILE
        known = np.where(named, file, 0)
        if not len(files):
            return file
        numbers = self._map[known]
        if (fresh := named & (numbers < 0)).any():
            new, first = np.unique(file[fresh], return_index=True)
            for old in new[np.argsort(first)].tolist():
                # Two entries of `files` may refer to the same file.
                self._map[old] = self._numbers.setdefault(files[old], len(self._numbers))
            numbers = self._map[known]
        return np.where(named, numbers, NO_FILE).astype(np.uint32)

    def table(self) -> tuple[File, ...]:
        return tuple(self._numbers)


class _WriterThread:
    """Runs functions one after another in a background thread. If a function raises an exception, a later call to
    `submit` or `wait` raises it again.
    """

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._waiting: deque[Future[None]] = deque()

    def submit(self, work: Callable[[], None]) -> None:
        # Start the thread at the first call, so that a caller can still fork after creating a writer.
        self._pool = self._pool or ThreadPoolExecutor(1, thread_name_prefix="store")
        self._waiting.append(self._pool.submit(work))
        while len(self._waiting) > QUEUED:
            self._waiting.popleft().result()

    def wait(self) -> None:
        while self._waiting:
            self._waiting.popleft().result()

    def abandon(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._pool = None
        self._waiting.clear()


class _ShardWriter:
    def __init__(
        self, folder: Path, dtype: np.dtype[np.unsignedinteger], thread: _WriterThread, source: str | None
    ) -> None:
        make_folder(folder)
        self.source = source
        self._thread = thread
        self._folder = folder
        self._dtype = dtype
        # Write spans first: a folder with spans but without metadata is an unfinished build.
        self._parts = {name: HashedFile(folder / name, hurry=True) for name in (SPANS, ORIGINS, INDEX, MASK, TOKENS)}
        self.num_episodes = self.num_tokens = self._trained = self._spans = self._segments = 0
        self._shortest, self._longest = 2**62, 0

    def put(self, rows: Rows, files: FileTable) -> None:
        lengths, spans = rows.lengths, rows.spans
        trained = spans["weight"] > 0
        ordinal = np.arange(self.num_episodes, self.num_episodes + len(rows), dtype=np.int64)
        pieces = {
            TOKENS: rows.ids.astype(self._dtype, copy=False),
            MASK: rows.per_token(trained.view(np.uint8)),
            INDEX: _table(layout.EPISODE, start=rows.row_start[:-1] + self.num_tokens, length=lengths),
            SPANS: _table(STORED_SPAN, **{name: spans[name] for name in STORED_SPAN.names or ()}),
            ORIGINS: _table(
                layout.SEGMENT,
                first_span=rows.first_span[:-1] + self._spans,
                row=np.repeat(ordinal, np.diff(rows.first_segment)),
                file=files.number(rows.files, rows.origins["file"]),
                line=rows.origins["line"],
                key=rows.origins["key"],
            ),
        }
        if len(chosen := np.flatnonzero(spans["target"] != OWN_ID)):
            pieces[TARGETS] = _table(layout.TARGET, span=chosen + self._spans, target=spans["target"][chosen])
        self._thread.submit(partial(self._write, pieces))
        self.num_episodes += len(rows)
        self.num_tokens += len(rows.ids)
        self._trained += int(spans["length"].sum(where=trained, dtype=np.int64))
        self._spans += len(spans)
        self._segments += len(rows.origins)
        self._shortest = min(self._shortest, int(lengths.min()))
        self._longest = max(self._longest, int(lengths.max()))

    def close(self) -> ShardInfo:
        """Close the files of the shard. The background thread then syncs them to disk."""
        self._thread.wait()
        counts = (self.num_episodes, self.num_tokens, self._trained, self._spans, self._segments)
        parts = {name: part.close() for name, part in self._parts.items()}
        info = ShardInfo(*counts, self._shortest, self._longest, parts, self.source)
        self._thread.submit(partial(sync_tree, self._folder))
        return info

    def abandon(self) -> None:
        """Close the files of an incomplete shard, which will be discarded."""
        for part in self._parts.values():
            try:
                part.close()
            except OSError:
                # Closing fails again if the disk is full or no longer available; report only the first error.
                continue

    def _write(self, pieces: dict[str, NDArray[Any]]) -> None:
        for name, records in pieces.items():
            if name not in self._parts:
                self._parts[name] = HashedFile(self._folder / name, hurry=True)
            self._parts[name].write(records.view(np.uint8).data)


def _table(dtype: np.dtype[Any], **columns: NDArray[Any]) -> Table:
    table = np.empty(len(next(iter(columns.values()))), dtype=dtype)
    for name, column in columns.items():
        table[name] = column
    return table
