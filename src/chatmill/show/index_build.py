"""Build the search indexes of a dataset in a thread, and cache them on disk; the module `index` describes the files."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.errors import DataError, system_fault
from chatmill.load.source import DataSource
from chatmill.rows import NO_FILE, Index, Rows, offsets
from chatmill.show.dataset import DatasetView
from chatmill.show.index import BITS, BLOCK, COLUMNS, GRAM, SplitIndex, gram_hashes, source_bit, sources_of
from chatmill.show.text import PieceTable
from chatmill.store.episodes import Episodes

VERSION = 2
CHUNK = 1 << 20
"""Number of tokens to read at a time; small, so that building the index does not delay requests to the viewer."""


class IndexBuilder:
    """Builds the search indexes of a dataset in a thread, or opens cached indexes."""

    def __init__(self, view: DatasetView, cache: Path) -> None:
        self._view, self._cache = view, cache
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="index", daemon=True)
        self._delay = 0.0
        self.indexes = {split: SplitIndex(len(view.dataset[split])) for split in view.dataset.splits}

    def start(self, *, delay: float = 0) -> None:
        self._delay = delay
        self._thread.start()

    def wait(self) -> None:
        self._thread.join()

    def close(self) -> None:
        """Stop the thread and remove incomplete indexes."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def folder(self, split: str) -> Path:
        """Return the path of a split's cached index; its name is a hash of everything that determines the index."""
        tokenizer = self._view.tokenizer
        key = [VERSION, DataSource("", self._view.dataset).sha256, split, tokenizer and tokenizer.sha256]
        return self._cache / hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]

    def _run(self) -> None:
        if self._stop.wait(self._delay):
            return
        for split, index in self.indexes.items():
            try:
                if index.count:
                    self._open_or_build(self._view.dataset[split], index, self.folder(split))
            except Exception as error:
                # Record any error, so that the page displays it and the thread does not fail silently.
                fault = system_fault(error) if isinstance(error, OSError) else str(error)
                index.error = fault or type(error).__name__

    def _open_or_build(self, episodes: Episodes, index: SplitIndex, folder: Path) -> None:
        folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with folder.with_suffix(".lock").open("w") as lock:
            # A second viewer of the dataset waits until the first has built the index.
            while True:
                with suppress(OSError):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                if self._stop.wait(0.2):
                    return
            if (folder / "index.json").is_file():
                _open(index, folder, has_text=self._view.tokenizer is not None)
                return
            building = folder.with_suffix(".building")
            shutil.rmtree(building, ignore_errors=True)
            building.mkdir()
            try:
                if self._build(episodes, index, building):
                    # Write `index.json` last, so that an index with this file is complete.
                    (building / "index.json").write_text(json.dumps({"version": VERSION, "episodes": index.count}))
                    building.rename(folder)
            finally:
                shutil.rmtree(building, ignore_errors=True)

    def _build(self, episodes: Episodes, index: SplitIndex, folder: Path) -> bool:
        """Build the column index of all episodes, then the text index, which takes longer; return False if the thread
        is stopped.
        """
        index.columns = np.lib.format.open_memmap(folder / "columns.npy", "w+", COLUMNS, (index.count,))
        numbers = {name: number for number, name in enumerate(sources_of(episodes))}
        source_bits = np.array([*(source_bit(numbers[file.source]) for file in episodes.files), 0], dtype=np.uint64)
        for rows in episodes.sweep(tokens=CHUNK):
            if self._stop.is_set():
                return False
            index.columns[index.filtered : index.filtered + len(rows)] = columns_of(rows, source_bits)
            index.filtered += len(rows)
        return self._view.tokenizer is None or self._build_text(episodes, index, folder)

    def _build_text(self, episodes: Episodes, index: SplitIndex, folder: Path) -> bool:
        table, tail = PieceTable(self._view.text), b""
        index.ends = np.lib.format.open_memmap(folder / "ends.npy", "w+", np.dtype("<i8"), (index.count + 1,))
        with (
            open(folder / "text.bin", "xb", opener=lambda path, flags: os.open(path, flags, 0o600)) as text_file,
            (folder / "grams.bin").open("xb") as gram_file,
        ):
            index.text = os.open(folder / "text.bin", os.O_RDONLY)
            for rows in episodes.sweep(tokens=CHUNK):
                if self._stop.is_set():
                    return False
                text, start = table.folded(rows)
                text_file.write(text)
                text_file.flush()
                stop = index.searched + 1 + len(rows)
                index.ends[index.searched + 1 : stop] = index.ends[index.searched] + start[1:]
                # Set the bits of complete blocks; the last four-byte sequence of a block extends three bytes beyond
                # the block.
                tail += text
                blocks = max(0, (len(tail) - GRAM + 1) // BLOCK)
                if blocks:
                    gram_file.write(_gram_bits(tail[: blocks * BLOCK + GRAM - 1], blocks).data)
                    gram_file.flush()
                    index.grams = _map_grams(folder)
                tail = tail[blocks * BLOCK :]
                index.searched += len(rows)
            os.fsync(text_file.fileno())
        return True


def _open(index: SplitIndex, folder: Path, *, has_text: bool) -> None:
    index.columns = _array(folder / "columns.npy", COLUMNS, index.count)
    if has_text:
        index.ends = _array(folder / "ends.npy", np.dtype("<i8"), index.count + 1)
        index.text = os.open(folder / "text.bin", os.O_RDONLY)
        index.grams = _map_grams(folder)
        index.searched = index.count
    index.filtered = index.count


def _array(path: Path, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
    array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    if array.dtype != dtype or array.shape != (count,):
        raise DataError(f"{path}: is damaged; remove {path.parent} to rebuild it")
    return array


def _map_grams(folder: Path) -> NDArray[np.uint8]:
    path = folder / "grams.bin"
    bits = np.memmap(path, dtype=np.uint8, mode="r") if path.stat().st_size else np.empty(0, dtype=np.uint8)
    return bits.reshape(-1, BITS // 8)


def _gram_bits(text: bytes, blocks: int) -> NDArray[np.uint8]:
    """Return, for each block of the text, a bit set of the four-byte sequences that begin in the block."""
    bits = np.zeros((blocks, BITS), dtype=np.bool_)
    bits.ravel()[gram_hashes(text) + np.repeat(np.arange(blocks) * BITS, BLOCK)] = True
    return np.packbits(bits, axis=1)


def columns_of(rows: Rows, source_bits: NDArray[np.uint64]) -> NDArray[Any]:
    """Return the number of tokens and trained tokens of each row, and bit sets of its sources, rules and roles.

    `source_bits` contains the source bit of each file and, as its last entry, the value for rows without a file.
    """
    spans, first = rows.spans, rows.first_span[rows.first_segment]
    trained = offsets(np.where(spans["weight"] > 0, spans["length"], 0).astype(np.int64))
    file = np.where(rows.origins["file"] == NO_FILE, len(source_bits) - 1, rows.origins["file"])
    columns = np.zeros(len(rows), dtype=COLUMNS)
    columns["tokens"] = rows.lengths
    columns["trained"] = np.diff(trained[first])
    columns["sources"] = _united(source_bits[file], rows.first_segment)
    columns["rules"] = _united(np.uint32(1) << spans["rule"].astype(np.uint32), first)
    columns["roles"] = _united(np.uint8(1) << np.minimum(spans["role"], 7), first)
    return columns


def _united(bits: NDArray[Any], first: Index) -> NDArray[Any]:
    """Return the bitwise OR of `bits` over each range [first[i], first[i + 1])."""
    united = np.zeros(len(first) - 1, dtype=bits.dtype)
    full = first[1:] > first[:-1]
    if full.any():
        united[full] = np.bitwise_or.reduceat(bits, first[:-1][full])
    return united
