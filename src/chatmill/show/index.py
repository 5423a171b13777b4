"""The index of a split, for the filters and the search of the viewer: built once, in a thread, and cached on disk.

    columns.npy  a record for each episode: tokens, trained tokens, and a bit set each of sources, rules and roles
    text.bin     the folded text of all episodes, each followed by END
    ends.npy     the offset of each episode in the text, and the end of the last
    grams.bin    for each block of the text a bit for every hashed run of four bytes that begins in it: a search reads
                 only blocks that have all runs of the query

It can be used while it is built, and then covers the first `filtered` and the first `searched` episodes.

Why not SQLite FTS5: a query of one character takes 20 times as long (100,000 episodes, 33 MB of text, 2 ARM cores: 9 ms
here, 150 to 240 ms there; two characters: 95 and 140 to 305 ms), building takes 2.7 to 8 times as long, and the trigram
tokenizer ignores text behind a NUL and is missing from SQLite before 3.34.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.errors import DataError, system_fault
from chatmill.load.source import DataSource
from chatmill.rows import NO_FILE, Index, Rows, offsets
from chatmill.show.dataset import DatasetView
from chatmill.show.text import PieceTable
from chatmill.store.episodes import Episodes

VERSION = 2
COLUMNS = np.dtype([("tokens", "<u8"), ("trained", "<u8"), ("sources", "<u8"), ("rules", "<u4"), ("roles", "u1")])
MAX_SOURCES = 64
"""Sources that have a bit of their own; any further ones share the last."""
BLOCK = 1 << 15
GRAM = 4
BITS = 1 << 15
READ = 1 << 20
"""Bytes of text that a search reads at a time."""
CHUNK = 1 << 20
"""Tokens that building reads at a time: few, because requests are answered meanwhile."""


@dataclass(frozen=True)
class Filter:
    """Which episodes to list. Bit sets name what must all occur; 0 and None do not filter."""

    roles: int = 0
    rules: int = 0
    sources: int = 0
    least: int | None = None
    """Tokens."""
    most: int | None = None
    share_from: float | None = None
    """Of the tokens, those that are trained."""
    share_to: float | None = None


class SearchHits(NamedTuple):
    episodes: list[int]
    after: int
    """The episode to continue from."""
    ended: bool
    """Everything indexed was searched."""


class SplitIndex:
    """The index of one split, possibly still being built."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.filtered = 0
        """Episodes whose columns are known."""
        self.searched = 0
        """Episodes whose text is known."""
        self.error: str | None = None
        # The builder sets these, or extends what they hold, and then raises the counts.
        self.columns: NDArray[Any] = np.empty(0, dtype=COLUMNS)
        self.ends: Index = np.zeros(1, dtype=np.int64)
        self.text = -1
        """The file descriptor of the text."""
        self.grams: NDArray[np.uint8] = np.empty((0, BITS // 8), dtype=np.uint8)

    def mask(self, wanted: Filter) -> NDArray[np.bool_]:
        """Which of the first `filtered` episodes pass the filter."""
        columns = self.columns[: self.filtered]
        kept = np.ones(len(columns), dtype=np.bool_)
        for name in ("roles", "rules", "sources"):
            if bits := getattr(wanted, name):
                kept &= columns[name] & bits == bits
        tokens = columns["tokens"]
        share = columns["trained"] / np.maximum(tokens, 1)
        for values, least, most in ((tokens, wanted.least, wanted.most), (share, wanted.share_from, wanted.share_to)):
            if least is not None:
                kept &= values >= least
            if most is not None:
                kept &= values <= most
        return kept

    def search(
        self, query: bytes, start: int, limit: int, *, kept: NDArray[np.bool_] | None = None, seconds: float = 0.3
    ) -> SearchHits:
        """Up to `limit` episodes from `start` on that contain a folded query and are `kept`; takes about `seconds`."""
        deadline, hits, begun = monotonic() + seconds, list[int](), start
        # Read once, as the builder may raise it meanwhile.
        searched = self.searched
        ends = self.ends[: searched + 1]
        if start >= searched:
            return SearchHits(hits, start, ended=True)
        for first, last in self._ranges(query, int(ends[start]), int(ends[searched])):
            # The last hit may have led past the beginning of this range.
            at = max(first, int(ends[start]))
            text = os.pread(self.text, last + len(query) - 1 - at, at) if at < last else b""
            place = text.find(query)
            while 0 <= place < last - at:
                episode = int(np.searchsorted(ends, at + place, side="right")) - 1
                start = episode + 1
                if kept is None or (episode < len(kept) and kept[episode]):
                    hits.append(episode)
                    if len(hits) == limit:
                        return SearchHits(hits, start, ended=start >= searched)
                place = text.find(query, int(ends[start]) - at)
            # The next call continues at an episode, so at least one whole episode must have been searched.
            reached = max(start, int(np.searchsorted(ends, last, side="right")) - 1)
            if monotonic() > deadline and reached > begun:
                return SearchHits(hits, reached, ended=reached >= searched)
        return SearchHits(hits, searched, ended=True)

    def _ranges(self, query: bytes, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Ranges of the text in which the query may begin, in order, each of at most READ bytes."""
        first, last = start // BLOCK, -(-stop // BLOCK)
        grams = self.grams[first:last]
        candidate = np.ones(last - first, dtype=np.bool_)
        if len(query) >= GRAM and len(grams):
            for gram in np.unique(gram_hashes(query)).tolist():
                has_gram = grams[:, gram // 8] & (128 >> gram % 8) != 0
                # A query that begins in a block may end in the next one.
                has_gram[:-1] |= has_gram[1:]
                has_gram[-1] = True
                candidate[: len(grams)] &= has_gram
        edges = np.flatnonzero(np.diff(candidate, prepend=False, append=False)) + first
        for begin, end in edges.reshape(-1, 2).tolist():
            end_byte = min(stop, end * BLOCK)
            for at in range(max(start, begin * BLOCK), end_byte, READ):
                yield at, min(at + READ, end_byte)


def source_bit(source: int) -> int:
    return 1 << min(source, MAX_SOURCES - 1)


def sources_of(episodes: Episodes) -> list[str]:
    """The names of the sources of a split, in order of first use."""
    return list(dict.fromkeys(file.source for file in episodes.files))


def gram_hashes(text: bytes) -> Index:
    """The bit of each run of four bytes."""
    wide = np.frombuffer(text, dtype=np.uint8).astype(np.uint32)
    runs = wide[:-3] | wide[1:-2] << np.uint32(8) | wide[2:-1] << np.uint32(16) | wide[3:] << np.uint32(24)
    hashes: Index = (runs * np.uint32(0x9E3779B1) >> np.uint32(33 - BITS.bit_length())).astype(np.int64)
    return hashes


# Building.


class IndexBuilder:
    """Builds the indexes of a dataset in a thread, or opens those built before."""

    def __init__(self, view: DatasetView, cache: Path) -> None:
        self._view, self._cache = view, cache
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="index", daemon=True)
        self._delay = 0.0
        self.indexes = {split: SplitIndex(len(view.dataset[split])) for split in view.dataset.splits}

    def start(self, *, delay: float = 0) -> None:
        """Start the thread, which waits for `delay` seconds first."""
        self._delay = delay
        self._thread.start()

    def wait(self) -> None:
        self._thread.join()

    def close(self) -> None:
        """Stop, and remove what is incomplete."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def folder(self, split: str) -> Path:
        """Where the index of a split is cached, named by everything that determines it."""
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
                # The thread must not die silently: the page displays the error.
                fault = system_fault(error) if isinstance(error, OSError) else str(error)
                index.error = fault or type(error).__name__

    def _open_or_build(self, episodes: Episodes, index: SplitIndex, folder: Path) -> None:
        folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with folder.with_suffix(".lock").open("w") as lock:
            # A second viewer of the same dataset waits, and then opens what the first one built.
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
                    # Written last: an index that has it is complete.
                    (building / "index.json").write_text(json.dumps({"version": VERSION, "episodes": index.count}))
                    building.rename(folder)
            finally:
                shutil.rmtree(building, ignore_errors=True)

    def _build(self, episodes: Episodes, index: SplitIndex, folder: Path) -> bool:
        """The columns of all episodes first, because they are quick; then the text. False if stopped."""
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
                # Bits of the blocks that are complete, with the three bytes that their last runs end in.
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
    """Open an index that was built before."""
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
        raise DataError(f"{path}: is not what was written; remove {path.parent}, and it is made again")
    return array


def _map_grams(folder: Path) -> NDArray[np.uint8]:
    path = folder / "grams.bin"
    bits = np.memmap(path, dtype=np.uint8, mode="r") if path.stat().st_size else np.empty(0, dtype=np.uint8)
    return bits.reshape(-1, BITS // 8)


def _gram_bits(text: bytes, blocks: int) -> NDArray[np.uint8]:
    """For each block of the text, the bits of the runs that begin in it."""
    bits = np.zeros((blocks, BITS), dtype=np.bool_)
    bits.ravel()[gram_hashes(text) + np.repeat(np.arange(blocks) * BITS, BLOCK)] = True
    return np.packbits(bits, axis=1)


def columns_of(rows: Rows, source_bits: NDArray[np.uint64]) -> NDArray[Any]:
    """The record of each row. `source_bits` has the bit of each file's source, and last what has no file."""
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
    """The union of the bit sets of each range."""
    united = np.zeros(len(first) - 1, dtype=bits.dtype)
    full = first[1:] > first[:-1]
    if full.any():
        united[full] = np.bitwise_or.reduceat(bits, first[:-1][full])
    return united
