"""Verify the objects of a dataset at a URL: that each is there, with its size and, if it is read, its hash."""

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
    """Objects that are missing or do not have their size."""

    def fault(path: Place) -> str:
        url, info = files.object_of(path)
        if (there := objects.find(url)) is None:
            return f"{_named(path, url)}: missing; build the dataset or copy it again"
        if there.size != info.size:
            return (
                f"{_named(path, url)}: {there.size} bytes; the metadata says {info.size}; "
                "build the dataset or copy it again"
            )
        return ""

    with ThreadPoolExecutor(THREADS, thread_name_prefix="verify") as pool:
        yield from filter(None, pool.map(fault, files))


class Downloads:
    """Downloads files of a dataset to a folder, past the cache: what is verified is what the store holds now."""

    def __init__(self, files: RemoteFiles, folder: Path) -> None:
        self._files, self._folder = files, folder

    def replace(self, paths: Iterable[Place]) -> Iterator[str]:
        """Remove what was downloaded before, and download these files: a line for each that has not its hash."""
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
                right = f"the metadata says {info.sha256[:12]}…"
                yield f"{_named(path, url)}: sha256 {digest[:12]}…; {right}; it was changed"

    def fetch(self, url: Url, *, size: int, sha256: str) -> Path:
        """The file with this hash, which was downloaded before; as `cache.fetch`."""
        return self._folder / sha256

    def _download(self, url: Url, size: int, to: Path) -> str:
        digest = hashlib.sha256()
        with to.open("wb") as file:
            for piece in ordered_pieces(url, size):
                digest.update(piece)
                file.write(piece)
        return digest.hexdigest()


def _named(path: Place, url: Url) -> str:
    """An object, and the file that it holds unless its name says so."""
    return str(url) if url == path else f"{url} ({'/'.join(str(path).rsplit('/', 3)[1:])})"
