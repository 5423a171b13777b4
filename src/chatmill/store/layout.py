"""The files of a dataset, and its shards as they are found on disk; all numbers are little-endian.

DIR/dataset_metadata.json         written last: counts, size and sha256 of every file and of itself
DIR/tokenizer_state.json
DIR/train|val/shard_00000/
    tokens.bin     uint16, or uint32 if the vocabulary needs it
    mask.bin       uint8       1 where the weight of the span is over 0: a copy for other readers
    episodes.idx   EPISODE     start and length of each row, within the shard
    spans.bin      STORED_SPAN the span table, without targets
    origins.bin    SEGMENT     one per conversation: its row, its first span, its file and line
    targets.bin    TARGET      only if a span has a target other than its own tokens
"""

from __future__ import annotations

import mmap
import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from chatmill.errors import DataError
from chatmill.rows import Index, Part, Role, Rule, Table
from chatmill.store.folder import OpenFolder
from chatmill.store.mapped import MappedFile, mapped_file, reading

METADATA = "dataset_metadata.json"
TOKENIZER_STATE = "tokenizer_state.json"
SPLITS = ("train", "val")

TOKENS = "tokens.bin"
MASK = "mask.bin"
INDEX = "episodes.idx"
SPANS = "spans.bin"
ORIGINS = "origins.bin"
TARGETS = "targets.bin"

EPISODE = np.dtype([("start", "<u8"), ("length", "<u8")])
STORED_SPAN = np.dtype(
    [("length", "<u4"), ("message", "<u4"), ("weight", "<f4"), ("role", "u1"), ("part", "u1"), ("rule", "u1")]
)
SEGMENT = np.dtype([("first_span", "<u8"), ("row", "<u8"), ("file", "<u4"), ("line", "<u8"), ("key", "<u8", (2,))])
TARGET = np.dtype([("span", "<u8"), ("target", "<u4")])
"""Spans that are trained to predict another id, in order of their number within the shard."""
MASKS = np.dtype("u1")
COUNTS = {TOKENS: "num_tokens", MASK: "num_tokens", INDEX: "num_episodes", SPANS: "num_spans", ORIGINS: "num_segments"}
"""The count of a shard that says how many records each of its files has; targets are not counted."""

NARROW = 2**16
WIDE = 2**32
SHARD_NAME = re.compile(r"shard_\d{5,}", re.ASCII)
UNKNOWN = {
    name: ~np.isin(np.arange(256), [int(code) for code in codes])
    for name, codes in (("role", Role), ("part", Part), ("rule", Rule))
}
"""For the role, part and rule of a span, whether each byte from 0 to 255 is no known value."""
WIDTHS: dict[int, np.dtype[np.unsignedinteger]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}


def token_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger]:
    """The narrowest type that holds every id below `vocab_size`."""
    if not 0 < vocab_size <= WIDE:
        raise ValueError(f"a vocabulary of {vocab_size} ids cannot be stored; 1 to {WIDE} can")
    return np.dtype("<u2" if vocab_size <= NARROW else "<u4")


def shard_name(number: int) -> str:
    return f"shard_{number:05d}"


def record_dtypes(tokens: DTypeLike) -> dict[str, np.dtype[np.generic]]:
    """The type of one record of every file of a shard."""
    dtypes = {MASK: MASKS, INDEX: EPISODE, SPANS: STORED_SPAN, ORIGINS: SEGMENT, TARGETS: TARGET}
    return {TOKENS: np.dtype(tokens), **dtypes}


@dataclass(frozen=True)
class Shard:
    """Where a shard is, and how many records each of its files has."""

    folder: Path
    num_episodes: int
    num_tokens: int
    dtype: np.dtype[np.unsignedinteger]
    records: Mapping[str, int]


def as_records(file: MappedFile, dtype: np.dtype[Any], count: int, start: int = 0) -> NDArray[Any]:
    """`count` records of a mapped file from the byte `start` on, read from disk when they are accessed."""
    array: NDArray[Any] = np.asarray(file)[start : start + count * dtype.itemsize].view(dtype)
    return array


def release(array: NDArray[Any]) -> None:
    """Free the memory of a mapped file; pages are read again when they are accessed."""
    if (file := mapped_file(array)) is not None:
        file.advise(mmap.MADV_DONTNEED)


def lower_bound(column: NDArray[Any], value: int, low: int = 0) -> int:
    """The first index from `low` on of a sorted column that is not below the value, in O(log n).

    `np.searchsorted` would first copy the whole column, because it is strided in the mapped file.
    """
    # Where each row is one conversation, the number of a row is that of its segment.
    size = len(column)
    guess = low if value < low else size if value > size else value
    if (guess == size or column[guess] >= value) and (guess == low or column[guess - 1] < value):
        return guess
    return bisect_left(column, value, low)


def first_spans(origins: Table, segments: Index, end: int) -> Index:
    """The first span of each segment; `end` for the number after the last segment."""
    if not len(origins):
        return np.full(len(segments), end, dtype=np.int64)
    first = origins["first_span"][np.minimum(segments, len(origins) - 1)].astype(np.int64)
    return np.where(segments < len(origins), first, end)


