"""Files whose size and sha256 are recorded in metadata, and JSON files that contain the sha256 of their own content.

Binary files are written with `HashedFile` and checked with a `Manifest`. `dataset_metadata.json` and the `meta.json` of
a cache contain a hash of their own content, so a change to any byte is detected. A `DataError` about an invalid value
in a JSON file names the key of the value.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from chatmill.errors import DataError, one_line
from chatmill.store.files import create
from chatmill.store.folder import OpenFolder

LARGEST = 2**62
"""Maximum value of a count on disk, small enough that the sum of a few counts fits in 64 bits."""


@dataclass(frozen=True)
class FileInfo:
    size: int
    sha256: str


class HashedFile:
    """A new file whose bytes are hashed and counted as they are written."""

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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


@dataclass(frozen=True)
class Manifest:
    """The files of a dataset or cache, with the size and hash of each file as recorded in the metadata.

    The methods yield one-line error messages, which mention `source` ("the metadata" or "meta.json") and `kind`
    ("dataset" or "cache").
    """

    files: Sequence[tuple[Path, FileInfo]]
    source: str
    kind: str

    def size_faults(self, folder: OpenFolder) -> Iterator[str]:
        """Yield an error message for each file that is missing or has the wrong size."""
        for path, info in self.files:
            status = folder.status(path)
            if status is None:
                yield f"{path}: missing; rebuild the {self.kind} or copy it again"
            elif not stat.S_ISREG(status.st_mode):
                yield f"{path}: is not a file; rebuild the {self.kind} or copy it again"
            elif (size := status.st_size) != info.size:
                yield (
                    f"{path}: is {size} bytes, but {self.source} records {info.size}; "
                    f"rebuild the {self.kind} or copy it again"
                )

    def hash_faults(self, folder: OpenFolder) -> Iterator[str]:
        """Yield an error message for each file with the wrong hash. This method reads all files completely."""
        for path, info in self.files:
            if folder.is_file(path):
                with os.fdopen(folder.open(path), "rb") as file:
                    sha256 = hashlib.file_digest(file, "sha256").hexdigest()
                if sha256 != info.sha256:
                    recorded = f"but {self.source} records {info.sha256[:12]}…"
                    yield f"{path}: sha256 is {sha256[:12]}…, {recorded}; the file was changed"

    def unlisted_faults(self, folder: OpenFolder, splits: Iterable[str]) -> Iterator[str]:
        """Yield an error message for each file in the folders of splits and shards that the metadata does not list."""
        listed = {path for path, _ in self.files}
        places = {*(folder.path / name for name in splits), *(path.parent for path in listed)} - {folder.path}
        for path in sorted(place / name for place in places for name in folder.names(place)):
            if path not in listed and path not in places:
                yield f"{path}: is not listed in {self.source}; remove it or rebuild the {self.kind}"


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def json_text(value: Mapping[str, Any]) -> bytes:
    """Format an object as JSON with one line per top-level key, sorted by key."""
    lines = [f"{json.dumps(key)}: {_canonical(value[key])}" for key in sorted(value)]
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def self_hash(data: Mapping[str, Any]) -> str:
    """Return the sha256 of a JSON object in canonical form; the object must not contain the key `sha256`."""
    return hashlib.sha256(_canonical(data).encode()).hexdigest()


def hashed_text(data: Mapping[str, Any]) -> bytes:
    """Format an object as JSON, with its hash added under the key `sha256`."""
    return json_text({**data, "sha256": self_hash(data)})


def read_hashed(path: Path, kind: str, read: Callable[[Path], bytes]) -> bytes:
    """Read the metadata file of a dataset or cache, which exists only if the dataset or cache is complete."""
    try:
        return read(path)
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; expected a complete {kind}, not an unfinished build") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); rebuild the {kind} or copy it again") from None


def parse_hashed(raw: bytes, *, place: str, schema: str, version: int) -> dict[str, Any]:
    """Parse a metadata file and check its schema and version. The caller must verify the hash."""
    try:
        data = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: is not JSON ({one_line(str(error))}); the file is damaged") from None
    if not isinstance(data, dict) or data.get("schema") != schema:
        raise DataError(f'{place}: "schema" is not "{schema}"; the file is damaged, or chatmill did not write it')
    if data.get("schema_version") != version:
        raise DataError(f"{place}: schema version {one_line(str(data.get('schema_version')))}; expected {version}")
    return data


class JsonObject:
    """The JSON object under the key path `key` in the file `place`. The methods check the type of a value when they
    read it.
    """

    def __init__(self, value: Any, place: str, key: str = "") -> None:
        self._place, self._key = place, key
        if not isinstance(value, dict):
            raise self.fault("", value, "an object")
        self.value: dict[str, Any] = value

    def fault(self, name: str, value: Any, expected: str) -> DataError:
        key = ".".join(part for part in (self._key, one_line(name)) if part)
        return DataError(f"{self._place}: {key} is {one_line(json.dumps(value))}; expected {expected}")

    def check(self, name: str, right: bool, expected: str) -> Any:
        """Return the value of the key `name`. Raise `DataError` if `right`, the result of the caller's check, is
        false.
        """
        value = self.value.get(name)
        if not right:
            raise self.fault(name, value, expected)
        return value

    def table(self, name: str) -> JsonObject:
        return JsonObject(self.value.get(name), self._place, f"{self._key}.{name}".lstrip("."))

    def items(self, name: str) -> list[Any]:
        items: list[Any] = self.check(name, isinstance(self.value.get(name), list), "a list")
        return items

    def tables(self, name: str) -> list[JsonObject]:
        items = enumerate(self.items(name))
        return [JsonObject(item, self._place, f"{self._key}.{name}[{number}]") for number, item in items]

    def count(self, name: str, *, least: int = 0, most: int = LARGEST) -> int:
        value = self.value.get(name)
        right = type(value) is int and least <= value <= most
        return int(self.check(name, right, f"an integer from {least} to {most}"))

    def sha256(self, name: str) -> str:
        value = self.value.get(name)
        right = isinstance(value, str) and len(value) == 64 and set(value) <= set("0123456789abcdef")
        return str(self.check(name, right, "a sha256 in hexadecimal digits"))

    def equal(self, name: str, expected: Any) -> None:
        value = self.value.get(name)
        self.check(name, type(value) is type(expected) and value == expected, json.dumps(expected))
