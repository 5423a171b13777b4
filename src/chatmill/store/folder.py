"""Read all files of a dataset from the same version of its folder, even if the folder is replaced during the read.

A dataset is replaced by swapping its folder for another folder. While a dataset is being opened, `OpenFolder` reads all
files through a file descriptor of the folder. Later, `StoredFiles` memory-maps files on demand: each time, it opens the
folder again and checks that the dataset was not replaced. `StoredFiles` compares the inode number of the metadata file,
and keeps this file mapped, because the inode number of a mapped file is not reused.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

from chatmill.errors import DataError
from chatmill.plain_file import local_path
from chatmill.remote.urls import Place
from chatmill.store.mapped import MappedFile

T = TypeVar("T")
ATTEMPTS = 100
"""Maximum number of attempts to open a folder that is being replaced."""
READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC
GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)


class Stamp(NamedTuple):
    """The fields of an `os.stat` result that change when a file is replaced or modified."""

    device: int
    inode: int
    size: int
    modified: int

    @classmethod
    def of(cls, status: os.stat_result) -> Self:
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


class OpenFolder:
    """A folder that is kept open by a file descriptor. The methods accept paths that start with the folder's path."""

    def __init__(self, path: Path, absolute: Path | None = None) -> None:
        """`absolute` is the absolute path of the folder, which stays valid if the working directory changes."""
        self.path = path
        self.absolute = path.absolute() if absolute is None else absolute
        self.stamps: dict[Place, Stamp] = {}
        """The `Stamp` of each file whose status was read."""
        self.digests: dict[Place, str] = {}
        """The sha256 of each file that was read completely."""
        self._prefix = len(str(path / "x")) - 1
        self._fd = os.open(self.absolute, READ_FLAGS | os.O_DIRECTORY)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._fd)

    def status(self, path: Place) -> os.stat_result | None:
        """Return the `os.stat` result of a file or folder, or None if it does not exist."""
        try:
            status = os.stat(self._name(path), dir_fd=self._fd)
        except OSError as error:
            if error.errno in GONE:
                return None
            raise
        self.stamps[path] = Stamp.of(status)
        return status

    def is_file(self, path: Place) -> bool:
        status = self.status(path)
        return status is not None and stat.S_ISREG(status.st_mode)

    def names(self, path: Place) -> list[str]:
        """Return the sorted names of the files and subfolders in a folder, or an empty list if it is not a folder."""
        try:
            fd = os.open(self._name(path), READ_FLAGS | os.O_DIRECTORY, dir_fd=self._fd)
        except OSError as error:
            if error.errno in GONE:
                return []
            raise
        try:
            return sorted(os.listdir(fd))  # noqa: PTH208
        finally:
            os.close(fd)

    def open(self, path: Place) -> int:
        """Open a file for reading and return its descriptor; raise `OSError` if it is missing or not a regular file."""
        # Without O_NONBLOCK, opening a pipe that has no writer would block.
        fd = os.open(self._name(path), READ_FLAGS | os.O_NONBLOCK, dir_fd=self._fd)
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            os.close(fd)
            code = errno.EISDIR if stat.S_ISDIR(status.st_mode) else errno.ENXIO
            raise OSError(code, os.strerror(code), str(path))
        self.stamps[path] = Stamp.of(status)
        return fd

    def read(self, path: Place) -> bytes:
        with os.fdopen(self.open(path), "rb") as file:
            data = file.read()
        self.digests[path] = hashlib.sha256(data).hexdigest()
        return data

    def map(self, path: Place) -> MappedFile:
        fd = self.open(path)
        try:
            return MappedFile(fd, path, self.absolute / self._name(path))
        finally:
            os.close(fd)

    def was_replaced(self) -> bool:
        """Return whether the path now refers to another folder, or no longer exists."""
        try:
            return not os.path.samestat(os.fstat(self._fd), self.absolute.stat())
        except OSError:
            return True

    def _name(self, path: Place) -> str:
        return str(path)[self._prefix :]


