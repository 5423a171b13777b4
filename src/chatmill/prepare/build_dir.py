"""The directory in which a dataset is built, next to its target and by one process at a time.

.NAME.building         the dataset as it is written; published by a rename
.NAME.building.units   the staged rows and a fingerprint of their job, for --resume
.NAME.building.lock    locked by the process that builds
"""

from __future__ import annotations

import errno
import os
import re
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from chatmill.errors import ChatmillError, DataError, UsageError
from chatmill.prepare.staging import PART
from chatmill.remote.objects import RemoteError
from chatmill.remote.urls import Place
from chatmill.store import files
from chatmill.store.clean import ObjectCount
from chatmill.store.publish import DATASET, FolderKind, check_target, locked, recover, remove_folder, staging_for

JOB = "job.json"
UNITS = FolderKind("build", JOB, re.compile(rf"{re.escape(JOB)}|unit_[^/]*|\.[^/]*{re.escape(PART)}"))
PATIENCE = 2.0
"""Seconds to wait for the workers of a killed build, which hold its lock until they end."""
FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class BuildDir:
    staging: Path
    units: Path
    resumed: bool
    """Whether an interrupted build of the same job left units there."""


@contextmanager
def build_dir(
    target: Path, job: bytes, *, resume: bool, overwrite: bool, name: Place | None = None
) -> Iterator[BuildDir]:
    """Lock and create the folders to build in; what the block does not publish is removed when it ends.

    Bad input leaves nothing behind; any other error keeps the units, for --resume. `name` is what errors call the
    dataset, if it is built elsewhere than it is published.
    """
    staging = staging_for(target)
    units, lock = (staging.with_name(f"{staging.name}.{name}") for name in ("units", "lock"))
    missing = [folder for folder in target.absolute().parents if not folder.exists()]
    try:
        with _alone(lock, name or target):
            recover(target)
            check_target(target, overwrite=overwrite)
            resumed = _take_over(staging, units, job, resume=resume)
            try:
                yield BuildDir(staging, units, resumed)
            except BaseException as error:
                # A failing cleanup must not hide the error; the next build cleans up as well.
                _remove(staging, DATASET)
                if isinstance(error, DataError | UsageError) and not isinstance(error, RemoteError):
                    _remove(units, UNITS)
                raise
            if left := _remove(units, UNITS):
                warnings.warn(f"{units}: {left}; the dataset is complete, look and remove this", stacklevel=3)
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise ChatmillError(
            f"{error.filename or target}: {error.strerror}; nothing was published; make room and continue with --resume"
        ) from None
    finally:
        for folder in missing:
            # Folders created for this build; those that are not empty stay.
            with suppress(OSError):
                folder.rmdir()


@dataclass(frozen=True)
class CleanedBuilds:
    """The files that killed builds left next to their target."""

    removed: ObjectCount
    young: ObjectCount
    """Files that stay, because they are too young."""


def clean_builds(target: Path, *, older_than: float, dry_run: bool) -> CleanedBuilds:
    """Remove what a killed build of `target` left next to it, if nothing of it was written for so many seconds."""
    staging = staging_for(target)
    units, lock = (staging.with_name(f"{staging.name}.{name}") for name in ("units", "lock"))
    counts = {True: ObjectCount(0, 0), False: ObjectCount(0, 0)}
    if staging.exists() or units.exists():
        with _alone(lock, target):
            for folder, kind in ((staging, DATASET), (units, UNITS)):
                statuses = [path.stat() for path in folder.rglob("*") if path.is_file()]
                newest = max((status.st_mtime for status in statuses), default=0.0)
                is_old = time.time() - newest >= older_than
                counts[is_old] += ObjectCount(len(statuses), sum(status.st_size for status in statuses))
                if is_old and not dry_run and (left := _remove(folder, kind)):
                    raise DataError(f"{folder}: {left}; it is of an earlier build, look and remove it")
    return CleanedBuilds(removed=counts[True], young=counts[False])


def _take_over(staging: Path, units: Path, job: bytes, *, resume: bool) -> bool:
    """Remove what an earlier build left, except units to resume from; whether there are any."""
    path = units / JOB
    resumed = resume and path.is_file()
    if resumed and path.read_bytes() != job:
        raise DataError(f"{units}: the interrupted build was of another job or other input; build without --resume")
    # Shards are written again from the units, which is fast and gives the same bytes.
    for folder, kind in ((staging, DATASET), *(() if resumed else ((units, UNITS),))):
        if left := _remove(folder, kind):
            raise DataError(f"{folder}: {left}; it is of an earlier build, look and remove it")
    if resumed:
        for part in units.glob(f".*{PART}"):
            files.disk.remove(part)
        return True
    files.make_folder(units)
    files.write_file(path, job)
    return False


def _remove(folder: Path, kind: FolderKind) -> str:
    """Remove a folder if it is there; one line if something of it is left."""
    return remove_folder(folder, kind) if os.path.lexists(folder) else ""


@contextmanager
def _alone(lock: Path, target: Place) -> Iterator[None]:
    """Hold a lock that ends with the processes that hold it; `DataError` if another build does."""

    def opened() -> int:
        try:
            files.make_folder(lock.parent)
            return os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise DataError(f"{target}: cannot be made there ({error.strerror}); give another folder") from None

    busy = f"{target}: another process is building this dataset; wait for it"
    with locked(lock, busy, opened=opened, patience=PATIENCE):
        try:
            yield
        finally:
            # Before the lock is released: afterwards it may be of another process. One that stays does no harm.
            with suppress(OSError):
                lock.unlink()
