"""Making the index of a dataset, in a thread beside the viewer, and keeping it where it is found again."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.errors import DataError
from chatmill.load.source import DataSource
from chatmill.rows import NO_FILE, Index, Rows, offsets
from chatmill.show.dataset import DatasetView
from chatmill.show.index import BITS, BLOCK, COLUMNS, GRAM, SplitIndex, grams_of, source_bit, sources_of
from chatmill.show.search import PieceTable
from chatmill.store.read import Episodes

VERSION = 1
SLAB = 1 << 20
"""Tokens that are read at a time: little, because a page may be asked for meanwhile."""


class IndexBuilder:
    """Makes the indexes of a dataset in a thread of its own, or opens those that were made before."""

    def __init__(self, shown: DatasetView, cache: Path) -> None:
        self._shown, self._cache = shown, cache
        self._stop = threading.Event()
        self._pause = 0.0
        self._thread = threading.Thread(target=self._run, name="index", daemon=True)
        self.indexes = {split: SplitIndex(len(shown.dataset[split])) for split in shown.dataset.splits}

    def start(self, *, pause: float = 0) -> None:
        """Begin, after so many seconds."""
        self._pause = pause
        self._thread.start()

    def wait(self) -> None:
        self._thread.join()

    def close(self) -> None:
        """Stop, and leave nothing half made."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def folder(self, split: str) -> Path:
        """Where the index of a split is kept: by what it is made from, so that it never goes stale."""
        tokenizer = self._shown.tokenizer
        made_of = [VERSION, DataSource("", self._shown.dataset).sha256, split, tokenizer and tokenizer.sha256]
        return self._cache / hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:32]

    def _run(self) -> None:
        if self._stop.wait(self._pause):
            return
        for split, index in self.indexes.items():
            try:
                if index.count:
                    self._make(self._shown.dataset[split], index, self.folder(split))
            except Exception as error:
                # Whatever it is, it ends this thread: whoever asks is told.
                index.error = str(error) or type(error).__name__

    def _make(self, episodes: Episodes, index: SplitIndex, folder: Path) -> None:
        folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with folder.with_suffix(".lock").open("w") as lock:
            # A second viewer of the same dataset waits, and then finds it made.
            while not _locked(lock.fileno()):
                if self._stop.wait(0.2):
                    return
            if (folder / "index.json").is_file():
                _open(index, folder, has_text=self._shown.tokenizer is not None)
                return
            building = folder.with_suffix(".building")
            shutil.rmtree(building, ignore_errors=True)
            building.mkdir()
            try:
                if self._fill(episodes, index, building):
                    # Written last: its presence means that the rest is complete.
                    (building / "index.json").write_text(json.dumps({"version": VERSION, "episodes": index.count}))
                    building.rename(folder)
            finally:
                shutil.rmtree(building, ignore_errors=True)

    def _fill(self, episodes: Episodes, index: SplitIndex, folder: Path) -> bool:
        """Columns of all episodes first, because they are quick; then their text. False if it was told to stop."""
        for name, dtype in COLUMNS.items():
            index.columns[name] = np.lib.format.open_memmap(
                folder / f"{name}.npy", mode="w+", dtype=np.dtype(dtype), shape=(index.count,)
            )
        source_of = _source_bits(episodes)
        for rows in episodes.sweep(tokens=SLAB):
            if self._stop.is_set():
                return False
            for name, values in columns_of(rows, source_of).items():
                index.columns[name][index.filtered : index.filtered + len(rows)] = values
            index.filtered += len(rows)
        if self._shown.tokenizer is None:
            return True
        index.ends = np.lib.format.open_memmap(folder / "ends.npy", mode="w+", dtype=np.int64, shape=(index.count + 1,))
        writer = _TextWriter(index, folder)
        table = PieceTable(self._shown.text)
        for rows in episodes.sweep(tokens=SLAB):
            if self._stop.is_set():
                return False
            writer.add(*table.folded(rows))
        writer.close()
        return True