def in_folder(path: Path, expected: str, work: Callable[[OpenFolder], T]) -> T:
    """Open a folder and return the result of `work(folder)`; raise `DataError` if the folder does not exist.

    If `work` fails because the folder was replaced, `work` is called again with the new folder. `expected` describes
    the folder in the error message.
    """
    for _ in range(ATTEMPTS):
        try:
            folder = OpenFolder(local_path(path))
        except (OSError, ValueError) as error:
            # A ValueError means that the name contains a null character.
            if isinstance(error, OSError) and error.errno not in GONE:
                raise _unreadable(path, error) from None
            raise DataError(f"{path}: no such folder; expected {expected}") from None
        with folder:
            try:
                return work(folder)
            except DataError:
                if not folder.was_replaced():
                    raise
            except OSError as error:
                if not folder.was_replaced():
                    raise _unreadable(path, error) from None
    raise DataError(f"{path}: was replaced {ATTEMPTS} times while it was being opened; try again later")


def _unreadable(path: Place, error: OSError) -> DataError:
    return DataError(f"{path}: cannot be read ({error.strerror}{': ' if error.filename else ''}{error.filename or ''})")


class StoredFiles:
    """The files of an open dataset or cache, in the version that was opened; files are memory-mapped on demand."""

    def __init__(self, folder: OpenFolder, marker: Place) -> None:
        """`marker` is the file that identifies the dataset: its metadata or, if it has no metadata, its first index."""
        self.path = folder.path
        self._absolute = folder.absolute
        self._marker = marker
        self._stamps = dict(folder.stamps)
        self._digest = folder.digests.get(marker)
        self._held: MappedFile | None = folder.map(marker)
        if folder.stamps[marker] != self._stamps[marker]:
            raise self._replaced()

    def __contains__(self, path: Place) -> bool:
        """Whether the file existed when the dataset was opened."""
        return path in self._stamps

    def is_same(self, path: Place, link: Path) -> bool:
        """Whether `link` is a hard link to the file that existed when the dataset was opened."""
        return Stamp.of(link.stat()) == self._stamps[path]

    def map(self, path: Place) -> MappedFile:
        """Memory-map a file; raise `DataError` if it is not the file that existed when the dataset was opened.

        Raise `MemoryError` if the system cannot create another memory map.
        """
        return self._opened_again(path, lambda folder: folder.map(path))

    def read(self, path: Place) -> bytes:
        """Return all bytes of a file; raise `DataError` if the file has changed since the dataset was opened."""
        return self._opened_again(path, lambda folder: folder.read(path))

    def last_eviction(self) -> int:
        """Return 0: files of a local dataset are never evicted."""
        return 0

    def _opened_again(self, path: Place, work: Callable[[OpenFolder], T]) -> T:
        if path not in self._stamps:
            raise DataError(f"{path}: did not exist when the dataset was opened")
        try:
            with OpenFolder(self.path, self._absolute) as folder:
                self._check(folder)
                value = work(folder)
        except (FileNotFoundError, NotADirectoryError):
            raise self._replaced() from None
        except OSError as error:
            if error.errno == errno.ENOMEM:
                raise MemoryError from None
            raise _unreadable(path, error) from None
        if folder.stamps[path][2:] != self._stamps[path][2:]:
            raise DataError(f"{path}: was changed after the dataset was opened; run chatmill verify {self.path} --full")
        return value

    def _check(self, folder: OpenFolder) -> None:
        """Raise `DataError` if the dataset in `folder` is not the dataset that was opened."""
        there = folder.status(self._marker) is not None
        same = there and folder.stamps[self._marker] == self._stamps[self._marker]
        if there and self._held is None:
            # After unpickling, the inode number may differ or be reused, so compare the content of the metadata.
            if self._digest is not None:
                folder.read(self._marker)
                same = folder.digests[self._marker] == self._digest
            self._held = folder.map(self._marker)
            if same and folder.stamps[self._marker] != self._stamps[self._marker]:
                self._stamps = {path: folder.stamps[path] for path in self._stamps if folder.status(path) is not None}
        if not same:
            raise self._replaced()

    def _replaced(self) -> DataError:
        return DataError(f"{self.path}: was replaced while it was being read; open it again")

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle, without the memory map; an unpickled object checks the folder for changes."""
        return {**vars(self), "_held": None}
