"""Expand inputs to files, and open files whether compressed or not."""

from __future__ import annotations

import glob
import gzip
import io
import zlib
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from chatmill.errors import DataError, RecordError, one_line
from chatmill.plain_file import local_path
from chatmill.records.read_log import LoggedFile, ReadLog

SUFFIXES = (".jsonl", ".json", ".txt", ".jsonl.gz", ".json.gz", ".txt.gz", ".parquet")
Units = Generator[tuple[int, bytes], None, None]
"""The bytes of each record of a file, with the line (of a table, the row) that it begins on, from 1."""

_BOM = b"\xef\xbb\xbf"
_BUFFER = 1 << 18


def expand(inputs: Sequence[str | Path]) -> list[Path]:
    """The files of names and globs: in the given order, sorted within a glob, each file once."""
    given = [inputs] if isinstance(inputs, str | Path) else inputs
    files: dict[Path, Path] = {}
    for name in given:
        for path in _matches(local_path(name)):
            suffix(path)
            files.setdefault(path.resolve(), path)
    return list(files.values())


def suffix(path: Path) -> str:
    """The suffix that decides how a file is read; an unknown one is an error."""
    for known in SUFFIXES:
        if path.name.lower().endswith(known):
            return known
    raise DataError(f"{shown(path)}: not a kind of file that is read; expected {', '.join(SUFFIXES)}")


def source_name(path: Path) -> str:
    """The name by which records are mixed: `conversations` for `data/conversations.jsonl.gz`."""
    return path.name[: -len(suffix(path))]


def shown(path: Path) -> str:
    """A path safe to print on one line."""
    return one_line(str(path), 1000)


@contextmanager
def open_bytes(path: Path, *, log: ReadLog | None = None, start: int = 0) -> Iterator[io.BufferedReader]:
    """The bytes of a file from `start` on, after its byte order mark, decompressed where its name ends in `.gz`.

    `log` gets the bytes of the file itself as they are read.
    """
    try:
        raw = io.FileIO(path) if log is None else LoggedFile(path, log)
    except OSError as error:
        raise DataError(f"{shown(path)}: cannot be opened; {error.strerror or error}") from None
    with raw:
        file: Any = raw
        if path.name.lower().endswith(".gz"):
            # GzipFile reads like a raw file but is not declared as one.
            file = io.BufferedReader(cast(Any, _Gunzip(fileobj=io.BufferedReader(raw, _BUFFER))), _BUFFER)
        if start or file.read(len(_BOM)) != _BOM:
            file.seek(start)
        # Only now: what is read ahead would be in the log.
        yield io.BufferedReader(raw, _BUFFER) if file is raw else file


class _Gunzip(gzip.GzipFile):
    """Decompression that raises a `RecordError` for corrupt data."""

    def readinto(self, buffer: Any) -> int:
        try:
            return super().readinto(buffer)
        except EOFError:
            right = "expected the whole file; copy it again"
            raise RecordError("the compressed file is cut off", right, kind="gzip") from None
        except (gzip.BadGzipFile, zlib.error):
            right = "expected a whole gzip file; copy it again"
            raise RecordError("the compressed data is corrupt", right, kind="gzip") from None


def _matches(path: Path) -> list[Path]:
    if path.is_dir():
        raise DataError(f"{shown(path)}: is a folder; name its files with a glob, like {shown(path / '*.jsonl')}")
    if path.exists():
        return [path]
    if not glob.has_magic(str(path)):
        raise DataError(f"{shown(path)}: no such file; expected a file or a glob")
    # As in a shell, and unlike Path.glob, a star does not match hidden files.
    names = glob.glob(str(path), recursive=True)  # noqa: PTH207
    matches = sorted(match for name in names if (match := Path(name)).is_file())
    if not matches:
        raise DataError(f"{shown(path)}: the glob matches no file; expected at least one")
    return matches
