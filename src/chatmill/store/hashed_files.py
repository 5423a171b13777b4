"""Files with a known size and hash: written with `HashedFile`, checked with a `Manifest`."""

from __future__ import annotations

import hashlib
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from chatmill.store.files import create


@dataclass(frozen=True)
class FileInfo:
    size: int
    sha256: str


class HashedFile:
    """A new file whose bytes are hashed and counted as they are written. `hurry` as in `files.create`."""

    def __init__(self, path: Path, *, hurry: bool = False) -> None:
        self._file = create(path, hurry=hurry)
        self._hash, self._size = hashlib.sha256(), 0

    def write(self, data: bytes | memoryview) -> None:
        self._hash.update(data)
        self._size += self._file.write(data)

    def info(self) -> FileInfo:
        return FileInfo(self._size, self._hash.hexdigest())

    def close(self) -> FileInfo:
        self._file.close()
        return self.info()

    def __enter__(self) -> HashedFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()


@dataclass(frozen=True)
class Manifest:
    """The files of a dataset or cache, with the size and hash that its metadata gives for each.

    Faults are one line each, in terms of `source` ("the metadata", "meta.json") and `kind` ("dataset", "cache").
    """

    files: Sequence[tuple[Path, FileInfo]]
    source: str
    kind: str

    def size_faults(self) -> Iterator[str]:
        """Files that are missing or do not have their size."""
        for path, info in self.files:
            try:
                status = path.stat()
            except (FileNotFoundError, NotADirectoryError):
                yield f"{path}: missing; rebuild the {self.kind} or copy it again"
                continue
            if not stat.S_ISREG(status.st_mode):
                yield f"{path}: not a file; rebuild the {self.kind} or copy it again"
            elif (size := status.st_size) != info.size:
                yield f"{path}: {size} bytes; {self.source} says {info.size}; rebuild the {self.kind} or copy it again"

    def hash_faults(self) -> Iterator[str]:
        """Files that do not have their hash; reads every byte."""
        for path, info in self.files:
            if path.is_file():
                with path.open("rb") as file:
                    sha256 = hashlib.file_digest(file, "sha256").hexdigest()
                if sha256 != info.sha256:
                    yield f"{path}: sha256 {sha256[:12]}…; {self.source} says {info.sha256[:12]}…; it was changed"

    def unlisted_faults(self, folders: Sequence[Path]) -> Iterator[str]:
        """What is in these folders, or in the folders of files below them, and is not one of the files."""
        listed = {path for path, _ in self.files}
        inner = {path.parent for path in listed}
        for path in sorted(path for folder in folders for path in folder.glob("*")):
            if path in inner:
                yield from self.unlisted_faults([path])
            elif path not in listed:
                yield f"{path}: {self.source} does not list it; remove it or rebuild the {self.kind}"
