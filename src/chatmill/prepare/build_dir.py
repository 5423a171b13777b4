"""The temporary folders in which a dataset is built, next to the target folder. Only one process can build the same
dataset at a time.

.NAME.building         the dataset while it is written; published by a rename
.NAME.building.units   staged rows and the fingerprint of their job, for --resume
.NAME.building.lock    locked by the building process
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
"""Seconds to wait for the lock, because the workers of a killed build hold it until they exit."""
FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class BuildDir:
    staging: Path
    units: Path
    resumed: bool
    """Whether units of an interrupted build of the same job are reused."""


@contextmanager
def build_dir(
    target: Path, job: bytes, *, resume: bool, overwrite: bool, name: Place | None = None
) -> Iterator[BuildDir]:
    """Lock and create the temporary build folders, and remove them when the `with` block ends.

    If the build fails, the rendered units are kept for --resume, unless the input caused the error. `name` replaces
    `target` in error messages.
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
                # A failed cleanup is ignored, so that it does not hide the error; the next build removes the files.
                _remove(staging, DATASET)
                if isinstance(error, DataError | UsageError) and not isinstance(error, RemoteError):
                    _remove(units, UNITS)
                raise
            if left := _remove(units, UNITS):
                warnings.warn(f"{units}: {left}; the dataset is complete, so remove this folder", stacklevel=3)
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise ChatmillError(
            f"{error.filename or target}: {error.strerror}, so the dataset was not written; "
            "free disk space and continue with --resume"
        ) from None
    finally:
        for folder in missing:
            # Remove the folders created for this build if they are empty.
            with suppress(OSError):
                folder.rmdir()


@dataclass(frozen=True)
class CleanedBuilds:
    """The number and total size of the files that killed builds left next to the target folder."""

    removed: ObjectCount
    young: ObjectCount
    """Files that are kept because they are newer than the age limit."""


def clean_builds(target: Path, *, older_than: float, dry_run: bool) -> CleanedBuilds:
    """Remove the temporary folders that a killed build left next to `target`. Keep a folder if one of its files was
    modified in the last `older_than` seconds.
    """
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
                    raise DataError(
                        f"{folder}: {left}; an earlier build left this folder behind, so inspect and remove it"
                    )
    return CleanedBuilds(removed=counts[True], young=counts[False])


def _take_over(staging: Path, units: Path, job: bytes, *, resume: bool) -> bool:
    """Remove the files that an earlier build left behind. With `resume`, keep the units of an interrupted build, and
    return whether there are any.
    """
    path = units / JOB
    resumed = resume and path.is_file()
    if resumed and path.read_bytes() != job:
        raise DataError(f"{units}: the interrupted build had a different job or input; build without --resume")
    # Remove the shards even when resuming: writing them again from the units is fast and gives the same bytes.
    for folder, kind in ((staging, DATASET), *(() if resumed else ((units, UNITS),))):
        if left := _remove(folder, kind):
            raise DataError(f"{folder}: {left}; an earlier build left this folder behind, so inspect and remove it")
    if resumed:
        for part in units.glob(f".*{PART}"):
            files.disk.remove(part)
        return True
    files.make_folder(units)
    files.write_file(path, job)
    return False


def _remove(folder: Path, kind: FolderKind) -> str:
    return remove_folder(folder, kind) if os.path.lexists(folder) else ""


@contextmanager
def _alone(lock: Path, target: Place) -> Iterator[None]:
    """Lock the file `lock` while the `with` block runs; raise `DataError` if another build holds the lock."""

    def opened() -> int:
        try:
            files.make_folder(lock.parent)
            return os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise DataError(f"{target}: cannot be created ({error.strerror}); use another folder") from None

    busy = f"{target}: another process is building this dataset; wait until it has finished"
    with locked(lock, busy, opened=opened, patience=PATIENCE):
        try:
            yield
        finally:
            # Remove the lock file before releasing the lock, because another process may lock the file afterwards. A
            # lock file left by a killed process is harmless.
            with suppress(OSError):
                lock.unlink()
