"""The directory in which a dataset is built, next to its target and by one process at a time.

.NAME.building         the dataset as it is written; published by a rename
.NAME.building.units   the staged rows and a fingerprint of their job, for --resume
.NAME.building.lock    locked by the process that builds
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from chatmill.errors import ChatmillError, DataError, UsageError
from chatmill.prepare.staging import PART
from chatmill.store import files
from chatmill.store.layout import METADATA
from chatmill.store.publish import check_target, locked, recover, staging_for

JOB = "job.json"
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
def build_dir(target: Path, job: bytes, *, resume: bool, overwrite: bool) -> Iterator[BuildDir]:
    """Lock and create the folders to build in; what the block does not publish is removed when it ends.

    Bad input leaves nothing behind; any other error keeps the units, for --resume.
    """
    staging = staging_for(target)
    units, lock = (staging.with_name(f"{staging.name}.{name}") for name in ("units", "lock"))
    missing = [folder for folder in target.absolute().parents if not folder.exists()]
    try:
        with _alone(lock, target):
            recover(target)
            check_target(target, overwrite=overwrite)
            resumed = _take_over(staging, units, job, resume=resume)
            try:
                yield BuildDir(staging, units, resumed)
            except BaseException as error:
                # A failing cleanup must not hide the error; the next build cleans up as well.
                with suppress(OSError):
                    _remove(staging, METADATA)
                    if isinstance(error, DataError | UsageError):
                        _remove(units, JOB)
                raise
            _remove(units, JOB)
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise ChatmillError(
            f"{error.filename or target}: {error.strerror}; nothing was published; make room and go on with --resume"
        ) from None
    finally:
        for folder in missing:
            # Folders created for this build; those that are not empty stay.
            with suppress(OSError):
                folder.rmdir()


def _take_over(staging: Path, units: Path, job: bytes, *, resume: bool) -> bool:
    """Remove what an earlier build left, except units to resume from; whether there are any."""
    path = units / JOB
    resumed = resume and path.is_file()
    if resumed and path.read_bytes() != job:
        raise DataError(f"{units}: the interrupted build was of another job or other input; build without --resume")
    # Shards are written again from the units, which is fast and gives the same bytes.
    _remove(staging, METADATA)
    if resumed:
        for part in units.glob(f".*{PART}"):
            files.disk.remove(part)
        return True
    _remove(units, JOB)
    files.make_folder(units)
    files.write_file(path, job)
    return False


def _remove(folder: Path, first: str) -> None:
    if folder.is_dir():
        files.remove_tree(folder, first=first)


@contextmanager
def _alone(lock: Path, target: Path) -> Iterator[None]:
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
            # Before the lock is released: afterwards the file may belong to another process.
            lock.unlink(missing_ok=True)
