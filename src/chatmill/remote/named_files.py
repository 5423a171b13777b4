"""Small files and folders that a user names, such as tokenizers: here, or at a URL, from which they are copied."""

from __future__ import annotations

from pathlib import Path

from chatmill.plain_file import JSON_LIMIT
from chatmill.remote.cache import local_copy
from chatmill.remote.urls import Url, place

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".h5", ".msgpack", ".npz")
"""Files of model folders that are not copied: they are large, and hold nothing that is read here."""
TOKENIZER_LIMIT = 1 << 30
"""Bytes that a file of a tokenizer may have."""
_copies: dict[Url, Path] = {}
"""The copies of this process: all of it uses one version of a file."""


def local_file(name: str | Path, *, limit: int = JSON_LIMIT) -> Path:
    """The path of a file or folder that a user named; of one at a URL, that of its copy in the cache.

    A file at a URL that has more than `limit` bytes is a `DataError`, and is not downloaded.
    """
    path = place(name)
    if isinstance(path, Path):
        return path
    if path not in _copies or not _copies[path].exists():
        _copies[path] = local_copy(path, leave_out=WEIGHTS, limit=limit)
    return _copies[path]


def copies_made() -> dict[Url, Path]:
    """The copies that this process made, for one that it starts."""
    return dict(_copies)


def use_copies(copies: dict[Url, Path]) -> None:
    """Use copies that another process made."""
    _copies.update(copies)


def given_name(path: Path) -> str:
    """A path as the user named it: of a copy, and of files in it, the URL, safe to print."""
    for url, copy in _copies.items():
        if path == copy or copy in path.parents:
            below = path.relative_to(copy).as_posix()
            return str(url if below == "." else url / below)
    return str(path)
