"""Create, write, sync and rename files; all of these operations go through `disk`.

Tests replace `disk` to record every operation, or to make an operation fail.
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
"""Number of bytes after which the operating system is told to start writing a file to disk."""
AT_FDCWD, RENAME_NOREPLACE, RENAME_EXCHANGE = -100, 1, 2
UNSUPPORTED = {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP}


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Add the path to an `OSError` that has no file name, such as "No space left on device"."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


class Disk:
    """All operations that the store uses to change files and folders."""

    def make_folder(self, path: Path) -> None:
        path.mkdir()

    def create(self, path: Path) -> int:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o666)

    def append(self, path: Path) -> int:
        return os.open(path, os.O_WRONLY | os.O_APPEND | getattr(os, "O_CLOEXEC", 0))

    def write(self, fd: int, data: Any) -> int:
        return os.write(fd, data)

    def close(self, fd: int) -> None:
        with suppress(InterruptedError):
            # An interrupted `close` has already closed the descriptor.
            os.close(fd)

    def hurry(self, fd: int, start: int, size: int) -> None:
        """Tell the system to start writing these bytes to disk, so that a later sync is faster."""
        if hasattr(os, "posix_fadvise"):
            # POSIX_FADV_DONTNEED starts writing dirty pages to disk.
            os.posix_fadvise(fd, start, size, os.POSIX_FADV_DONTNEED)

    def sync(self, path: Path) -> None:
        """Make the bytes of a file, or the entries of a folder, survive a power loss."""
        with _named(path):
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                self.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        """Rename a file or folder; a file that already has the new name is replaced."""
        source.replace(target)

    def rename_new(self, source: Path, target: Path) -> None:
        """Rename a file or folder; raise `FileExistsError` if the new name exists."""
        if not _renameat2(source, target, RENAME_NOREPLACE):
            if os.path.lexists(target):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
            source.rename(target)

    def link(self, source: Path, target: Path) -> None:
        """Create a hard link. Do not write to either file afterwards, because both share the same bytes."""
        os.link(source, target)

    def symlink(self, text: str, path: Path) -> None:
        path.symlink_to(text)

    def exchange(self, one: Path, other: Path) -> bool:
        """Exchange the names of two folders atomically; return False if the system does not support it."""
        return _renameat2(one, other, RENAME_EXCHANGE)

    def remove(self, path: Path) -> None:
        """Remove a file, a link, or an empty folder."""
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink()


disk = Disk()


def _renameat2(source: Path, target: Path, flag: int) -> bool:
    """Call Linux's `renameat2`; return False if the system or the file system does not support it."""
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
    """Raw file for `io.BufferedWriter` that writes through `disk`."""

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
    """Create a file and return a buffered writer; with `hurry`, the system is told to write the data to disk early."""
    return io.BufferedWriter(_Raw(path, hurry), BUFFER)


def real(path: Path) -> Path:
    """Resolve symbolic links in a path; unlike `Path.resolve`, raise no error for a loop of links."""
    return Path(os.path.realpath(path))


def make_folder(path: Path) -> None:
    """Create and sync a folder and its missing parents; do nothing if the folder exists."""
    if not local_path(path).is_dir():
        if path.parent != path:
            make_folder(path.parent)
        try:
            disk.make_folder(path)
        except FileExistsError:
            # Another process may have created the folder since the check.
            if not path.is_dir():
                raise
        disk.sync(path.parent)


def missing_folders(path: Path) -> list[Path]:
    """Return the folders that `make_folder` would create, innermost first."""
    return [each for each in (path, *path.parents) if not os.path.lexists(each)]


def remove_all(paths: Iterable[Path]) -> None:
    """Remove files and empty folders that this process created, ignoring errors."""
    for path in paths:
        with suppress(OSError):
            _remove_if_there(path)


def sync_tree(folder: Path) -> None:
    """Sync all files and folders in a folder, innermost first, and then the folder itself."""
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            sync_tree(path)
        else:
            disk.sync(path)
    disk.sync(folder)


def refuse_existing(path: Path, *, overwrite: bool, reads: Iterable[Place] = ()) -> None:
    """Raise `DataError` if a file cannot be created at `path`; call this function before any slow work.

    Links and devices are never replaced, even with `overwrite`. `reads` lists the files and folders that the command
    reads; the new file must not be one of these files or be inside one of these folders.
    """
    if local_path(path).is_dir():
        raise DataError(f"{path}: is a folder; expected the name of a file")
    for each in (read for read in reads if isinstance(read, Path)):
        if (path.exists() and each.exists() and path.samefile(each)) or real(each) in (real(path), *real(path).parents):
            raise DataError(f"{path}: is, or is inside, {each}, which the command reads; use another name")
    # Unlike `exists`, `lexists` also finds broken links.
    if os.path.lexists(path) and not overwrite:
        raise DataError(f"{path}: already exists; use another name or pass --overwrite")
    if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
        raise DataError(f"{path}: is a link or a device, which chatmill does not replace; use another file name")
    if not path.parent.is_dir():
        raise DataError(f"{path.parent}: no such folder; create it or use another folder")


@contextmanager
def writing(path: Path, *, overwrite: bool = False) -> Iterator[BinaryIO]:
    """Open a new file for writing; the file becomes visible only if the `with` block ends without an error."""
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
        what = "was created by another process in the meantime"
        raise DataError(f"{path}: {what}; use another name or pass --overwrite") from None


def _remove_if_there(path: Path) -> None:
    if os.path.lexists(path):
        disk.remove(path)


def write_file(path: Path, data: bytes, *, overwrite: bool = False) -> None:
    """Write a file atomically: if the process is killed, the file is either unchanged or completely written."""
    with writing(path, overwrite=overwrite) as file:
        file.write(data)
