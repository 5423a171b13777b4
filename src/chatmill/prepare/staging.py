"""Staging: the rows of one unit in one file, written by whoever ran it and read once, in order.

    magic · size of the header · header (JSON) · arrays, each at a multiple of 64 bytes

A file has its name only when it is whole. It is not synced: after a loss of power the checksum decides.
"""

from __future__ import annotations

import json
import mmap
import os
import zlib
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.errors import DataError
from chatmill.rows import ORIGIN, SPAN, File, Index, Rows
from chatmill.store import files

MAGIC = b"chatmill rows 1\n"
ALIGN = 64


class Staged:
    """The rows of a unit, mapped; `record` says which of the unit's records each row was made from."""

    def __init__(self, path: Path, *, check: bool = False) -> None:
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise DataError(f"{path}: no staged rows; remove it, or build without --resume")
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
            base = _aligned(len(MAGIC) + 8 + size)
            if os.fstat(file.fileno()).st_size != base + header["size"]:
                raise DataError(f"{path}: staged rows are cut off; remove the file, or build without --resume")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if check and zlib.crc32(memoryview(self._map)[base:]) != header["crc32"]:
            raise DataError(f"{path}: staged rows are damaged; remove the file, or build without --resume")
        arrays = [
            np.frombuffer(self._map, dtype=dtype, count=count, offset=base + start)
            for dtype, (count, start) in zip((header["tokens"], *_DTYPES), header["arrays"], strict=True)
        ]
        self.ids = arrays[0]
        self._spans, self._first_span, self.origins, self._first_segment, self.record = arrays[1:]
        self._files = tuple(File(*names) for names in header["files"])
        self.extra: Any = header["extra"]

    def __len__(self) -> int:
        return len(self.record)

    @cached_property
    def rows(self) -> Rows:
        """All rows; narrow tokens are widened."""
        ids = self.ids.astype(np.uint32, copy=False)
        return Rows(ids, self._spans, self._first_span, self.origins, self._first_segment, self._files)

    def release(self) -> None:
        """Let go of the memory behind the map; what is asked for again is read again."""
        self._map.madvise(mmap.MADV_DONTNEED)


_DTYPES = (SPAN, np.dtype("<i8"), ORIGIN, np.dtype("<i8"), np.dtype("<i8"))


def save(path: Path, rows: Rows, record: Index, *, tokens: np.dtype[Any], extra: Any) -> None:
    """Write the rows of a unit; ids are narrowed to `tokens`, which must hold them."""
    arrays: list[NDArray[Any]] = [
        rows.ids.astype(tokens, copy=False),
        *(
            np.ascontiguousarray(array, dtype=dtype)
            for array, dtype in zip(
                (rows.spans, rows.first_span, rows.origins, rows.first_segment, record), _DTYPES, strict=True
            )
        ),
    ]
    places, size, crc = [], 0, 0
    for array in arrays:
        places.append((len(array), size))
        data = array.reshape(-1).view(np.uint8)
        crc = zlib.crc32(bytes(_aligned(size + data.nbytes) - size - data.nbytes), zlib.crc32(data.data, crc))
        size = _aligned(size + data.nbytes)
    header = json.dumps(
        {
            "tokens": np.dtype(tokens).str,
            "arrays": places,
            "files": rows.files,
            "size": size,
            "crc32": crc,
            "extra": extra,
        }
    ).encode()
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    with files.create(aside) as file:
        file.write(MAGIC + len(header).to_bytes(8, "little") + header)
        file.write(bytes(_aligned(len(MAGIC) + 8 + len(header)) - len(MAGIC) - 8 - len(header)))
        for array in arrays:
            data = array.reshape(-1).view(np.uint8)
            file.write(data.data)
            file.write(bytes(_aligned(data.nbytes) - data.nbytes))
    files.disk.rename(aside, path)


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN
