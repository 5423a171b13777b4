"""Small files and folders that a user names, such as tokenizers; those at a URL are copied to this machine."""

from __future__ import annotations

from pathlib import Path

from chatmill.plain_file import JSON_LIMIT
from chatmill.remote.cache import local_copy
from chatmill.remote.urls import Url, place

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".h5", ".msgpack", ".npz")
"""Extensions of files in model folders that are not copied, because they are large and not needed."""
TOKENIZER_LIMIT = 1 << 30
"""Maximum size of a tokenizer file in bytes."""
_copies: dict[Url, Path] = {}
"""The copies that this process made, so that it uses only one version of each file."""


def local_file(name: str | Path, *, limit: int = JSON_LIMIT) -> Path:
    """Return the path of a file or folder that a user named; for a URL, the path of its copy in the cache.

    Raises `DataError`, without downloading, if a file at a URL has more than `limit` bytes.
    """
    path = place(name)
    if isinstance(path, Path):
        return path
    if path not in _copies or not _copies[path].exists():
        _copies[path] = local_copy(path, leave_out=WEIGHTS, limit=limit)
    return _copies[path]


def copies_made() -> dict[Url, Path]:
    """Return the copies that this process made, to pass to a child process."""
    return dict(_copies)


def use_copies(copies: dict[Url, Path]) -> None:
    """Use copies that another process made."""
    _copies.update(copies)


def given_name(path: Path) -> str:
    """Return a path as the user gave it; for a copy or a file in it, return the URL, which is safe to print."""
    for url, copy in _copies.items():
        if path == copy or copy in path.parents:
            below = path.relative_to(copy).as_posix()
            return str(url if below == "." else url / below)
    return str(path)
