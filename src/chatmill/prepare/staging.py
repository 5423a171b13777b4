"""Staged files, in which workers store the fitted rows of a unit until the shards of the dataset are written.

    magic · crc32 of the following bytes · size of the header · header (JSON) · arrays, each at a multiple of 64 bytes

Each file starts with its *head*: the header and all arrays except tokens and spans. Shards are planned from the heads
alone.

A staged file is renamed to its final name when it is complete. The file is not synced to disk; after a power loss, its
checksum shows whether it is intact. In an object store, a staged file becomes visible only when it is complete.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import uuid
import zlib
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property, reduce
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from chatmill.errors import DataError
from chatmill.remote import objects
from chatmill.remote.urls import Place, Url
from chatmill.rows import ORIGIN, SPAN, File, Index, Rows, Table, offsets
from chatmill.store import files

MAGIC = b"chatmill rows 6\n"
"""The version increases when the same input gives different rows or another digest of the bytes that were read, so that
earlier staged files are not reused.
"""
PREFIX = len(MAGIC) + 16
ALIGN = 64
FIRST_READ = 1 << 16
"""Size, in bytes, of the first request for an object; larger than most headers."""
PART = ".part"
"""Suffix of an incomplete file."""

_LONG = np.dtype("<i8")
_HEAD = (_LONG, _LONG, ORIGIN, _LONG, _LONG)
NO_COLUMNS: Mapping[str, NDArray[Any]] = {}
NAMES = ("first_span", "row_start", "origins", "record", "trained", "ids", "spans")


class StagedHead:
    """Everything in a staged file except tokens and spans; every row contains one conversation.

    For each row, `record` is the index of its record and `trained` the number of its trained tokens. `lines_before` is
    the number of lines before the unit in its input file, and is added to the line numbers of the origins.
    """

    def __init__(self, source: Path | bytes | mmap.mmap, *, lines_before: int = 0) -> None:
        self._data: Any = _mapped(source) if isinstance(source, Path) else source
        size = _header_size(self._data)
        header = json.loads(self._data[PREFIX : PREFIX + size])
        self._base = _aligned(PREFIX + size)
        self._places = dict(zip(NAMES, header["arrays"], strict=True))
        self._dtypes = dict(zip(NAMES, (*_HEAD, np.dtype(header["tokens"]), SPAN), strict=True))
        self.first_span, self.row_start, self._origins, self.record, self.trained = map(self._array, NAMES[:-2])
        self._lines_before = lines_before
        for name, dtype, place in header["columns"]:
            self._places[name], self._dtypes[name] = place, _dtype(dtype)
        self.columns = {name: self._array(name) for name, *_ in header["columns"]}
        """Additional arrays, which only some jobs need."""
        self.files = tuple(File(*names) for names in header["files"])
        self.extra: Any = header["extra"]

    def __len__(self) -> int:
        return len(self.record)

    @cached_property
    def origins(self) -> Table:
        """The origin of each row, with line numbers in the whole input file."""
        if not self._lines_before:
            return self._origins
        origins = self._origins.copy()
        origins["line"] += self._lines_before
        return origins

    @property
    def key(self) -> NDArray[np.uint64]:
        """The record key of each row."""
        return cast(NDArray[np.uint64], self._origins["key"])

    @property
    def file(self) -> NDArray[np.uint32]:
        """The input file of each row, as an index into `files`."""
        return cast(NDArray[np.uint32], self._origins["file"])

    def _array(self, name: str) -> NDArray[Any]:
        count, start = self._places[name]
        dtype = self._dtypes[name]
        items = count * math.prod(dtype.shape)
        return np.frombuffer(self._data, dtype.base, items, self._base + start).reshape(count, *dtype.shape)

    def bytes_of(self, name: str, start: int = 0, stop: int | None = None) -> tuple[int, int]:
        """Return the start and stop, in bytes, of items [start, stop) of an array in the staged file."""
        count, begin = self._places[name]
        size = self._dtypes[name].itemsize
        at = self._base + begin
        return at + start * size, at + (count if stop is None else stop) * size

    @property
    def token_dtype(self) -> np.dtype[Any]:
        dtype: np.dtype[Any] = self._dtypes["ids"]
        return dtype

    @property
    def head_size(self) -> int:
        """Size of the head in bytes; the token ids follow the head."""
        return self.bytes_of("ids")[0]


class Staged(StagedHead):
    """A memory-mapped staged file."""

    def __init__(self, path: Path, *, lines_before: int = 0, check: bool = False) -> None:
        data = _mapped(path)
        crc = int.from_bytes(data[len(MAGIC) : len(MAGIC) + 8], "little")
        if check and zlib.crc32(memoryview(data)[PREFIX - 8 :]) != crc:
            raise DataError(f"{path}: staged rows are damaged; build without --resume")
        super().__init__(data, lines_before=lines_before)
        self.ids, self.spans = self._array("ids"), self._array("spans")

    def rows(self) -> Rows:
        ids = self.ids.astype(np.uint32, copy=False)
        each = np.arange(len(self) + 1, dtype=np.int64)
        return Rows(ids, self.spans, self.first_span, self.origins, each, self.files)

    def release(self) -> None:
        """Release the memory of the mapped pages, which are read from the file again on access."""
        self._data.madvise(mmap.MADV_DONTNEED)


def _mapped(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        prefix = file.read(PREFIX)
        if len(prefix) < PREFIX or not prefix.startswith(MAGIC):
            raise DataError(f"{path}: is not a file of staged rows; build without --resume")
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _header_size(data: Any) -> int:
    return int.from_bytes(data[PREFIX - 8 : PREFIX], "little")


def read_head(url: Url) -> bytes:
    """Download the head of a staged file; raise `DataError` if the file does not exist."""
    data = objects.read(url, 0, FIRST_READ)
    if not data.startswith(MAGIC) or len(data) < PREFIX:
        raise DataError(f"{url}: is not a file of staged rows; build without --resume")
    stop = PREFIX + _header_size(data)
    data += objects.read(url, len(data), stop)
    places = json.loads(data[PREFIX:stop])["arrays"]
    size = _aligned(stop) + places[NAMES.index("ids")][1]
    return data[:size] + objects.read(url, len(data), size)


def save(
    place: Place,
    rows: Rows,
    record: Index,
    *,
    tokens: np.dtype[Any],
    extra: Any,
    columns: Mapping[str, NDArray[Any]] = NO_COLUMNS,
) -> bytes:
    """Write rows to a staged file; each row must contain one conversation, and `tokens` is the dtype of the token ids.

    `columns` maps names to additional arrays to store. If `place` is a URL, return the bytes of the head, so that the
    caller does not have to download them.
    """
    head = (rows.first_span, rows.row_start, rows.origins, record, trained_of_rows(rows))
    arrays: list[NDArray[Any]] = [
        *(np.ascontiguousarray(column, dtype=dtype) for column, dtype in zip(head, _HEAD, strict=True)),
        *map(np.ascontiguousarray, columns.values()),
        rows.ids.astype(tokens, copy=False),
        np.ascontiguousarray(rows.spans, dtype=SPAN),
    ]
    start = offsets(np.array([_aligned(array.nbytes) for array in arrays])).tolist()
    places = [(len(array), at) for array, at in zip(arrays, start[:-1], strict=True)]
    further = places[len(_HEAD) : -2]
    names = {
        "tokens": np.dtype(tokens).str,
        "arrays": places[: len(_HEAD)] + places[-2:],
        "columns": [
            (name, _description(array), at) for (name, array), at in zip(columns.items(), further, strict=True)
        ],
        "files": rows.files,
        "extra": extra,
    }
    header = json.dumps(names).encode()
    size = len(header).to_bytes(8, "little")
    pieces: list[Any] = [size, header, bytes(_aligned(PREFIX + len(header)) - PREFIX - len(header))]
    for array in arrays:
        pieces += [array.reshape(-1).view(np.uint8).data, bytes(_aligned(array.nbytes) - array.nbytes)]
    crc = reduce(lambda crc, piece: zlib.crc32(piece, crc), pieces, 0)
    pieces = [MAGIC, crc.to_bytes(8, "little"), *pieces]
    if isinstance(place, Url):
        data = b"".join(pieces)
        objects.write(place, data)
        return data[: StagedHead(data).head_size]
    # Use a unique name: a unit may run twice at the same time, on two machines.
    aside = place.with_name(f".{place.name}.{uuid.uuid4().hex}{PART}")
    try:
        with files.create(aside) as file:
            file.writelines(pieces)
        files.disk.rename(aside, place)
    except BaseException:
        with suppress(OSError):
            os.unlink(aside)  # noqa: PTH108
        raise
    return b""


def _description(array: NDArray[Any]) -> Any:
    """Return the dtype and item shape of an array as JSON values."""
    return [array.dtype.descr if array.dtype.names else array.dtype.str, array.shape[1:]]


def _dtype(description: Any) -> np.dtype[Any]:
    kind, shape = description
    return np.dtype(([tuple(field) for field in kind] if isinstance(kind, list) else kind, tuple(shape)))


def trained_of_rows(rows: Rows) -> Index:
    spans = rows.spans
    before = offsets(np.where(spans["weight"] > 0, spans["length"], 0))[rows.first_span]
    return np.diff(before)


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN
