"""Publish a finished build to an object store, where objects cannot be renamed.

Every file is uploaded to an object that is named after the hash of the file. The metadata is uploaded last, and only if
nobody has published another dataset at the URL since the build started. Until the metadata is uploaded, readers see the
previous dataset, or no dataset. Objects of the previous dataset are not removed, so that its readers can continue;
`chatmill clean` removes them.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from chatmill.errors import DataError, UsageError
from chatmill.remote import objects
from chatmill.remote.objects import ExistingObjectError, RemoteError
from chatmill.remote.urls import Url
from chatmill.store.hashed import FileInfo
from chatmill.store.layout import METADATA, REMOVED, SPLITS, TOKENIZER_STATE
from chatmill.store.metadata import ShardInfo, listed_files, parse_metadata
from chatmill.store.publish import DATASET, building_aside, names_of, remove_folder
from chatmill.store.remote_files import OBJECTS, STAGING, object_url, remote_metadata

THREADS = 8
"""Number of files that are uploaded concurrently."""
FRESH = 6 * 3600.0
"""Maximum age in seconds of an existing object that is reused although no metadata lists it.

An older object is uploaded again, because `chatmill clean` may be about to remove it.
"""

OWN_NAMES = (OBJECTS, STAGING, METADATA, TOKENIZER_STATE, REMOVED, *SPLITS)
"""All names that chatmill may write at the top level of a dataset."""


@dataclass(frozen=True)
class RemoteTarget:
    """The URL at which a dataset will be published, and the metadata version and object hashes of the dataset that it
    replaces.
    """

    url: Url
    version: str | None
    """The version of the metadata to replace, or None if the URL has no metadata."""
    kept: frozenset[str]
    """The hashes of all objects that the old metadata lists."""


def check_remote_target(url: Url, *, overwrite: bool) -> RemoteTarget:
    """Check that a dataset can be published at a URL, and raise an error otherwise. Call this function before building
    the dataset.
    """
    objects.check_writable(url)
    if not url.address.partition("://")[2].partition("/")[2].strip("/"):
        raise UsageError(f"{url}: has no name; use {url.scheme}://BUCKET/NAME")
    if objects.find(url) is not None:
        raise DataError(f"{url}: is an object, but a dataset needs a folder; use another name")
    if (there := objects.find(url / METADATA)) is None:
        _check_others(url)
        return RemoteTarget(url, None, frozenset())
    if not overwrite:
        raise DataError(f"{url}: already exists; use another name or pass --overwrite")
    try:
        metadata = remote_metadata(url)
    except DataError as error:
        why = str(error).removeprefix(f"{url / METADATA}: ")
        raise DataError(
            f"{url}: is not replaced, because chatmill did not write its {METADATA} ({why}); "
            "use another name, or inspect and remove it"
        ) from None
    return RemoteTarget(url, there.version, frozenset(info.sha256 for _, info in listed_files(metadata)))


def _check_others(url: Url) -> None:
    """Raise `DataError` if there are objects below the URL that chatmill did not write; skip the check if the store
    does not permit listing.
    """
    try:
        others = [name for name in objects.first_below(url) if name not in OWN_NAMES]
    except RemoteError:
        return
    if others:
        raise DataError(f"{url}: contains {names_of(others)}, which chatmill did not write; use another name")


class Uploads:
    """Uploads the files of a dataset in background threads while the dataset is built."""

    def __init__(self, target: RemoteTarget) -> None:
        self._target = target
        self._pool: ThreadPoolExecutor | None = None
        self._running: dict[str, Future[None]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def add(self, path: Path, info: FileInfo) -> None:
        """Start to upload a file, unless it has already been added; raise the error of an earlier upload that
        failed.
        """
        for sha256 in [sha256 for sha256, running in self._running.items() if running.done()]:
            self._running[sha256].result()
        if info.sha256 not in self._running:
            # Start the threads only now, so that a caller can still fork before the first file is complete.
            self._pool = self._pool or ThreadPoolExecutor(THREADS, thread_name_prefix="upload")
            self._running[info.sha256] = self._pool.submit(upload_object, self._target, path, info)

    def add_shard(self, folder: Path, info: ShardInfo) -> None:
        for name, file in info.files.items():
            self.add(folder / name, file)

    def skip(self, infos: Iterable[FileInfo]) -> None:
        """Do not upload the given files, because other processes have already uploaded them."""
        for info in infos:
            done: Future[None] = Future()
            done.set_result(None)
            self._running.setdefault(info.sha256, done)

    def wait(self) -> None:
        """Wait until all uploads are complete; raise the first error."""
        for running in self._running.values():
            running.result()


def upload_object(target: RemoteTarget, path: Path, info: FileInfo) -> None:
    """Upload a file to the object named after its hash. Skip the upload if the object exists and is either recent or
    part of the dataset to replace.
    """
    url = object_url(target.url, info.sha256)
    there = objects.find(url)
    if there is not None and there.size == info.size:
        is_fresh = there.modified is not None and time.time() - there.modified < FRESH
        if info.sha256 in target.kept or is_fresh:
            return
    objects.upload(url, path)


def publish_remote(folder: Path, target: RemoteTarget, uploads: Uploads) -> None:
    """Upload the files of the dataset in `folder` that are not uploaded yet, then upload its metadata and remove
    `folder`.
    """
    text = (folder / METADATA).read_bytes()
    metadata = parse_metadata(text, place=str(folder / METADATA))
    for name, info in listed_files(metadata):
        uploads.add(folder / name, info)
    uploads.wait()
    publish_metadata(target, text)
    # The next build removes files that cannot be removed now.
    remove_folder(folder, DATASET)


def publish_metadata(target: RemoteTarget, text: bytes) -> None:
    """Upload the metadata, which makes a dataset visible to readers. Raise `DataError` if another dataset was published
    at the URL in the meantime.
    """
    try:
        objects.write(target.url / METADATA, text, new=target.version is None, replaces=target.version)
    except ExistingObjectError:
        what = "appeared" if target.version is None else "was replaced"
        raise DataError(
            f"{target.url}: {what} while the dataset was being built; nothing was published; "
            "use another name or pass --overwrite"
        ) from None


def scratch_folder(url: Url) -> Path:
    """Return the local folder in which a dataset for a URL is built. The folder is private to the user, and `--resume`
    uses the same folder.
    """
    folder = Path(tempfile.gettempdir()) / f"chatmill-{os.geteuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise UsageError(f"{folder}: other users can write to it; remove it, or set TMPDIR to a private folder")
    return folder / hashlib.sha256(url.address.rstrip("/").encode()).hexdigest()[:32]


@contextmanager
def building_remote(url: Url, doing: str, *, overwrite: bool) -> Iterator[Path]:
    """Yield a local folder in which to build a dataset; when the `with` block ends, publish the dataset at a URL."""
    target, local = check_remote_target(url, overwrite=overwrite), scratch_folder(url)
    with building_aside(local, doing) as staging, Uploads(target) as uploads:
        yield staging
        publish_remote(staging, target, uploads)
