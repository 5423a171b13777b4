"""Publish a finished build: sync everything, then rename it once, so that it exists whole or not at all."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from chatmill.errors import DataError
from chatmill.store import files
from chatmill.store.layout import METADATA


def staging_for(target: Path) -> Path:
    """The folder in which a dataset is built: next to its target, on the same file system."""
    return target.with_name(f".{target.name}.building")


def set_aside(target: Path) -> Path:
    """The temporary name of the old dataset on systems that cannot exchange two folders."""
    return target.with_name(f".{target.name}.replaced")


def check_target(target: Path, *, overwrite: bool, marker: str = METADATA) -> None:
    """Raise, before any work is done, if nothing can be published at `target`."""
    if target.is_symlink():
        raise DataError(f"{target}: a symbolic link; give the folder itself")
    if not target.exists():
        return
    if not overwrite:
        raise DataError(f"{target}: exists already; give another name, or --overwrite")
    if not (target / marker).is_file() and (not target.is_dir() or any(target.iterdir())):
        raise DataError(f"{target}: holds no {marker}, so that it is not replaced; remove it or give another name")


def publish(staging: Path, target: Path, *, overwrite: bool, marker: str = METADATA) -> None:
    """Sync all of `staging` and rename it to `target`; `marker` is the file that was written last.

    An existing target is refused, or with `overwrite` exchanged for the new one and then removed. When this returns,
    the new dataset survives a power loss.
    """
    if not (staging / marker).is_file():
        raise DataError(f"{staging}: has no {marker}; an unfinished build is not published")
    recover(target)
    check_target(target, overwrite=overwrite, marker=marker)
    files.sync_tree(staging)
    if not os.path.lexists(target):
        _move(staging, target)
    elif files.disk.exchange(staging, target):
        _sync_parents(target, staging)
        files.remove_tree(staging, first=marker)
    else:
        aside = set_aside(target)
        _move(target, aside)
        try:
            _move(staging, target)
        except BaseException:
            recover(target)
            raise
        files.remove_tree(aside, first=marker)


def recover(target: Path) -> None:
    """Undo a replacement that was killed between its two renames, or finish one that was killed after them."""
    aside = set_aside(target)
    if not aside.is_dir():
        return
    if os.path.lexists(target):
        files.remove_tree(aside)
    else:
        _move(aside, target)


def _move(source: Path, target: Path) -> None:
    try:
        files.disk.rename_new(source, target)
    except FileExistsError:
        raise DataError(f"{target}: appeared while the dataset was built; give another name, or --overwrite") from None
    _sync_parents(target, source)


def _sync_parents(*paths: Path) -> None:
    for parent in dict.fromkeys(path.parent for path in paths):
        files.disk.sync(parent)


@contextmanager
def building(target: Path, doing: str, *, overwrite: bool, marker: str, source: Path | None = None) -> Iterator[Path]:
    """A locked folder next to `target` to build in: published when the block ends, removed if it fails.

    What a killed process left there is removed first. `source` is what the block reads; the two must not overlap.
    """
    here, there = files.real(target), files.real(source or target)
    if here != there and (here in there.parents or there in here.parents):
        raise DataError(f"{target}: one of {target} and {source} lies in the other; write it somewhere else")
    recover(target)
    check_target(target, overwrite=overwrite, marker=marker)
    staging = target.with_name(f".{target.name}.{doing}")
    files.make_folder(staging)
    busy = f"{staging}: another process is building there; wait for it"
    with locked(staging, busy, opened=partial(os.open, staging, os.O_RDONLY)):
        try:
            for path in sorted(staging.iterdir()):
                files.remove_tree(path) if path.is_dir() else files.disk.remove(path)
            yield staging
            publish(staging, target, overwrite=overwrite, marker=marker)
        except BaseException:
            if staging.is_dir():
                files.remove_tree(staging, first=marker)
            raise


@contextmanager
def locked(path: Path, busy: str, *, opened: Callable[[], int], patience: float = 0) -> Iterator[None]:
    """Lock a file or folder that `opened` opens; the lock of a killed process is gone.

    While another process holds it, wait for `patience` seconds, and then raise `DataError` with `busy`.
    """
    until = time.monotonic() + patience
    while True:
        fd = opened()
        try:
            if _take_lock(fd, path):
                yield
                return
        finally:
            os.close(fd)
        if time.monotonic() >= until:
            raise DataError(busy)
        time.sleep(0.05)


def _take_lock(fd: int, path: Path) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    # The previous holder may have published or removed it after this process opened it.
    return path.exists() and os.path.samestat(os.fstat(fd), path.stat())
