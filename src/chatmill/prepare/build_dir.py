"""Where a dataset is built, beside its place and by one process at a time.

.NAME.building         the dataset as it is written; published by a rename
.NAME.building.units   the staged rows, and the job they are of: what --resume goes on with
.NAME.building.lock    held by whoever builds
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from chatmill.errors import ChatmillError, DataError, UsageError
from chatmill.prepare.staging import PART
from chatmill.store import files
from chatmill.store.layout import METADATA
from chatmill.store.publish import check_target, recover, staging_for

JOB = "job.json"
PATIENCE = 2.0
"""Seconds that the workers of a killed build are given to end; they hold its lock until then."""
FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class BuildDir:
    staging: Path
    units: Path
    found: bool
    """Whether an interrupted build of the same job left units there."""


@contextmanager
def build_dir(target: Path, job: bytes, *, resume: bool, overwrite: bool) -> Iterator[BuildDir]:
    """Folders to build in, ours alone; what the block does not publish is gone when it ends.

    Bad input leaves nothing behind; whatever else ends the block leaves the units, for --resume.
    """
    staging = staging_for(target)
    units, lock = (staging.with_name(f"{staging.name}.{name}") for name in ("units", "lock"))
    missing = [folder for folder in target.absolute().parents if not folder.exists()]
    try:
        with _alone(lock, target):
            recover(target)
            check_target(target, overwrite=overwrite)
            found = _take_over(staging, units, job, resume=resume)
            try:
                yield BuildDir(staging, units, found)
            except BaseException as error:
                # A cleaning that fails may not hide why: the next build cleans up, too.
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
            # Folders that were made for nothing; those that hold anything stay.
            with suppress(OSError):
                folder.rmdir()


def _take_over(staging: Path, units: Path, job: bytes, *, resume: bool) -> bool:
    """Remove what an earlier build left, but for the units of the same job if they are asked for."""
    path = units / JOB
    found = resume and path.is_file()
    if found and path.read_bytes() != job:
        raise DataError(f"{units}: the interrupted build was of another job or other input; build without --resume")
    # Shards are written anew from the units, which is quick and gives the same bytes.
    _remove(staging, METADATA)
    if found:
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
    """Hold a lock that ends with its holders; `DataError` if another process holds it."""
    fd = _locked(lock, target)
    try:
        yield
    finally:
        # While it is held, or it might be that of another.
        lock.unlink(missing_ok=True)
        os.close(fd)


def _locked(lock: Path, target: Path) -> int:
    until = time.monotonic() + PATIENCE
    while True:
        try:
            files.make_folder(lock.parent)
            fd = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise DataError(f"{target}: cannot be made there ({error.strerror}); give another folder") from None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The one before us may have removed it after we opened it.
            if lock.exists() and os.path.samestat(os.fstat(fd), lock.stat()):
                return fd
        except BlockingIOError:
            if time.monotonic() > until:
                os.close(fd)
                raise DataError(f"{target}: another process is building this dataset; wait for it") from None
            time.sleep(0.05)
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
