"""The location and size limit of the cache of remote objects."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from chatmill.errors import UsageError, one_line
from chatmill.plain_file import local_path

FOLDER, SIZE = "CHATMILL_CACHE_DIR", "CHATMILL_CACHE_SIZE"
"""Environment variables that configure the cache; child processes inherit them."""
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
DEFAULT_SIZE = 64 * 10**9
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def configure(folder: str | None, size: int | str | None) -> None:
    """Set the folder and the maximum size of the cache for this process and its child processes. None leaves a setting
    unchanged.
    """
    if folder is not None:
        os.environ[FOLDER] = str(local_path(folder))
    if size is not None:
        os.environ[SIZE] = str(size)


def cache_size() -> int:
    text = os.environ.get(SIZE, "")
    return parse_size(text, SIZE) if text else DEFAULT_SIZE


def parse_size(text: str, name: str) -> int:
    """Parse a number of bytes, such as 500MB, 20GB, 1.5TB, 64GiB or 1000000."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *([kmgt]?i?)b?", text.strip().lower())
    size = int(float(match[1]) * UNITS[match[2]]) if match and match[2] in UNITS else 0
    if not size:
        raise UsageError(f"{name} is {one_line(repr(text))}; expected a number of bytes above 0, such as 20GB")
    return size


def cache_folder(parts: Sequence[str] = ("objects", "copies", "partial", "locks")) -> Path:
    """Create the cache folder with the subfolders `parts`, and return its path.

    Raise `UsageError` if other users can write to the cache folder.
    """
    named = os.environ.get(FOLDER)
    path = Path(named or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "chatmill")
    with suppress(RuntimeError):
        path = path.expanduser()
    try:
        path = path.absolute()
        path.parent.mkdir(parents=True, exist_ok=True)
        # The default folder may already exist and be group-writable, because other chatmill caches also use it.
        _check_own(path, may_change=not named)
        for name in parts:
            _check_own(path / name)
    except OSError as error:
        raise UsageError(
            f"{path}: cannot be used as the cache ({error.strerror}); set {FOLDER} to another folder"
        ) from None
    return path


def _check_own(path: Path, *, may_change: bool = False) -> None:
    """Create a folder if it does not exist; raise `UsageError` if other users can write to it.

    If `may_change` is true, remove the write permission of other users instead of raising the error.
    """
    try:
        status = path.lstat()
    except FileNotFoundError:
        path.mkdir(mode=0o700, exist_ok=True)
        status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        raise UsageError(f"{path}: the cache must not be a symbolic link; set {FOLDER} to the real folder")
    if not stat.S_ISDIR(status.st_mode):
        raise UsageError(f"{path}: the cache must be a folder; set {FOLDER} to a folder")
    if status.st_uid != os.geteuid():
        raise UsageError(f"{path}: the cache belongs to another user; set {FOLDER} to a folder that you own")
    if status.st_mode & OTHERS_WRITE and may_change:
        path.chmod(stat.S_IMODE(status.st_mode) & ~OTHERS_WRITE)
    elif status.st_mode & OTHERS_WRITE:
        raise UsageError(
            f"{path}: other users can write to the cache; run chmod go-w, or set {FOLDER} to another folder"
        )
