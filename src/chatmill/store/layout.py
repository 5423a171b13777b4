"""The names of the files in a dataset folder, and the binary format of each file. All numbers are little-endian.

DIR/dataset_metadata.json         written last: counts, size and sha256 of every file and of itself
DIR/tokenizer_state.json
DIR/removed.jsonl                 only if records were removed: each with its reason
DIR/train|val/shard_00000/
    tokens.bin     uint16, or uint32 if the vocabulary needs it
    mask.bin       uint8       1 where the weight of the span is above 0: a copy for other readers
    episodes.idx   EPISODE     start and length of each row, within the shard
    spans.bin      STORED_SPAN the span table, without targets
    origins.bin    SEGMENT     one per conversation: its row, its first span, its file and line
    targets.bin    TARGET      only if a span has a target other than its own tokens
"""

from __future__ import annotations

import mmap
import re
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from chatmill.remote.urls import Place
from chatmill.rows import Index, Part, Role, Rule, Table
from chatmill.store.mapped import MappedFile, mapped_file

METADATA = "dataset_metadata.json"
TOKENIZER_STATE = "tokenizer_state.json"
REMOVED = "removed.jsonl"
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
"""The index of a span within the shard, and its target."""
MASKS = np.dtype("u1")
COUNTS = {TOKENS: "num_tokens", MASK: "num_tokens", INDEX: "num_episodes", SPANS: "num_spans", ORIGINS: "num_segments"}
"""Maps each file of a shard except targets.bin to the metadata field that contains its number of records."""

NARROW = 2**16
WIDE = 2**32
SHARD_NAME = re.compile(r"shard_\d{5,}", re.ASCII)
UNKNOWN = {
    name: ~np.isin(np.arange(256), [int(code) for code in codes])
    for name, codes in (("role", Role), ("part", Part), ("rule", Rule))
}
"""For the fields role, part and rule: for each byte value from 0 to 255, whether the value is undefined."""
TOKEN_DTYPES: dict[str, np.dtype[np.unsignedinteger]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
"""Maps the names of the supported token dtypes to the dtypes."""


def token_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger]:
    """Return the narrowest unsigned integer dtype that can store every token id below `vocab_size`."""
    if not 0 < vocab_size <= WIDE:
        raise ValueError(f"vocab_size is {vocab_size}; expected 1 to {WIDE}")
    return np.dtype("<u2" if vocab_size <= NARROW else "<u4")


def shard_name(number: int) -> str:
    return f"shard_{number:05d}"


def record_dtypes(tokens: DTypeLike) -> dict[str, np.dtype[np.generic]]:
    """Return the numpy dtype of the records in each file of a shard."""
    dtypes = {MASK: MASKS, INDEX: EPISODE, SPANS: STORED_SPAN, ORIGINS: SEGMENT, TARGETS: TARGET}
    return {TOKENS: np.dtype(tokens), **dtypes}


@dataclass(frozen=True)
class Shard:
    """The location and size of a shard; `records` maps each of its files to the number of records in the file."""

    folder: Place
    num_episodes: int
    num_tokens: int
    dtype: np.dtype[np.unsignedinteger]
    records: Mapping[str, int]


def as_records(file: MappedFile, dtype: np.dtype[Any], count: int, start: int = 0) -> NDArray[Any]:
    """Return an array of `count` records of a memory-mapped file, starting at byte `start`. Records are read from disk
    on access.
    """
    array: NDArray[Any] = np.asarray(file)[start : start + count * dtype.itemsize].view(dtype)
    return array


def release(array: NDArray[Any]) -> None:
    """Free the memory used by a memory-mapped file; its pages are read from disk again on access."""
    if (file := mapped_file(array)) is not None:
        file.advise(mmap.MADV_DONTNEED)


def lower_bound(column: NDArray[Any], value: int, low: int = 0) -> int:
    """Return the first index from `low` on at which a sorted column has a value of at least `value`, in O(log n).

    `np.searchsorted` would first copy the whole column, because the columns of a structured array are not contiguous.
    """
    # Try the index `value` first: if each row is one conversation, a segment has the same index as its row.
    size = len(column)
    guess = low if value < low else size if value > size else value
    if (guess == size or column[guess] >= value) and (guess == low or column[guess - 1] < value):
        return guess
    return bisect_left(column, value, low)


def first_spans(origins: Table, segments: Index, end: int) -> Index:
    """Return the index of the first span of each segment, or `end` for a segment index past the last segment."""
    if not len(origins):
        return np.full(len(segments), end, dtype=np.int64)
    first = origins["first_span"][np.minimum(segments, len(origins) - 1)].astype(np.int64)
    return np.where(segments < len(origins), first, end)