# Shards without metadata to check them.

OURS = (SPANS, ORIGINS, TARGETS)
"""Files of a shard that no other program writes."""


def split_folders(folder: OpenFolder) -> Iterator[Path]:
    """The folder of every split and of every shard that is there."""
    for split in (folder.path / name for name in SPLITS):
        yield split
        for name in folder.names(split):
            if name.startswith("shard_"):
                yield split / name


def trace_of_chatmill(folder: OpenFolder) -> Path | None:
    """A file that only chatmill writes, or that no dataset has without its metadata; None if there is none."""
    if folder.status(folder.path / METADATA) is None and folder.status(folder.path / TOKENIZER_STATE) is not None:
        return folder.path / TOKENIZER_STATE
    paths = (place / name for place in split_folders(folder) for name in OURS)
    return next((path for path in paths if folder.status(path) is not None), None)


def foreign_splits(folder: OpenFolder) -> dict[str, list[Shard]]:
    """The shards of every split; the width of tokens follows from the file sizes, which must fit exactly."""
    folders = {split: shards for split in SPLITS if (shards := _folders(folder, folder.path / split))}
    if "train" not in folders:
        raise DataError(f"{folder.path}: not a dataset; expected train/{INDEX} or train/{shard_name(0)}/{INDEX}")
    splits = {split: [_shard(folder, path) for path in shards] for split, shards in folders.items()}
    widths = {shard.dtype for shards in splits.values() for shard in shards if shard.num_tokens}
    if len(widths) > 1:
        raise DataError(f"{folder.path}: some shards hold tokens of 2 bytes and some of 4; expected one width")
    every = [shard for shards in splits.values() for shard in shards]
    masked = [shard for shard in every if MASK in shard.records]
    for shard in every:
        if masked and MASK not in shard.records:
            raise DataError(f"{shard.folder / MASK}: missing, and {masked[0].folder / MASK} is there; copy it again")
    return splits


def _folders(folder: OpenFolder, split: Path) -> list[Path]:
    """The folder itself if it is flat, otherwise its shards in order."""
    names = folder.names(split)
    shards = [split / name for name in names if name.startswith("shard_")]
    flat = INDEX in names
    if flat and shards:
        raise DataError(f"{split}: has {INDEX} and shards too; expected one of the two")
    for path in shards:
        if not SHARD_NAME.fullmatch(path.name):
            raise DataError(f"{path}: expected a name like {shard_name(0)}")
    shards.sort(key=lambda path: int(path.name.partition("_")[2]))
    for number, path in enumerate(shards):
        if path.name != shard_name(number):
            raise DataError(f"{split}: {shard_name(number)} is missing; shards are numbered from 0 without a gap")
    return [split] if flat else shards


def _shard(folder: OpenFolder, place: Path) -> Shard:
    index, tokens, mask = (place / name for name in (INDEX, TOKENS, MASK))
    for name in folder.names(place):
        if name not in (INDEX, TOKENS, MASK) and any(own in name for own in (INDEX, TOKENS, MASK)):
            raise DataError(f"{place / name}: a file that was not copied to its end; copy the dataset again")
    for path in (index, tokens, mask):
        if folder.status(path) is not None and not folder.is_file(path):
            raise DataError(f"{path}: not a file; copy the dataset again")
    if not folder.is_file(index):
        raise DataError(f"{index}: no such file; every shard has one, copy the dataset again")
    size = folder.stamps[index].size
    if size % EPISODE.itemsize:
        raise DataError(f"{index}: {size} bytes; expected pairs of 8-byte numbers")
    if not folder.is_file(tokens):
        raise DataError(f"{tokens}: no such file; expected the tokens of {INDEX}")
    bytes_ = folder.stamps[tokens].size
    with reading():
        entries = as_records(folder.map(index), EPISODE, folder.stamps[index].size // EPISODE.itemsize)
        # If the shard was written in order, the last episode ends it and no other entry is read.
        count = _end(entries[-1:])
        if bytes_ not in (2 * count, 4 * count):
            count = _end(entries)
    if bytes_ not in (2 * count, 4 * count):
        raise DataError(
            f"{tokens}: {bytes_} bytes; {INDEX} ends at token {count}, so expected {2 * count} or {4 * count}"
        )
    records = {INDEX: len(entries), TOKENS: count}
    if folder.is_file(mask):
        if folder.stamps[mask].size != count:
            raise DataError(f"{mask}: {folder.stamps[mask].size} bytes; expected {count}, one a token")
        records[MASK] = count
    return Shard(place, len(entries), count, WIDTHS[bytes_ // count if count else 2], records)


def _end(entries: Any) -> int:
    """The end of the episode that ends last."""
    if not len(entries):
        return 0
    furthest = int((entries["start"] + entries["length"]).argmax())
    start, length = entries[furthest].item()
    return int(start + length)