class _TextWriter:
    """Appends folded text to an index, block by block."""

    def __init__(self, index: SplitIndex, folder: Path) -> None:
        self._index, self._grams_path = index, folder / "grams.bin"
        self._end = 0
        self._tail = b""
        """Text from the first block on that is not whole yet."""
        index.text = os.open(folder / "text.bin", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._grams_path.write_bytes(b"")
        self._made: list[NDArray[np.uint8]] = []

    def add(self, text: bytes, edges: Index) -> None:
        index, rows = self._index, len(edges) - 1
        view = memoryview(text)
        while view:
            view = view[os.write(index.text, view) :]
        index.ends[index.searched + 1 : index.searched + 1 + rows] = self._end + edges[1:]
        self._end += len(text)
        self._sign(text)
        index.searched += rows

    def _sign(self, text: bytes) -> None:
        """The bits of every block that is whole, with the three bytes after it that its last runs end in."""
        held = self._tail + text
        blocks = max(0, (len(held) - GRAM + 1) // BLOCK)
        if blocks:
            grams = grams_of(np.frombuffer(held, dtype=np.uint8)[: blocks * BLOCK + GRAM - 1])
            bits = np.zeros((blocks, BITS), dtype=np.bool_)
            bits.ravel()[grams + np.repeat(np.arange(blocks) * BITS, BLOCK)] = True
            self._publish(np.packbits(bits, axis=1))
        self._tail = held[blocks * BLOCK :]

    def _publish(self, signed: NDArray[np.uint8]) -> None:
        with self._grams_path.open("ab") as file:
            file.write(signed.data)
        index = self._index
        index.grams = _map_grams(self._grams_path)
        index.blocks += len(signed)

    def close(self) -> None:
        os.fsync(self._index.text)


def _map_grams(path: Path) -> NDArray[np.uint8]:
    if not path.stat().st_size:
        return np.empty((0, BITS // 8), dtype=np.uint8)
    return np.memmap(path, dtype=np.uint8, mode="r").reshape(-1, BITS // 8)


def _open(index: SplitIndex, folder: Path, *, has_text: bool) -> None:
    """An index that was made before."""
    for name, dtype in COLUMNS.items():
        index.columns[name] = _column(folder / f"{name}.npy", dtype, index.count)
    if has_text:
        index.ends = _column(folder / "ends.npy", "<i8", index.count + 1)
        index.text = os.open(folder / "text.bin", os.O_RDONLY | os.O_CLOEXEC)
        index.grams = _map_grams(folder / "grams.bin")
        index.blocks = len(index.grams)
        index.searched = index.count
    index.filtered = index.count


def _column(path: Path, dtype: str, count: int) -> NDArray[Any]:
    column: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    if column.dtype != np.dtype(dtype) or column.shape != (count,):
        raise DataError(f"{path}: is not what was written; remove {path.parent}, and it is made again")
    return column


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def columns_of(rows: Rows, source_of: NDArray[np.uint64]) -> dict[str, NDArray[Any]]:
    """For each row what it can be filtered by; the last of `source_of` is for what has no file."""
    spans, first = rows.spans, rows.first_span[rows.first_segment]
    length = spans["length"].astype(np.int64)
    trained = offsets(np.where(spans["weight"] > 0, length, 0))
    file = np.where(rows.origins["file"] == NO_FILE, len(source_of) - 1, rows.origins["file"])
    role = np.minimum(spans["role"], 7)
    return {
        "tokens": rows.lengths,
        "trained": trained[first[1:]] - trained[first[:-1]],
        "sources": _any(source_of[file], rows.first_segment),
        "rules": _any(np.uint32(1) << spans["rule"].astype(np.uint32), first),
        "roles": _any((np.uint8(1) << role).astype(np.uint8), first),
    }


def _any(bits: NDArray[Any], first: Index) -> NDArray[Any]:
    """All bits of each range together."""
    out = np.zeros(len(first) - 1, dtype=bits.dtype)
    full = first[1:] > first[:-1]
    if full.any():
        out[full] = np.bitwise_or.reduceat(bits, first[:-1][full])
    return out


def _source_bits(episodes: Episodes) -> NDArray[np.uint64]:
    """The bit of the source of each file, and none for what has no file."""
    number = {name: at for at, name in enumerate(sources_of(episodes))}
    bits = [1 << source_bit(number[file.source]) for file in episodes.files]
    return np.array([*bits, 0], dtype=np.uint64)
