"""Verify the objects of a dataset at a URL: their presence, size and, with `full`, their hash."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from chatmill.errors import DataError
from chatmill.remote import objects
from chatmill.remote.download import ordered_pieces
from chatmill.remote.threads import THREADS
from chatmill.remote.urls import Place, Url
from chatmill.store.remote_files import RemoteFiles


def size_faults(files: RemoteFiles) -> Iterator[str]:
    """Yield an error message for each object that is missing or has the wrong size."""

    def fault(path: Place) -> str:
        url, info = files.object_of(path)
        if (there := objects.find(url)) is None:
            return f"{_named(path, url)}: missing; build the dataset or copy it again"
        if there.size != info.size:
            return (
                f"{_named(path, url)}: is {there.size} bytes, but the metadata records {info.size}; "
                "build the dataset or copy it again"
            )
        return ""

    with ThreadPoolExecutor(THREADS, thread_name_prefix="verify") as pool:
        yield from filter(None, pool.map(fault, files))


class Downloads:
    """Downloads files of a dataset to a folder, without using the cache."""

    def __init__(self, files: RemoteFiles, folder: Path) -> None:
        self._files, self._folder = files, folder

    def replace(self, paths: Iterable[Place]) -> Iterator[str]:
        """Remove the earlier downloads and download `paths`; yield an error message for each failed download or wrong
        hash.
        """
        for old in self._folder.iterdir():
            old.unlink()
        for path in paths:
            url, info = self._files.object_of(path)
            try:
                digest = self._download(url, info.size, self._folder / info.sha256)
            except DataError as error:
                yield str(error)
                continue
            if digest != info.sha256:
                recorded = f"but the metadata records {info.sha256[:12]}…"
                yield f"{_named(path, url)}: sha256 is {digest[:12]}…, {recorded}; the object was changed"

    def fetch(self, url: Url, *, size: int, sha256: str) -> Path:
        """Return the path of the downloaded file with this hash. The signature is the same as that of `cache.fetch`."""
        return self._folder / sha256

    def _download(self, url: Url, size: int, to: Path) -> str:
        digest = hashlib.sha256()
        with to.open("wb") as file:
            for piece in ordered_pieces(url, size):
                digest.update(piece)
                file.write(piece)
        return digest.hexdigest()


def _named(path: Place, url: Url) -> str:
    """Return the URL of an object and, if its name is a hash, the path of the file that it contains."""
    return str(url) if url == path else f"{url} ({'/'.join(str(path).rsplit('/', 3)[1:])})"
