"""The files of a dataset at a URL: each is fetched to the cache of this machine when it is first needed.

    URL/dataset_metadata.json    the bytes of the local file of this name
    URL/objects/SHA256           every other file, named by its hash

The metadata has the size and hash of every file, so that no listing is needed, and what others write meanwhile under
other hashes does not matter. A dataset whose plain files were copied to a bucket (URL/train/shard_00000/tokens.bin) is
read as well.
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
"""The folder of the objects that are named by their hash."""
STAGING = "staging"
"""The folder of what distributed builds stage: staging/BUILD/…"""
ATTEMPTS = 10
"""How often an object that is replaced, or a cached file that is evicted, while it is read is read again."""


class Fetch(Protocol):
    """Gives the local file of an object; see `cache.fetch`."""

    def __call__(self, url: Url, *, size: int, sha256: str) -> Path: ...


class RemoteFiles:
    """The files of an open dataset at a URL; the interface of `StoredFiles`. It can be sent to other processes."""

    def __init__(self, url: Url, files: Mapping[Place, FileInfo], *, by_hash: bool) -> None:
        """`files` are named by their URLs as in a folder; `by_hash` says whether the objects are named by hash."""
        self.path = url
        self._files = dict(files)
        self._by_hash = by_hash
        self.fetch: Fetch = prefetch.fetch

    def __contains__(self, path: Place) -> bool:
        return path in self._files

    def __iter__(self) -> Iterator[Place]:
        return iter(self._files)

    def object_of(self, path: Place) -> tuple[Url, FileInfo]:
        """The object that holds a file, and its size and hash; `DataError` if the dataset has no such file."""
        if path not in self._files or not isinstance(path, Url):
            raise DataError(f"{path}: no such file when the dataset was opened")
        info = self._files[path]
        return (object_url(self.path, info.sha256) if self._by_hash else path), info

    def map(self, path: Place) -> MappedFile:
        """A file, mapped; `DataError` if the object is missing or has not its size and hash."""
        return self._cached(path, lambda fd, cached: MappedFile(fd, path, cached))

    def read(self, path: Place) -> bytes:
        """All bytes of a file; `DataError` likewise."""
        size = self.object_of(path)[1].size
        return self._cached(path, lambda fd, _: _read_all(fd, size))

    def last_eviction(self) -> int:
        """A number that changes when the cache removes files to make room."""
        return cache.last_eviction()

    def _cached(self, path: Place, work: Callable[[int, Path], T]) -> T:
        url, info = self.object_of(path)
        for attempt in range(ATTEMPTS):
            cached = self.fetch(url, size=info.size, sha256=info.sha256)
            try:
                fd = os.open(cached, READ_FLAGS)
            except FileNotFoundError:
                # Another process needed the room before this one opened it.
                if attempt + 1 == ATTEMPTS:
                    raise DataError(
                        f"{cached}: was removed each time that it was fetched; raise CHATMILL_CACHE_SIZE"
                    ) from None
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
    """Where a dataset at a URL keeps the file with this hash."""
    return dataset / OBJECTS / sha256


def remote_metadata(url: Url) -> Metadata:
    """The metadata of the dataset at a URL; `DataError` if there is none, or if chatmill did not write it."""
    return parse_metadata(remote_metadata_text(url), place=str(url / METADATA))


def remote_metadata_text(url: Url) -> bytes:
    """The bytes of the metadata object of a dataset at a URL, all of one version."""
    place, before = url / METADATA, b""
    for _ in range(ATTEMPTS):
        try:
            raw = objects.read(place, 0, JSON_LIMIT)
        except MissingObjectError:
            raise DataError(f"{place}: no dataset here; an unfinished build has no metadata") from None
        if len(raw) < objects.RANGE_BYTES or raw == before:
            break
        # It was read in pieces, and may have been replaced in between.
        before = raw
    return raw


def remote_files(url: Url, metadata: Metadata) -> RemoteFiles:
    """The files of a dataset at a URL; `DataError` if it is neither of the two layouts."""
    files: dict[Place, FileInfo] = {url / name: info for name, info in listed_files(metadata)}
    state = metadata.tokenizer_state
    places = {True: object_url(url, state.sha256), False: url / TOKENIZER_STATE}
    for by_hash, place in places.items():
        if (there := objects.find(place)) is not None and there.size == state.size:
            return RemoteFiles(url, files, by_hash=by_hash)
    raise DataError(
        f"{url}: its {TOKENIZER_STATE} is missing, as {OBJECTS}/{state.sha256[:12]}… and by name, or was changed; "
        "build or copy the dataset again"
    )
