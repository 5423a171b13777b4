"""Publish a finished build atomically: sync all files, then rename the folder once.

chatmill replaces and removes only files that it wrote, which the marker file of a folder (such as
dataset_metadata.json) lists. If a folder contains a file that the marker file does not list, the command fails before
it does any work.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path, PurePosixPath

from chatmill.errors import DataError, UsageError, one_line
from chatmill.plain_file import local_path
from chatmill.remote.urls import Place, Url
from chatmill.store import files
from chatmill.store.layout import METADATA, REMOVED, SPLITS, TOKENIZER_STATE
from chatmill.store.metadata import listed_files, read_metadata

SHOWN = 3
"""Maximum number of file names in an error message; the message gives only the number of the remaining files."""
MANY = 64
"""Minimum number of files in a folder for which several threads remove the files."""
THREADS = 8
"""Number of these threads."""


# Functions that determine which files chatmill wrote.


@dataclass(frozen=True)
class FolderKind:
    """Describes a kind of folder, such as a dataset, that is published atomically.

    All paths are relative to the folder, and the path of a subfolder ends with a slash.
    """

    name: str
    marker: str
    """The file that is written last; a folder without this file is an unfinished build."""
    built: re.Pattern[str]
    """Matches every path that a build creates; used for folders without a valid marker file."""
    listed: Callable[[Path], Iterable[str]] | None = None
    """Returns the paths that the marker file lists; None if marker files of this kind do not list paths."""


def _listed_in_dataset(folder: Path) -> Iterator[str]:
    metadata = read_metadata(folder)
    yield from (f"{split}/" for split in metadata.splits)
    yield from (name for name, _ in listed_files(metadata))


DATASET = FolderKind(
    "dataset",
    METADATA,
    re.compile(
        rf"{re.escape(METADATA)}|{re.escape(TOKENIZER_STATE)}|{re.escape(REMOVED)}"
        rf"|({'|'.join(SPLITS)})/(shard_\d{{5,}}/((tokens|mask|spans|origins|targets)\.bin|episodes\.idx)?)?"
    ),
    _listed_in_dataset,
)


@dataclass(frozen=True)
class _Contents:
    own: list[str]
    """Paths that chatmill wrote, each folder before its contents."""
    others: list[str]
    """Paths that chatmill did not write; files inside such folders are not listed."""


def _contents(folder: Path, is_own: Callable[[str], object], prefix: str = "") -> _Contents:
    """List all paths in a folder, recursively. Links and special files are treated as files that chatmill did not
    write.
    """
    contents = _Contents([], [])
    with os.scandir(folder / prefix) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            is_folder = entry.is_dir(follow_symlinks=False)
            path = f"{prefix}{entry.name}{'/' if is_folder else ''}"
            if not is_own(path) or not (is_folder or entry.is_file(follow_symlinks=False)):
                contents.others.append(path)
                continue
            contents.own.append(path)
            if is_folder:
                inner = _contents(folder, is_own, path)
                contents.own.extend(inner.own)
                contents.others.extend(inner.others)
    return contents


def _is_listed(folder: Path, kind: FolderKind) -> Callable[[str], bool]:
    """Return a function that tells whether the marker file lists a path; raise `DataError` if chatmill did not write
    the marker file.
    """
    if kind.listed is None:
        raise DataError(f"{folder}: chatmill cannot tell which files belong to the {kind.name}")
    paths = {kind.marker, *kind.listed(folder)}
    paths |= {f"{parent}/" for path in paths for parent in PurePosixPath(path).parents if parent.name}
    return paths.__contains__


def _is_own(folder: Path, kind: FolderKind) -> Callable[[str], object]:
    """Return a function that tells whether chatmill wrote a path: whether the marker file lists the path or, without a
    valid marker file, whether the path matches `kind.built`.
    """
    try:
        return _is_listed(folder, kind)
    except DataError:
        return kind.built.fullmatch


def names_of(paths: Sequence[str]) -> str:
    """Join the first few paths with commas, and append the number of remaining paths."""
    more = f" and {len(paths) - SHOWN:,} more" if len(paths) > SHOWN else ""
    return ", ".join(one_line(path) for path in paths[:SHOWN]) + more


# Checks that run before any file is written.


def check_target(target: Path, *, overwrite: bool, kind: FolderKind = DATASET) -> None:
    """Raise an error if a build cannot be published at `target`. Commands call this before they do any work."""
    if local_path(target).name in ("", ".."):
        raise UsageError(f"{target}: has no name; use NAME or DIR/NAME as the folder of the {kind.name}")
    if target.is_symlink():
        raise DataError(f"{target}: is a symbolic link; use the folder itself")
    if not target.exists():
        return
    if not overwrite:
        if not target.is_dir():
            raise DataError(f"{target}: already exists and is not a folder; use another name")
        if any(target.iterdir()) and not (target / kind.marker).is_file():
            raise DataError(f"{target}: already exists and has no {kind.marker}; use another name")
        raise DataError(f"{target}: already exists; use another name or pass --overwrite")
    _check_replaceable(target, target, kind)


def _check_replaceable(folder: Path, target: Path, kind: FolderKind) -> None:
    """Raise `DataError` if `folder` contains a file that its marker file does not list. The error message names
    `target` instead of `folder`.
    """
    if folder.is_symlink() or not folder.is_dir():
        raise DataError(f"{target}: is not a folder and is not replaced; remove it or use another name")
    if not any(folder.iterdir()):
        return
    marker = folder / kind.marker
    if marker.is_symlink() or not marker.is_file():
        raise DataError(f"{target}: has no {kind.marker} and is not replaced; remove it or use another name")
    try:
        is_own = _is_listed(folder, kind)
    except DataError as error:
        raise DataError(
            f"{target}: is not replaced, because chatmill did not write its {kind.marker} "
            f"({str(error).removeprefix(f'{marker}: ')}); use another name, or inspect and remove the folder"
        ) from None
    if others := _contents(folder, is_own).others:
        raise DataError(
            f"{target}: is not replaced, because {kind.marker} does not list {names_of(others)}; "
            "move unlisted files elsewhere or use another name"
        )


def refuse_inside(target: Path, reads: Iterable[Path]) -> None:
    """Raise `DataError` if a path that the command reads is inside the folder that it would replace."""
    for path in reads:
        if files.real(target) in files.real(path).parents:
            raise DataError(f"{target}: contains {path}, which the command reads; use another folder")


# Publishing.


def staging_for(target: Path) -> Path:
    """Return the folder in which a dataset is built: next to its target, on the same file system."""
    return target.with_name(f".{target.name}.building")


def set_aside(target: Path) -> Path:
    """Return the temporary path of the old dataset while it is replaced, for systems that cannot swap two folders
    atomically.
    """
    return target.with_name(f".{target.name}.replaced")


def publish(staging: Path, target: Path, *, overwrite: bool, kind: FolderKind = DATASET) -> None:
    """Sync all files in `staging` and rename the folder to `target`.

    If `target` already exists, raise an error or, with `overwrite`, replace and remove the old dataset. When this
    function returns, the new dataset is synced to disk and survives a power loss. If the old dataset cannot be removed,
    issue a warning.
    """
    if not (staging / kind.marker).is_file():
        raise DataError(f"{staging}: has no {kind.marker}; unfinished builds are not published")
    files.sync_tree(staging)
    recover(target, kind)
    # Check again, because the target may have changed during the build. The replaced folder is checked once more after
    # the rename.
    check_target(target, overwrite=overwrite, kind=kind)
    if not os.path.lexists(target):
        _move(staging, target)
    elif files.disk.exchange(staging, target):
        _sync_parents(target, staging)
        try:
            _check_replaceable(staging, target, kind)
        except BaseException:
            files.disk.exchange(staging, target)
            _sync_parents(target, staging)
            raise
        _remove_replaced(staging, target, kind)
    else:
        aside = set_aside(target)
        _move(target, aside)
        try:
            _check_replaceable(aside, target, kind)
            _move(staging, target)
        except BaseException:
            _move(aside, target)
            raise
        _remove_replaced(aside, target, kind)


def recover(target: Path, kind: FolderKind = DATASET) -> None:
    """Recover from an interrupted replacement of `target`: restore the old folder if the new one is not in place yet,
    otherwise remove the old folder.
    """
    aside = set_aside(target)
    if aside.is_symlink() or not aside.is_dir():
        return
    if not os.path.lexists(target):
        _move(aside, target)
    elif (target / kind.marker).is_file():
        # Without a marker, `target` is not the new dataset: another process created it in the meantime.
        _remove_replaced(aside, target, kind)


def _move(source: Path, target: Path) -> None:
    try:
        files.disk.rename_new(source, target)
    except FileExistsError:
        raise DataError(
            f"{target}: was created while the dataset was being built; use another name or pass --overwrite"
        ) from None
    _sync_parents(target, source)


def _sync_parents(*paths: Path) -> None:
    for parent in dict.fromkeys(path.parent for path in paths):
        files.disk.sync(parent)


# Removing.


def remove_folder(folder: Path, kind: FolderKind) -> str:
    """Remove a folder, unless it contains files that chatmill did not write.

    Return an empty string if the folder was removed, otherwise the reason why it was not.
    """
    if left := remove_contents(folder, kind):
        return left
    try:
        files.disk.remove(folder)
    except OSError as error:
        return f"cannot be removed ({error.strerror})"
    return ""


def remove_contents(folder: Path, kind: FolderKind) -> str:
    """Remove all files in a folder but keep the folder itself. The return value is that of `remove_folder`."""
    if folder.is_symlink():
        return "is a symbolic link"
    try:
        contents = _contents(folder, _is_own(folder, kind))
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    if contents.others:
        return f"contains {names_of(contents.others)}, which is not part of a {kind.name}"

    def remove(path: str) -> str:
        try:
            files.disk.remove(folder / path)
        except FileNotFoundError:
            pass
        except OSError as error:
            return f"contains {one_line(path)}, which cannot be removed ({error.strerror})"
        return ""

    own = [path for path in reversed(contents.own) if path != kind.marker]
    own_files, folders = [path for path in own if path[-1] != "/"], [path for path in own if path[-1] == "/"]
    with ThreadPoolExecutor(THREADS) as pool:
        # Freeing the memory that caches a large file takes milliseconds, so several threads remove many files faster.
        map_files = pool.map if len(own_files) >= MANY else map
        # Remove contents before their folder, and the marker last, because it lists the files that may be removed.
        results = chain(map_files(remove, own_files), map(remove, [*folders, kind.marker]))
        return next(filter(None, results), "")


def _remove_replaced(folder: Path, target: Path, kind: FolderKind) -> None:
    if not (left := remove_folder(folder, kind)):
        return
    try:
        # Rename the folder that could not be removed, because the next build needs its name.
        for kept in (target.with_name(f"{target.name}.kept{number or ''}") for number in range(1000)):
            if not os.path.lexists(kept):
                files.disk.rename_new(folder, kept)
                folder = kept
                break
    except OSError:
        pass
    warnings.warn(
        f"{target}: was replaced, but the old {kind.name} was not removed: {folder} {left}; inspect and remove it",
        stacklevel=3,
    )


# Building.


@contextmanager
def building(
    target: Path,
    doing: str,
    *,
    overwrite: bool,
    kind: FolderKind = DATASET,
    source: Place | None = None,
    reads: Iterable[Path] = (),
) -> Iterator[Path]:
    """Yield a locked, empty folder next to `target` to build in. Publish the folder as `target` when the `with` block
    ends, or remove it if the block fails.

    `source` is the dataset that is read inside the `with` block; `source` must not contain `target` or be inside it.
    `reads` lists other files that are read inside the `with` block and must not be in `target`.
    """
    here, there = files.real(target), files.real(target if source is None or isinstance(source, Url) else source)
    if here != there and (here in there.parents or there in here.parents):
        raise DataError(f"{target}: overlaps with {source}; use another folder")
    refuse_inside(target, reads)
    check_target(target, overwrite=overwrite, kind=kind)
    recover(target, kind)
    check_target(target, overwrite=overwrite, kind=kind)
    with building_aside(target, doing, kind=kind) as staging:
        yield staging
        publish(staging, target, overwrite=overwrite, kind=kind)


@contextmanager
def building_aside(target: Path, doing: str, *, kind: FolderKind = DATASET) -> Iterator[Path]:
    """Yield a locked, empty folder next to `target` to build in; the folder is removed if the `with` block fails."""
    staging = target.with_name(f".{target.name}.{doing}")
    files.make_folder(staging)
    busy = f"{staging}: another process is building there; wait for it to finish"
    with locked(staging, busy, opened=partial(os.open, staging, os.O_RDONLY)):
        if left := remove_contents(staging, kind):
            raise DataError(f"{staging}: {left}; an earlier build left this folder behind, so inspect and remove it")
        try:
            yield staging
        except BaseException:
            if staging.is_dir():
                remove_folder(staging, kind)
            raise


@contextmanager
def locked(path: Path, busy: str, *, opened: Callable[[], int], patience: float = 0) -> Iterator[None]:
    """Lock the file or folder that `opened` opens while the `with` block runs. If the process is killed, the operating
    system releases the lock.

    If another process holds the lock for more than `patience` seconds, raise a `DataError` with the message `busy`.
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
    # The previous lock holder may have published or removed `path` after this process opened it.
    return path.exists() and os.path.samestat(os.fstat(fd), path.stat())
