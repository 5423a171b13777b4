"""Staged files: the fitted rows of a unit, written by the worker that made them and read in order by the assembly.

    magic · crc32 of all that follows · size of the header · header (JSON) · arrays, each at a multiple of 64 bytes

A file gets its name when it is complete. It is not synced: after a power loss the checksum tells whether it is intact.
"""

from __future__ import annotations

import json
import mmap
import os
import uuid
import zlib
from contextlib import suppress
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.errors import DataError
from chatmill.rows import ORIGIN, SPAN, File, Index, Rows, offsets
from chatmill.store import files

MAGIC = b"chatmill rows 3\n"
"""Its number rises when the same input gives other rows: units that an older version left are made again."""
PREFIX = len(MAGIC) + 16
ALIGN = 64
PART = ".part"
"""The suffix of a file that is not complete yet."""

_LONG = np.dtype("<i8")
_DTYPES = (SPAN, _LONG, _LONG, ORIGIN, _LONG)


class Staged:
    """A memory-mapped staged file of rows of one conversation each; `record` is the index of the record of each row.

    `lines_before` is the number of lines before the unit in its input file; the unit numbers its own from 1. A map
    holds a file descriptor, so only some are open at a time.
    """

    def __init__(self, path: Path, *, lines_before: int = 0, check: bool = False) -> None:
        with path.open("rb") as file:
            prefix = file.read(PREFIX)
            if len(prefix) < PREFIX or not prefix.startswith(MAGIC):
                raise DataError(f"{path}: no staged rows; build without --resume")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        crc, size = np.frombuffer(prefix, dtype="<u8", offset=len(MAGIC)).tolist()
        if check and zlib.crc32(memoryview(self._map)[PREFIX - 8 :]) != crc:
            raise DataError(f"{path}: staged rows are damaged; build without --resume")
        header = json.loads(self._map[PREFIX : PREFIX + size])
        base = _aligned(PREFIX + size)
        dtypes = (np.dtype(header["tokens"]), *_DTYPES)
        arrays = [
            np.frombuffer(self._map, dtype=dtype, count=count, offset=base + start)
            for dtype, (count, start) in zip(dtypes, header["arrays"], strict=True)
        ]
        self.ids = arrays[0]
        self.spans, self.first_span, self.row_start, self.origins, self.record = arrays[1:]
        if lines_before:
            self.origins = self.origins.copy()
            self.origins["line"] += lines_before
        self.files = tuple(File(*names) for names in header["files"])
        self.extra: Any = header["extra"]

    def __len__(self) -> int:
        return len(self.record)

    def rows(self) -> Rows:
        """All rows; narrow tokens are widened."""
        ids = self.ids.astype(np.uint32, copy=False)
        each = np.arange(len(self) + 1, dtype=np.int64)
        return Rows(ids, self.spans, self.first_span, self.origins, each, self.files)

    def release(self) -> None:
        """Free the memory of the map; pages are read again when they are accessed."""
        self._map.madvise(mmap.MADV_DONTNEED)


def save(path: Path, rows: Rows, record: Index, *, tokens: np.dtype[Any], extra: Any) -> None:
    """Write rows of one conversation each; ids are narrowed to `tokens`, which must hold them."""
    columns = (rows.spans, rows.first_span, rows.row_start, rows.origins, record)
    arrays: list[NDArray[Any]] = [
        rows.ids.astype(tokens, copy=False),
        *(np.ascontiguousarray(column, dtype=dtype) for column, dtype in zip(columns, _DTYPES, strict=True)),
    ]
    start = offsets(np.array([_aligned(array.nbytes) for array in arrays])).tolist()
    places = [(len(array), at) for array, at in zip(arrays, start[:-1], strict=True)]
    names = {"tokens": np.dtype(tokens).str, "arrays": places, "files": rows.files, "extra": extra}
    header = json.dumps(names).encode()
    size = len(header).to_bytes(8, "little")
    pieces: list[Any] = [size, header, bytes(_aligned(PREFIX + len(header)) - PREFIX - len(header))]
    for array in arrays:
        pieces += [array.reshape(-1).view(np.uint8).data, bytes(_aligned(array.nbytes) - array.nbytes)]
    crc = reduce(lambda crc, piece: zlib.crc32(piece, crc), pieces, 0)
    # A unique name: a unit may run twice at the same time, on two machines.
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex}{PART}")
    try:
        with files.create(aside) as file:
            file.writelines([MAGIC, crc.to_bytes(8, "little"), *pieces])
        files.disk.rename(aside, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(aside)  # noqa: PTH108
        raise


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN
