"""Rows to shards: any number of `append`, each file written once from front to back and hashed on the way.

The caller's thread turns rows into bytes; one other hashes and writes them, in order, and syncs a finished shard.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.errors import DataError
from chatmill.rows import NO_FILE, OWN_ID, File, Rows, Table
from chatmill.store.files import create, make_folder, sync_tree
from chatmill.store.layout import (
    EPISODE,
    INDEX,
    MASK,
    ORIGINS,
    SEGMENT,
    SPANS,
    STORED_SPAN,
    TARGET,
    TARGETS,
    TOKENS,
    shard_name,
    token_dtype,
)
from chatmill.store.metadata import FileInfo, ShardInfo, SplitInfo

SLAB = 1 << 18
"""Tokens that are turned into bytes at a time: their copies stay in the cache, and memory stays flat."""
WAITING = 24
"""Slabs that may wait to be written: enough for the other thread while the next rows are brought together."""


class SplitWriter:
    """Writes the rows of one split into `folder/shard_00000`, `shard_00001` …

    A shard ends where the next row would bring it over `shard_tokens`; a row larger than that has a shard of its
    own. The bytes depend on the rows alone, not on how they are spread over calls of `append`. As a context it
    closes its files when the block fails; `close` is what finishes the split.
    """

    def __init__(self, folder: Path, *, vocab_size: int, shard_tokens: int) -> None:
        if shard_tokens < 1:
            raise ValueError(f"shards of {shard_tokens} tokens cannot be; at least 1")
        self._dtype = token_dtype(vocab_size)
        self._vocab_size = vocab_size
        self._shard_tokens = shard_tokens
        self._folder = folder
        self._done: list[ShardInfo] = []
        self._shard: _ShardWriter | None = None
        self._files = _FileTable()
        self._line = _WriterThread()
        make_folder(folder)

    def append(self, rows: Rows) -> None:
        """Add rows at the end; `DataError` if they do not hold together or an id is not in the vocabulary."""
        rows.check()
        self._check_ids(rows)
        start, at = rows.row_start, 0
        while at < len(rows):
            shard = self._shard = self._shard or self._open()
            room = self._shard_tokens - shard.num_tokens
            # All the rows that end within the room, but no more than a slab of them.
            stop = int(np.searchsorted(start, start[at] + min(room, SLAB), side="right")) - 1
            if stop <= at:
                if shard.num_episodes and start[at + 1] - start[at] > room:
                    self._finish()
                    continue
                stop = at + 1
            shard.put(rows[at:stop], self._files)
            at = stop

    def close(self) -> SplitInfo:
        """Finish the last shard and say what was written."""
        self._finish()
        self._line.close()
        return SplitInfo(tuple(self._done), self._files.table())

    def __enter__(self) -> SplitWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._line.abandon()
        if self._shard is not None:
            self._shard.abandon()
            self._shard = None

    def _open(self) -> _ShardWriter:
        return _ShardWriter(self._folder / shard_name(len(self._done)), self._dtype, self._line)

    def _finish(self) -> None:
        if self._shard is not None:
            self._done.append(self._shard.close())
            self._shard = None

    def _check_ids(self, rows: Rows) -> None:
        if len(rows.ids) and (largest := int(rows.ids.max())) >= self._vocab_size:
            where = int(np.searchsorted(rows.segment_start, int(rows.ids.argmax()), side="right")) - 1
            raise DataError(f"{_place(rows, where)}: token id {largest}; the vocabulary has {self._vocab_size}")
        if len(rows.spans) and (largest := int(rows.spans["target"].max())) >= self._vocab_size:
            span = int(rows.spans["target"].argmax())
            where = int(np.searchsorted(rows.first_span, span, side="right")) - 1
            raise DataError(f"{_place(rows, where)}: target {largest}; the vocabulary has {self._vocab_size}")


def _place(rows: Rows, segment: int) -> str:
    origin = rows.origins[segment]
    return f"{rows.files[origin['file']].path}:{origin['line']}" if origin["file"] != NO_FILE else "a row"


class _FileTable:
    """Numbers files in the order in which rows first name them, whatever tables the rows come with."""

    def __init__(self) -> None:
        self._numbers: dict[File, int] = {}
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
                # Two entries of a table may name the same file.
                self._map[old] = self._numbers.setdefault(files[old], len(self._numbers))
            numbers = self._map[known]
        return np.where(named, numbers, NO_FILE).astype(np.uint32)

    def table(self) -> tuple[File, ...]:
        return tuple(self._numbers)


class _WriterThread:
    """Work that another thread does, in the order in which it was given; its faults come back to who waits for it."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._waiting: deque[Future[None]] = deque()

    def give(self, work: Callable[[], None]) -> None:
        # Begun at the first work, so that a caller may still fork after it has made a writer.
        self._pool = self._pool or ThreadPoolExecutor(1, thread_name_prefix="store")
        self._waiting.append(self._pool.submit(work))
        while len(self._waiting) > WAITING:
            self._waiting.popleft().result()

    def wait(self) -> None:
        """Return when all work is done."""
        while self._waiting:
            self._waiting.popleft().result()

    def close(self) -> None:
        self.wait()
        self.abandon()

    def abandon(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._pool = None
        self._waiting.clear()


class _HashedFile:
    """One file of a shard: its bytes are hashed and counted as they are written."""

    def __init__(self, path: Path) -> None:
        self._file = create(path, hurry=True)
        self._hash = hashlib.sha256()
        self._size = 0

    def put(self, records: NDArray[Any]) -> None:
        data = records.view(np.uint8).data
        self._hash.update(data)
        self._file.write(data)
        self._size += data.nbytes

    def close(self) -> FileInfo:
        self._file.close()
        return FileInfo(self._size, self._hash.hexdigest())


class _ShardWriter:
    """The files of one shard while they are written."""

    def __init__(self, folder: Path, dtype: np.dtype[np.unsignedinteger], line: _WriterThread) -> None:
        make_folder(folder)
        self._line = line
        self._folder = folder
        self._dtype = dtype
        # The spans first: a folder that has them and no metadata is known as an unfinished build.
        self._parts = {name: _HashedFile(folder / name) for name in (SPANS, ORIGINS, INDEX, MASK, TOKENS)}
        self.num_episodes = self.num_tokens = self._trained = self._spans = self._segments = 0
        self._shortest, self._longest = 2**62, 0

    def put(self, rows: Rows, files: _FileTable) -> None:
        lengths, spans = rows.lengths, rows.spans
        trained = spans["weight"] > 0
        pieces = {
            TOKENS: rows.ids.astype(self._dtype, copy=False),
            MASK: rows.per_token(trained.view(np.uint8)),
            INDEX: self._entries(rows),
            SPANS: _stored(spans),
            ORIGINS: self._origins(rows, files),
        }
        if len(targets := self._targets(spans["target"])):
            pieces[TARGETS] = targets
        self._line.give(partial(self._write, pieces))
        self.num_episodes += len(rows)
        self.num_tokens += len(rows.ids)
        self._trained += int(spans["length"].sum(where=trained, dtype=np.int64))
        self._spans += len(spans)
        self._segments += len(rows.origins)
        self._shortest = min(self._shortest, int(lengths.min()))
        self._longest = max(self._longest, int(lengths.max()))

    def close(self) -> ShardInfo:
        """Finish the files. They are synced while the next shard is made, so that publishing waits for little."""
        self._line.wait()
        info = ShardInfo(
            num_episodes=self.num_episodes,
            num_tokens=self.num_tokens,
            num_trained_tokens=self._trained,
            num_spans=self._spans,
            num_segments=self._segments,
            shortest=self._shortest,
            longest=self._longest,
            files={name: part.close() for name, part in self._parts.items()},
        )
        self._line.give(partial(sync_tree, self._folder))
        return info

    def abandon(self) -> None:
        """Let go of the files; what they hold is worth nothing."""
        for part in self._parts.values():
            try:
                part.close()
            except OSError:
                # The disk is full or gone, which is why we are here: the first fault is the one to report.
                continue

    def _entries(self, rows: Rows) -> Table:
        entries = np.empty(len(rows), dtype=EPISODE)
        entries["start"] = rows.row_start[:-1] + self.num_tokens
        entries["length"] = rows.lengths
        return entries

    def _origins(self, rows: Rows, files: _FileTable) -> Table:
        records = np.empty(len(rows.origins), dtype=SEGMENT)
        records["first_span"] = rows.first_span[:-1] + self._spans
        ordinal = np.arange(self.num_episodes, self.num_episodes + len(rows), dtype=np.int64)
        records["row"] = np.repeat(ordinal, np.diff(rows.first_segment))
        records["file"] = files.number(rows.files, rows.origins["file"])
        records["line"] = rows.origins["line"]
        records["key"] = rows.origins["key"]
        return records

    def _targets(self, target: NDArray[np.int32]) -> Table:
        chosen = np.flatnonzero(target != OWN_ID)
        records = np.empty(len(chosen), dtype=TARGET)
        records["span"] = chosen + self._spans
        records["target"] = target[chosen]
        return records

    def _write(self, pieces: dict[str, NDArray[Any]]) -> None:
        for name, records in pieces.items():
            if name not in self._parts:
                self._parts[name] = _HashedFile(self._folder / name)
            self._parts[name].put(records)


def _stored(spans: Table) -> Table:
    stored = np.empty(len(spans), dtype=STORED_SPAN)
    for name in STORED_SPAN.names or ():
        stored[name] = spans[name]
    return stored
