"""The files of a dataset at a URL; each file is downloaded to the local cache when it is first needed.

    URL/dataset_metadata.json    the same bytes as the local file
    URL/objects/SHA256           every other file, named by its hash

The metadata records the size and hash of every file; objects that the metadata does not list are ignored. A dataset
whose plain files were copied to a bucket (URL/train/shard_00000/tokens.bin) can also be read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Protocol, TypeVar

from chatmill.errors import DataError
from chatmill.plain_file import JSON_LIMIT
from chatmill.remote import cache, objects, prefetch
from chatmill.remote.objects import MissingObjectError
from chatmill.remote.urls import Place, Url
from chatmill.store.folder import READ_FLAGS
from chatmill.store.hashed import FileInfo
from chatmill.store.layout import METADATA, TOKENIZER_STATE
from chatmill.store.mapped import MappedFile
from chatmill.store.metadata import Metadata, listed_files, parse_metadata

T = TypeVar("T")
OBJECTS = "objects"
"""The folder of the objects that are named by hash."""
STAGING = "staging"
"""The folder for temporary objects of distributed builds: staging/BUILD/…"""
ATTEMPTS = 10
"""Maximum number of attempts to read an object or cached file that is replaced or evicted during the read."""


class Fetch(Protocol):
    """A function that downloads an object and returns the path of the local file; see `cache.fetch`."""

    def __call__(self, url: Url, *, size: int, sha256: str) -> Path: ...


class RemoteFiles:
    """The files of an open dataset at a URL, with the interface of `StoredFiles`. Instances can be pickled."""

    def __init__(self, url: Url, files: Mapping[Place, FileInfo], *, by_hash: bool) -> None:
        """`files` maps the URL of each file in the plain layout to its size and hash. Objects are named by hash if
        `by_hash` is true.
        """
        self.path = url
        self._files = dict(files)
        self._by_hash = by_hash
        self.fetch: Fetch = prefetch.fetch

    def __contains__(self, path: Place) -> bool:
        return path in self._files

    def __iter__(self) -> Iterator[Place]:
        return iter(self._files)

    def object_of(self, path: Place) -> tuple[Url, FileInfo]:
        """Return the URL of the object that contains a file, and the file's size and hash; raise `DataError` if the
        dataset does not list the file.
        """
        if path not in self._files or not isinstance(path, Url):
            raise DataError(f"{path}: did not exist when the dataset was opened")
        info = self._files[path]
        return (object_url(self.path, info.sha256) if self._by_hash else path), info

    def map(self, path: Place) -> MappedFile:
        """Memory-map a file; raise `DataError` if its object is missing or has the wrong size or hash."""
        return self._cached(path, lambda fd, cached: MappedFile(fd, path, cached))

    def read(self, path: Place) -> bytes:
        """Return all bytes of a file; raise `DataError` like `map`."""
        size = self.object_of(path)[1].size
        return self._cached(path, lambda fd, _: _read_all(fd, size))

    def last_eviction(self) -> int:
        """Return a number that changes whenever the cache evicts files."""
        return cache.last_eviction()

    def _cached(self, path: Place, work: Callable[[int, Path], T]) -> T:
        url, info = self.object_of(path)
        for attempt in range(ATTEMPTS):
            cached = self.fetch(url, size=info.size, sha256=info.sha256)
            try:
                fd = os.open(cached, READ_FLAGS)
            except FileNotFoundError:
                # Another process evicted the file from the cache before this process opened it.
                if attempt + 1 == ATTEMPTS:
                    raise DataError(f"{cached}: was evicted after every download; raise CHATMILL_CACHE_SIZE") from None
                continue
            try:
                return work(fd, cached)
            finally:
                os.close(fd)
        raise AssertionError


def _read_all(fd: int, size: int) -> bytes:
    with os.fdopen(os.dup(fd), "rb") as file:
        return file.read(size)


def object_url(dataset: Url, sha256: str) -> Url:
    return dataset / OBJECTS / sha256


def remote_metadata(url: Url) -> Metadata:
    """Read the metadata of a dataset at a URL; raise `DataError` if it is missing or chatmill did not write it."""
    return parse_metadata(remote_metadata_text(url), place=str(url / METADATA))


def remote_metadata_text(url: Url) -> bytes:
    """Read the metadata object of a dataset at a URL; all bytes come from one version of the object."""
    place, before = url / METADATA, b""
    for _ in range(ATTEMPTS):
        try:
            raw = objects.read(place, 0, JSON_LIMIT)
        except MissingObjectError:
            raise DataError(f"{place}: no dataset found; an unfinished build has no metadata") from None
        if len(raw) < objects.RANGE_BYTES or raw == before:
            break
        # The object was read in several requests, and may have been replaced between two of them.
        before = raw
    return raw


def remote_files(url: Url, metadata: Metadata) -> RemoteFiles:
    """Return the files of a dataset at a URL, stored by hash or by file name; raise `DataError` if the tokenizer state
    is missing or was changed.
    """
    files: dict[Place, FileInfo] = {url / name: info for name, info in listed_files(metadata)}
    state = metadata.tokenizer_state
    places = {True: object_url(url, state.sha256), False: url / TOKENIZER_STATE}
    for by_hash, place in places.items():
        if (there := objects.find(place)) is not None and there.size == state.size:
            return RemoteFiles(url, files, by_hash=by_hash)
    raise DataError(
        f"{url}: its {TOKENIZER_STATE} is missing (both as {OBJECTS}/{state.sha256[:12]}… and by name) or was changed; "
        "build or copy the dataset again"
    )
