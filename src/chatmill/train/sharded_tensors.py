"""Write and read tensors in safetensors files, either whole or split into ranges of rows. Any number of ranks can write
or read the files.

For each partial tensor, the file header records the first row and the number of rows in the whole tensor.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from chatmill.errors import DataError, one_line
from chatmill.plain_file import open_plain
from chatmill.store.hashed import FileInfo, HashedFile
from chatmill.train.model_files import INDEX, WEIGHTS, ModelFiles, TensorInfo, read_config, read_header

DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64", torch.uint8: "U8"}
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}
Rows: TypeAlias = Any
"""A tensor in memory or in a safetensors file; `rows[start:stop]` returns a range of its rows."""
PARTS = "pieces"
"""The key in the file metadata that lists the partial tensors."""


class TensorRows(NamedTuple):
    """The first row of a partial tensor, and the number of rows in the whole tensor."""

    start: int
    rows: int


class TensorEntry(NamedTuple):
    """Name, shape and dtype of one tensor in a file; the values are supplied when the file is written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    rows: TensorRows | None = None
    """The rows of the tensor that the file contains; None if the file contains the whole tensor."""


def write_tensors(
    path: Path, entries: Sequence[TensorEntry], values: Iterator[Tensor], *, metadata: Mapping[str, str] | None = None
) -> FileInfo:
    """Write a safetensors file, with one tensor in memory at a time. The file is not synced to disk.

    `metadata` is written to the file header; by default, the header lists the partial tensors.
    """
    parts = {PARTS: json.dumps({entry.name: entry.rows for entry in entries if entry.rows})}
    header: dict[str, Any] = {"__metadata__": parts if metadata is None else metadata}
    at = 0
    for entry in entries:
        size = entry.dtype.itemsize * math.prod(entry.shape)
        header[entry.name] = {"dtype": DTYPES[entry.dtype], "shape": entry.shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with HashedFile(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for entry in entries:
            # Do not keep a reference to a tensor while the next tensor is computed.
            file.write(_bytes(next(values), entry))
    return file.info()


def _bytes(value: Tensor, entry: TensorEntry) -> memoryview:
    if tuple(value.shape) != entry.shape or value.dtype != entry.dtype:
        raise ValueError(f"{entry.name}: is {tuple(value.shape)} {value.dtype}, but the file header has {entry}")
    return memoryview(value.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy())


def file_info(path: Path) -> FileInfo:
    with open_plain(path) as file:
        return FileInfo(os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest())


class ShardedTensors:
    """Tensors stored in several files, accessed by name and range of rows."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._parts: dict[str, list[tuple[TensorRows, Any]]] = {}
        for path in paths:
            header = read_header(path)
            try:
                file: Any = safe_open(path, framework="pt")
                partial = json.loads((file.metadata() or {}).get(PARTS, "{}"))
                rows = {name: _rows(header[name], partial.get(name)) for name in header}
            except (
                OSError,
                SafetensorError,
                AttributeError,
                LookupError,
                TypeError,
                ValueError,
                RuntimeError,
            ) as error:
                # torch raises RuntimeError if it cannot map the file. RecursionError, for deeply nested JSON, is also a
                # RuntimeError.
                reason = one_line(str(error), 300)
                raise DataError(f"{path}: cannot be read ({reason}); resume from another checkpoint") from None
            for name in header:
                self._parts.setdefault(name, []).append((rows[name], file.get_slice(name)))
        for name, parts in self._parts.items():
            if len({(part.get_dtype(), *part.get_shape()[1:], whole.rows) for whole, part in parts}) > 1:
                raise DataError(f"{paths[0].parent}: the parts of {one_line(name, 200)} differ in dtype or shape")

    @property
    def names(self) -> set[str]:
        return set(self._parts)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the whole tensor."""
        rows, part = self._parts[name][0]
        shape = part.get_shape()
        return (rows.rows, *shape[1:]) if shape else ()

    def dtype(self, name: str) -> torch.dtype:
        _, part = self._parts[name][0]
        return TORCH_DTYPES[part.get_dtype()]

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Read rows `start` to `stop` of a tensor; a scalar tensor is read whole."""
        parts = sorted(self._parts[name], key=lambda part: part[0].start)
        _, first_part = parts[0]
        if not first_part.get_shape():
            return first_part[...]
        # Start with an empty tensor, because a rank may have no rows of a short tensor.
        slices, at = [torch.empty(0, *first_part.get_shape()[1:], dtype=TORCH_DTYPES[first_part.get_dtype()])], start
        for rows, part in parts:
            first, last = (min(max(edge - rows.start, 0), part.get_shape()[0]) for edge in (at, stop))
            if first < last and rows.start + first == at:
                slices.append(part[first:last])
                at += last - first
        if at < stop:
            raise DataError(
                f"{name}: rows {start} to {stop} are incomplete, because a file of the checkpoint is missing"
            )
        return torch.cat(slices)


def _rows(tensor: TensorInfo, stored: Any) -> TensorRows:
    """Return which rows of the whole tensor a file contains. `stored` is the entry of the tensor in the file metadata,
    or None for a whole tensor.
    """
    if tensor.dtype not in TORCH_DTYPES:
        raise ValueError(f"unsupported dtype {tensor.dtype}")
    if stored is None:
        return TensorRows(0, *tensor.shape[:1] or [1])
    start, rows = stored
    if not all(type(number) is int for number in (start, rows)) or not 0 <= start <= start + tensor.shape[0] <= rows:
        raise ValueError(f"invalid row range {stored}")
    return TensorRows(start, rows)


@contextmanager
def open_weights(files: ModelFiles) -> Iterator[Callable[[str], Rows]]:
    """Yield a function that opens a tensor of a model folder by name. The weight files are memory-mapped."""
    folder = files.folder
    listed = {} if (folder / WEIGHTS).exists() else read_config(folder / INDEX)["weight_map"]
    with ExitStack() as stack:
        opened: dict[str, Any] = {}

        def rows(name: str) -> Rows:
            file = listed.get(name, WEIGHTS)
            try:
                if file not in opened:
                    opened[file] = stack.enter_context(safe_open(folder / file, framework="pt"))
                return opened[file].get_slice(name)
            except (OSError, SafetensorError, RuntimeError) as error:
                reason = one_line(str(error), 200)
                raise DataError(f"{folder / file}: cannot be read ({reason}); save the model again") from None

        yield rows
