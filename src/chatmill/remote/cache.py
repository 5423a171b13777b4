"""A cache of remote objects in local files, shared by all processes on a machine.

    $CHATMILL_CACHE_DIR         default: $XDG_CACHE_HOME/chatmill or ~/.cache/chatmill
      objects/<sha256>          a completely downloaded object with this hash
      copies/<key>/<name>       a copy of a file or folder, such as a tokenizer; the key depends on its content
      partial/, locks/          downloads in progress, and a lock for each download
      evicted                   an empty file whose modification time is the time of the last eviction

An object is downloaded to a temporary file, hashed, and then renamed, so a killed download never leaves an incomplete
object. If several processes need an object, one of them downloads it and the others wait. When the cache exceeds
$CHATMILL_CACHE_SIZE, the objects with the oldest access times are removed. After a download is verified, the
modification time of the file is set to a number computed from its hash. A file with any other modification time is
hashed again before use.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

from chatmill.errors import DataError
from chatmill.remote.cache_settings import FOLDER, cache_folder, cache_size
from chatmill.remote.download import ordered_pieces
from chatmill.remote.objects import ObjectInfo, RemoteError, find, missing, names_below, read, shown
from chatmill.remote.urls import Url

EVICTED = "evicted"
COPY_AGE = 24 * 3600
"""Seconds to keep a copy after its last use, because a process may still be reading it."""
COPY_FILES = 10_000
"""Maximum number of objects in a folder that is copied."""
FULL = (errno.ENOSPC, errno.EDQUOT)


class DownloadStoppedError(Exception):
    """Raised if the caller stops a download."""


_held: set[int] = set()
"""File descriptors of the locks that this process holds. A forked process closes its inherited descriptors."""


def fetch(url: Url, *, size: int, sha256: str, is_stopped: Callable[[], bool] = lambda: False) -> Path:
    """Return the path of an object in the cache; download the object if it is not in the cache.

    Another process may evict the file at any time; use `open_object` to open an object safely. Raise
    `DownloadStoppedError` if `is_stopped` returns true during the download.
    """
    folder, path = cache_folder(), cached_path(sha256)
    if not _is_whole(path, size, sha256):
        with _locked(folder, sha256):
            if not _is_whole(path, size, sha256):
                _download(url, size, sha256, path, is_stopped)
    _touch(path)
    return path


def open_object(url: Url, *, size: int, sha256: str) -> int:
    """Download an object to the cache if necessary, and return a file descriptor for reading it."""
    while True:
        path = fetch(url, size=size, sha256=sha256)
        # If the file was evicted before it could be opened, download it again.
        with suppress(FileNotFoundError):
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def cached_path(sha256: str) -> Path:
    """Return the path at which the cache stores the object with this hash."""
    return cache_folder() / "objects" / sha256


def last_eviction() -> int:
    """Return the time of the last eviction in nanoseconds, or 0 if nothing was evicted."""
    try:
        return (cache_folder() / EVICTED).stat().st_mtime_ns
    except FileNotFoundError:
        return 0


# Check and download a single object.


def _is_whole(path: Path, size: int, sha256: str) -> bool:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    if not stat.S_ISREG(status.st_mode) or status.st_size != size:
        return False
    if status.st_mtime == _mark(sha256):
        return True
    try:
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
                return False
        os.utime(path, (time.time(), _mark(sha256)))
    except FileNotFoundError:
        return False
    return True


def _mark(sha256: str) -> int:
    """Return the modification time of a verified object: a time before 1979, so that no new file has it by chance."""
    return int(sha256[:7], 16)


def _touch(path: Path) -> None:
    with suppress(OSError):
        os.utime(path, (time.time(), path.stat().st_mtime))


def _download(url: Url, size: int, sha256: str, path: Path, is_stopped: Callable[[], bool]) -> None:
    """Download an object to `path`, and verify its hash; the caller must hold the object's lock."""
    partial = path.parents[1] / "partial" / sha256
    try:
        # Retry once if the data was damaged in transit or the disk was full.
        for is_last in (False, True):
            try:
                _make_room(path.parents[1], size, partial)
                digest = _write(url, size, partial, is_stopped)
            except OSError as error:
                if error.errno not in FULL:
                    raise
                partial.unlink(missing_ok=True)
                if is_last or not _evict(path.parents[1], size):
                    raise DataError(
                        f"{path.parents[1]}: the disk is full, but {shown(url)} needs {size:,} bytes; "
                        f"free some space, or set {FOLDER} to a folder on another disk"
                    ) from None
                continue
            if digest == sha256:
                os.utime(partial, (time.time(), _mark(sha256)))
                partial.replace(path)
                return
        raise RemoteError(
            f"{shown(url)}: the sha256 is {digest[:12]}…, but the dataset records {sha256[:12]}…, "
            "so the object was changed or damaged; upload the dataset again"
        )
    finally:
        partial.unlink(missing_ok=True)


def _write(url: Url, size: int, partial: Path, is_stopped: Callable[[], bool]) -> str:
    """Download an object to the file `partial`, and return the sha256 of its bytes."""
    digest, written = hashlib.sha256(), 0
    with partial.open("r+b") as file:
        for piece in ordered_pieces(url, size):
            if is_stopped():
                raise DownloadStoppedError
            digest.update(piece)
            file.write(piece)
            written += len(piece)
        if written != size:
            raise RemoteError(
                f"{shown(url)}: is {written:,} bytes, but the dataset records {size:,}; upload the dataset again"
            )
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


# Locks that processes use to coordinate downloads and evictions.


