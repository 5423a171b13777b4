"""Tensors in files, whole or in runs of rows, so that any number of ranks can write and any other number read them.

Files are safetensors. Where a tensor is in pieces, the header says for each which row it begins with and how many
rows there are.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from chatmill.errors import DataError
from chatmill.store import files

DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64", torch.uint8: "U8"}
KINDS = {name: dtype for dtype, name in DTYPES.items()}
PIECES = "pieces"
"""The key of a file's own metadata under which its pieces are."""


class TensorRows(NamedTuple):
    """Some rows of a tensor: `start` is the first, `rows` how many the tensor has."""

    start: int
    rows: int


class TensorEntry(NamedTuple):
    """What a file is to hold under a name; its values are asked for when they are written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    piece: TensorRows | None = None
    """None if it is the whole tensor."""


class FileHash(NamedTuple):
    size: int
    sha256: str


def write_tensors(path: Path, entries: Sequence[TensorEntry], values: Iterator[Tensor]) -> FileHash:
    """A safetensors file of these entries, one tensor in memory at a time; not synced."""
    header: dict[str, Any] = {
        "__metadata__": {PIECES: json.dumps({entry.name: entry.piece for entry in entries if entry.piece})}
    }
    at = 0
    for entry in entries:
        size = _num_bytes(entry)
        header[entry.name] = {
            "dtype": DTYPES[entry.dtype],
            "shape": entry.shape,
            "data_offsets": [at, at + size],
        }
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest, total = hashlib.sha256(), 0
    with files.create(path) as file:

        def put(data: Any) -> None:
            nonlocal total
            digest.update(data)
            file.write(data)
            total += len(data)

        put(len(text).to_bytes(8, "little"))
        put(text)
        for entry, value in zip(entries, values, strict=True):
            if tuple(value.shape) != entry.shape or value.dtype != entry.dtype:
                raise ValueError(f"{entry.name}: {tuple(value.shape)} {value.dtype}; the header says {entry}")
            put(_bytes(value))
    return FileHash(total, digest.hexdigest())


def _num_bytes(entry: TensorEntry) -> int:
    size = entry.dtype.itemsize
    for length in entry.shape:
        size *= length
    return size


def _bytes(value: Tensor) -> memoryview:
    flat = value.detach().to("cpu").contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())


def file_info(path: Path) -> FileHash:
    """Size and hash of a file as it lies there."""
    with path.open("rb") as file:
        return FileHash(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


class ShardedTensors:
    """The tensors of several files, by name and rows."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._places: dict[str, list[tuple[TensorRows, Any]]] = {}
        for path in paths:
            try:
                file: Any = safe_open(path, framework="pt")
                pieces = json.loads((file.metadata() or {}).get(PIECES, "{}"))
            except (OSError, SafetensorError, ValueError, RecursionError) as error:
                raise DataError(f"{path}: cannot be read ({error}); go on from another checkpoint") from None
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                part = file.get_slice(name)
                piece = TensorRows(*pieces[name]) if name in pieces else TensorRows(0, *part.get_shape()[:1] or [1])
                self._places.setdefault(name, []).append((piece, part))

    @property
    def names(self) -> set[str]:
        return set(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        piece, part = self._places[name][0]
        shape = part.get_shape()
        return (piece.rows, *shape[1:]) if shape else ()

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Some rows of a tensor; a scalar is read as it is."""
        places = sorted(self._places[name], key=lambda place: place[0].start)
        _, part = places[0]
        if not part.get_shape():
            return part[...]
        # Of no rows: a rank may hold none of a short tensor.
        found = [torch.empty(0, *part.get_shape()[1:], dtype=KINDS[part.get_dtype()])]
        for piece, part in places:
            first, last = (min(max(edge - piece.start, 0), part.get_shape()[0]) for edge in (start, stop))
            if first < last:
                found.append(part[first:last])
        together = torch.cat(found)
        if len(together) != stop - start:
            raise DataError(f"{name}: rows {start} to {stop} are not all there; the checkpoint lacks a file")
        return together


def named(tensors: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Tensors of several kinds under one name each: kind/name."""
    return {f"{kind}/{name}": tensor for kind, group in tensors.items() for name, tensor in group.items()}
