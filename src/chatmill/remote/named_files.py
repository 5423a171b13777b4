"""Resolve the paths and URLs of small files and folders, such as tokenizers, and copy remote files to a local cache."""

from __future__ import annotations

from pathlib import Path

from chatmill.plain_file import JSON_LIMIT
from chatmill.remote.cache import local_copy
from chatmill.remote.urls import Url, place

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".h5", ".msgpack", ".npz")
"""Extensions of large files in model folders, such as weights; these files are not copied."""
TOKENIZER_LIMIT = 1 << 30
"""Maximum size of a tokenizer file in bytes."""
_copies: dict[Url, Path] = {}
"""Local copies by URL, so that a process uses the same version of a remote file throughout."""


def local_file(name: str | Path, *, limit: int = JSON_LIMIT) -> Path:
    """Return the path of a file or folder; for a URL, return the path of a copy in the cache.

    Raise `DataError` if a remote file is larger than `limit` bytes.
    """
    path = place(name)
    if isinstance(path, Path):
        return path
    if path not in _copies or not _copies[path].exists():
        _copies[path] = local_copy(path, leave_out=WEIGHTS, limit=limit)
    return _copies[path]


def copies_made() -> dict[Url, Path]:
    """Return a dict that maps URLs to local copies, to pass to `use_copies` in a child process."""
    return dict(_copies)


def use_copies(copies: dict[Url, Path]) -> None:
    """Register local copies that another process made."""
    _copies.update(copies)


def given_name(path: Path) -> str:
    """Return a path as the user gave it; for a copy of a remote file, return the URL without secrets."""
    for url, copy in _copies.items():
        if path == copy or copy in path.parents:
            below = path.relative_to(copy).as_posix()
            return str(url if below == "." else url / below)
    return str(path)