@contextmanager
def _locked(folder: Path, name: str) -> Iterator[None]:
    """Hold the lock with this name during the `with` block. The operating system releases the lock if the process is
    killed.
    """
    path = folder / "locks" / name
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        _held.add(fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), path.stat()):
                    break
        except BaseException:
            _release(fd)
            raise
        # The previous holder of the lock removed the lock file, so try again with a new file.
        _release(fd)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        _release(fd)


def _release(fd: int) -> None:
    _held.discard(fd)
    # Unlock explicitly, because a forked process may have inherited the descriptor and would keep the lock.
    with suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def _after_fork() -> None:
    for fd in _held:
        with suppress(OSError):
            os.close(fd)
    _held.clear()


os.register_at_fork(after_in_child=_after_fork)


# Eviction of the least recently used files.


def _make_room(folder: Path, size: int, partial: Path) -> None:
    """Evict files until the cache has room for `size` more bytes, and reserve this space with the file `partial`."""
    with _locked(folder, "room"):
        over = sum(used for _, used, _ in _contents(folder)) + size - cache_size()
        if over > 0:
            _remove_oldest(folder, over)
        with partial.open("wb") as file:
            # The sparse file has the final size, so that other processes count the full size during the download.
            file.truncate(size)


def _evict(folder: Path, size: int) -> bool:
    """Try to evict at least `size` bytes of files; return whether any file was evicted."""
    with _locked(folder, "room"):
        return _remove_oldest(folder, size)


def _remove_oldest(folder: Path, size: int) -> bool:
    now, removed = time.time(), 0
    for used_at, used, path in sorted(_contents(folder)):
        if removed >= size:
            break
        if path.parent.name == "partial":
            # If the lock of a partial file is free, the process that downloaded the file was killed.
            if _is_held(folder, path.name):
                continue
            path.unlink(missing_ok=True)
        elif path.parent.name == "copies":
            if now - used_at < COPY_AGE:
                continue
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
        removed += used
    if removed:
        (folder / EVICTED).touch()
        os.utime(folder / EVICTED)
    return removed > 0


def _contents(folder: Path) -> list[tuple[float, int, Path]]:
    """Return the last access time, the size and the path of each object, partial download and copy in the cache."""
    contents = []
    for kind in ("objects", "partial", "copies"):
        for path in (folder / kind).iterdir():
            with suppress(FileNotFoundError):
                status = path.lstat()
                size = status.st_size
                if stat.S_ISDIR(status.st_mode):
                    size = sum(file.lstat().st_size for file in path.rglob("*"))
                contents.append((status.st_atime, size, path))
    return contents


def _is_held(folder: Path, name: str) -> bool:
    try:
        fd = os.open(folder / "locks" / name, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


# Copies of files and folders, such as tokenizers.


def local_copy(url: Url, *, leave_out: tuple[str, ...] = (), limit: int | None = None) -> Path:
    """Copy the file or folder at a URL to the cache under the same name, and return the path of the copy.

    Files in a folder are skipped if their names end with one of the suffixes in `leave_out`. Raise `DataError` if a
    file is larger than `limit` bytes.
    """
    info = None if url.is_folder else find(url)
    if info is not None:
        files: dict[str, tuple[Url, ObjectInfo]] = {"": (url, info)}
    elif not (files := _files_below(url, leave_out)):
        raise missing(url)
    for each, described in files.values():
        if limit is not None and described.size > limit:
            raise DataError(f"{shown(each)}: is {described.size:,} bytes; expected at most {limit:,}")
    folder = cache_folder()
    listed = [(name, each.size, each.version) for name, (_, each) in sorted(files.items())]
    # If the server reports no versions, a change in content cannot be detected, so always make a new copy.
    changing = "" if all(each.version for _, each in files.values()) else str(time.time_ns())
    key = hashlib.sha256(repr((url.address, listed, changing)).encode()).hexdigest()
    place = folder / "copies" / key
    if not place.is_dir():
        with _locked(folder, key):
            if not place.is_dir():
                _copy(files, place, url.name)
    _touch(place)
    return place / url.name


def _files_below(url: Url, leave_out: tuple[str, ...]) -> dict[str, tuple[Url, ObjectInfo]]:
    """Return the objects below a URL, keyed by their path relative to this URL."""
    prefix = str(url).rstrip("/") + "/"
    listed = [each for each in names_below(url) if not each.name.lower().endswith(leave_out)]
    if len(listed) > COPY_FILES:
        raise DataError(f"{shown(url)}: contains {len(listed):,} objects; expected at most {COPY_FILES:,}")
    files = {}
    for each in listed:
        name = str(each).removeprefix(prefix)
        parts = PurePosixPath(name).parts
        if not str(each).startswith(prefix) or not parts or {"..", "/", "."} & set(name.split("/")) or parts[0] == "/":
            raise DataError(f"{shown(each)}: is not a valid file name below {shown(url)}; rename or remove the object")
        if (info := find(each)) is not None and not name.endswith("/"):
            files[name] = each, info
    return files


def _copy(files: dict[str, tuple[Url, ObjectInfo]], place: Path, name: str) -> None:
    """Copy files to the new folder `place`; the caller must hold the lock of this folder."""
    aside = place.with_name(f"{place.name}.new")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        for below, (url, info) in files.items():
            target = aside / name / below if below else aside / name
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("wb") as file:
                for piece in ordered_pieces(url, info.size) if info.size else [read(url)]:
                    file.write(piece)
        aside.rename(place)
    except OSError as error:
        if error.errno in FULL:
            raise DataError(
                f"{place.parent}: the disk is full; free some space, or set {FOLDER} to a folder on another disk"
            ) from None
        raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
