"""The one seam through which files are written: aside, synced, then renamed into place."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from chatmill.errors import DataError


def refuse_existing(path: Path, *, overwrite: bool) -> None:
    """Raise before any work is done for a file that may not be replaced."""
    if path.exists() and not overwrite:
        raise DataError(f"{path}: exists already; give another name, or --overwrite")


@contextmanager
def writing(path: Path, *, overwrite: bool = False) -> Iterator[BinaryIO]:
    """A file that appears whole when the block ends, and not at all if it fails or is killed before."""
    refuse_existing(path, overwrite=overwrite)
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with aside.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_file(path: Path, data: bytes, *, overwrite: bool = False) -> None:
    """The whole file or nothing: a kill at any moment leaves the old file, or none, or the new one."""
    with writing(path, overwrite=overwrite) as file:
        file.write(data)
