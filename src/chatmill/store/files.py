"""All operations that change files go through `disk`: create, write, sync, rename.

Tests replace `disk` by one that records every operation, fails, or stops at one.
"""

from __future__ import annotations

import ctypes
import errno
import io
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from chatmill.errors import DataError
from chatmill.plain_file import local_path
from chatmill.remote.urls import Place

BUFFER = 1 << 20
HURRY = 1 << 22
"""Bytes of a file after which the system is told to begin writing them."""
AT_FDCWD, RENAME_NOREPLACE, RENAME_EXCHANGE = -100, 1, 2
UNSUPPORTED = {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP}


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """An error of the system about a descriptor, such as a full disk, is reported with the name of its file."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


class Disk:
    """The operations. Nothing in the store changes a file or folder in any other way."""

    def make_folder(self, path: Path) -> None:
        path.mkdir()

    def create(self, path: Path) -> int:
        """A new, empty file, open for writing."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o666)

    def append(self, path: Path) -> int:
        """An existing file, open for writing at its end."""
        return os.open(path, os.O_WRONLY | os.O_APPEND | getattr(os, "O_CLOEXEC", 0))

    def write(self, fd: int, data: Any) -> int:
        return os.write(fd, data)

    def close(self, fd: int) -> None:
        with suppress(InterruptedError):
            # It is closed all the same.
            os.close(fd)

    def hurry(self, fd: int, start: int, size: int) -> None:
        """Have the system begin to write these bytes without waiting, so that a later sync has less to do."""
        if hasattr(os, "posix_fadvise"):
            # The advice is that they are not needed soon; the system starts writing those that are not on disk yet.
            os.posix_fadvise(fd, start, size, os.POSIX_FADV_DONTNEED)

    def sync(self, path: Path) -> None:
        """Make the bytes of a file, or the names in a folder, survive a power loss."""
        with _named(path):
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                self.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        """Rename a file or folder; an existing file of that name is replaced."""
        source.replace(target)

    def rename_new(self, source: Path, target: Path) -> None:
        """Rename a file or folder to a new name; `FileExistsError` if it exists."""
        if not _renameat2(source, target, RENAME_NOREPLACE):
            if os.path.lexists(target):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
            source.rename(target)

    def link(self, source: Path, target: Path) -> None:
        """Make a hard link. Neither name may be written to afterwards, since both share their bytes."""
        os.link(source, target)

    def symlink(self, text: str, path: Path) -> None:
        """Make a symbolic link to this target."""
        path.symlink_to(text)

    def exchange(self, one: Path, other: Path) -> bool:
        """Exchange the names of two folders atomically; False where the system cannot."""
        return _renameat2(one, other, RENAME_EXCHANGE)

    def remove(self, path: Path) -> None:
        """Remove a file, a link, or an empty folder."""
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink()


disk = Disk()


def _renameat2(source: Path, target: Path, flag: int) -> bool:
    """`renameat2` of Linux; False where the system or the file system does not have it."""
    try:
        call: Callable[..., int] = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    if call(AT_FDCWD, os.fsencode(source), AT_FDCWD, os.fsencode(target), ctypes.c_uint(flag)) == 0:
        return True
    code = ctypes.get_errno()
    if code in UNSUPPORTED:
        return False
    raise OSError(code, os.strerror(code), str(source), None, str(target))


class _Raw(io.RawIOBase):
    """A raw file for `io.BufferedWriter` that writes through `disk`."""

    def __init__(self, path: Path, hurry: bool) -> None:
        self._fd = -1
        self._path, self._hurry = path, hurry
        self._written = self._hurried = 0
        self._fd = disk.create(path)

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        with _named(self._path):
            count = disk.write(self._fd, data)
            self._written += count
            if self._hurry and self._written - self._hurried >= HURRY:
                disk.hurry(self._fd, self._hurried, self._written - self._hurried)
                self._hurried = self._written
            return count

    def close(self) -> None:
        if not self.closed:
            super().close()
            if self._fd >= 0:
                with _named(self._path):
                    disk.close(self._fd)


def create(path: Path, *, hurry: bool = False) -> BinaryIO:
    """A new buffered file, not synced; with `hurry` the system begins to write its bytes early."""
    return io.BufferedWriter(_Raw(path, hurry), BUFFER)


def real(path: Path) -> Path:
    """The path with links resolved; a cycle of links is no error here, but when it is opened."""
    return Path(os.path.realpath(path))


def make_folder(path: Path) -> None:
    """Create a folder and its parents and sync them; nothing is done if it exists."""
    if not local_path(path).is_dir():
        if path.parent != path:
            make_folder(path.parent)
        disk.make_folder(path)
        disk.sync(path.parent)


def missing_folders(path: Path) -> list[Path]:
    """The folders that `make_folder` would make, innermost first."""
    return [each for each in (path, *path.parents) if not os.path.lexists(each)]


def remove_all(paths: Iterable[Path]) -> None:
    """Remove what this process has just made: files, and folders that are empty. What cannot be removed stays."""
    for path in paths:
        with suppress(OSError):
            _remove_if_there(path)


def sync_tree(folder: Path) -> None:
    """Sync every file of a folder and the folders themselves, innermost first."""
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            sync_tree(path)
        else:
            disk.sync(path)
    disk.sync(folder)


def refuse_existing(path: Path, *, overwrite: bool, reads: Iterable[Place] = ()) -> None:
    """Raise, before any work is done, if a file must not be replaced or has no parent folder.

    Whatever `overwrite` says, it must not be one of the files that the command `reads`, nor lie in a folder that it
    reads, and what is replaced is a file: no link, no device.
    """
    if local_path(path).is_dir():
        raise DataError(f"{path}: is a folder; expected the name of a file")
    for each in (read for read in reads if isinstance(read, Path)):
        if (path.exists() and each.exists() and path.samefile(each)) or real(each) in (real(path), *real(path).parents):
            raise DataError(f"{path}: would replace {each}, which is read, or lie in it; give another name")
    # A broken link would be replaced as well.
    if os.path.lexists(path) and not overwrite:
        raise DataError(f"{path}: exists already; give another name, or --overwrite")
    if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
        raise DataError(f"{path}: a link or a device, so that it is not replaced; give the name of a file")
    if not path.parent.is_dir():
        raise DataError(f"{path.parent}: no such folder; make it, or name another")


@contextmanager
def writing(path: Path, *, overwrite: bool = False) -> Iterator[BinaryIO]:
    """A file that appears complete when the block ends, and not at all if it fails or is killed."""
    refuse_existing(path, overwrite=overwrite)
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    _remove_if_there(aside)
    try:
        with create(aside) as file:
            yield file
            file.flush()
            disk.sync(aside)
        if overwrite:
            disk.rename(aside, path)
        else:
            _rename_new(aside, path)
    except BaseException:
        _remove_if_there(aside)
        raise
    disk.sync(path.parent)


def _rename_new(source: Path, path: Path) -> None:
    try:
        disk.rename_new(source, path)
    except FileExistsError:
        raise DataError(f"{path}: appeared while it was written; give another name, or --overwrite") from None


def _remove_if_there(path: Path) -> None:
    if os.path.lexists(path):
        disk.remove(path)


def write_file(path: Path, data: bytes, *, overwrite: bool = False) -> None:
    """Write a file atomically: a kill at any moment leaves the old file, none, or the new one."""
    with writing(path, overwrite=overwrite) as file:
        file.write(data)
