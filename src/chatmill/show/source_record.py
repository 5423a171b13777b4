"""Read the original record of a conversation from its input file, and check whether the record has changed since the
dataset was built.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from chatmill.errors import ChatmillError, DataError, RecordError
from chatmill.records import MAX_LINE_BYTES, FilePart, Record, ShapeOptions, read_part, record_key
from chatmill.records.files import compression, kind, open_bytes
from chatmill.records.units import is_array
from chatmill.show.text import visible

MAX_CHARACTERS = 200_000
"""Maximum number of characters of a record that are displayed."""
STEP = 1024
"""The number of lines between two cached line offsets."""
CHUNK = 1 << 22
LINE_SUFFIXES = (".jsonl", ".txt")
MULTILINE_SHAPES = ("oasst1", "transcript-stream")
"""Shapes whose records span several lines."""


@dataclass(frozen=True)
class SourceRecord:
    name: str
    line: int
    raw: bytes
    as_read: bool
    """Whether `raw` is the parsed record instead of a line of the file."""
    same: bool | None
    """Whether the hash of the record equals the hash stored in the dataset; None if the dataset has no hash."""

    def for_display(self) -> dict[str, Any]:
        """Return a JSON object for the viewer: the record as escaped text (JSON is indented), and the flags `as_read`,
        `same` and `cut`.
        """
        text = self.raw.rstrip(b"\r\n").decode("utf-8", "backslashreplace")
        with suppress(ValueError, RecursionError):
            text = json.dumps(json.loads(self.raw), indent=2, ensure_ascii=False)
        # JSON can contain lone surrogates, which cannot be encoded as UTF-8.
        text = text.encode("utf-8", "backslashreplace").decode()
        shown, cut = visible(text, keep="\n", limit=MAX_CHARACTERS), len(text) > MAX_CHARACTERS
        return {"text": shown, "as_read": self.as_read, "same": self.same, "cut": cut}

    def for_export(self) -> str:
        """Return the record as one line of text; raise `DataError` if the record has changed since the dataset was
        built.
        """
        if self.same is False:
            raise DataError(f"{self.name}:{self.line}: has changed since the dataset was prepared; prepare it again")
        try:
            return self.raw.rstrip(b"\r\n").decode()
        except UnicodeDecodeError:
            raise DataError(f"{self.name}:{self.line}: is not UTF-8") from None


def source_record(
    name: str,
    line: int,
    *,
    shape: str | None,
    options: ShapeOptions | None = None,
    key: Sequence[int],
    folders: Sequence[Path],
) -> SourceRecord:
    """Return the record at a line of an input file; `folders` are searched for the file `name`."""
    raw, records, has_lines = _raw_record(name, line, shape, options, folders)
    wanted = np.array(key, dtype="<u8").tobytes()
    same = wanted in map(record_key, records) if records and any(wanted) else None
    return SourceRecord(name, line, raw, not has_lines, same)


def _raw_record(
    name: str, line: int, shape: str | None, options: ShapeOptions | None, folders: Sequence[Path]
) -> tuple[bytes, list[Record], bool]:
    """Return the bytes of a record, the records parsed from these bytes, and whether the bytes are one line of the
    file.
    """
    path, options = _file(name, folders), options or ShapeOptions()
    has_lines = kind(path) in LINE_SUFFIXES and shape not in MULTILINE_SHAPES
    try:
        in_array = has_lines and is_array(path, limit=MAX_LINE_BYTES)
        has_lines = has_lines and not in_array
        if has_lines:
            raw, start = _line(path, line)
            records = _parsed_line(FilePart(path, shape, "", options=options), line, raw, start) if shape else []
        else:
            part = FilePart(path, shape or "messages", "", options=options, is_array=in_array)
            records = [_parsed(part, line)]
            raw = msgspec.json.encode(records[0])
    except RecordError as fault:
        raise DataError(f"{name}:{line}: can no longer be read ({fault.what})") from None
    except OSError as error:
        raise DataError(f"{name}: cannot be read ({error.strerror})") from None
    return raw, records, has_lines


def _file(name: str, folders: Sequence[Path]) -> Path:
    if Path(name).is_absolute():
        raise DataError(f"{name}: is an absolute path; only relative paths are read")
    for folder in folders:
        if (path := folder / name).is_file():
            return path
    raise DataError(
        f"{name}: not found; start chatmill in the folder that contains it, or pass that folder with --records"
    )


def _parsed_line(part: FilePart, line: int, raw: bytes, start: int | None) -> list[Record]:
    """Return the records at a line of a file, or an empty list if the line cannot be parsed."""
    with suppress(ChatmillError):
        if start is None:
            return [_parsed(part, line)]
        return list(read_part(replace(part, start=start, stop=start + len(raw)), on_fault=_raise))
    return []


def _parsed(part: FilePart, line: int) -> Record:
    for record in read_part(part, on_fault=lambda fault: None):
        if record.line == line:
            return record
    raise DataError(f"{part.path}:{line}: no longer contains a record")


def _line(path: Path, line: int) -> tuple[bytes, int | None]:
    """Return one line of a file, including its line break, and the byte offset of the line, or None for a compressed
    file.
    """
    if line < 1:
        raise DataError(f"{path}: has no line {line}")
    if compression(path):
        with open_bytes(path) as file:
            if raw := next(islice(file, line - 1, line), b""):
                return raw, None
    else:
        status = path.stat()
        offsets = _line_offsets(path, status.st_size, status.st_mtime_ns)
        step, skipped = divmod(line - 1, STEP)
        if step < len(offsets):
            with path.open("rb") as file:
                file.seek(int(offsets[step]))
                for _ in range(skipped):
                    file.readline()
                start = file.tell()
                if raw := file.readline():
                    return raw, start
    raise DataError(f"{path}: no longer has a line {line}")


@lru_cache(maxsize=16)
def _line_offsets(path: Path, size: int, changed: int) -> NDArray[np.int64]:
    """Return the byte offset of every STEP-th line of a file. `size` and `changed` are used only as part of the
    cache key, so that a changed file is read again.
    """
    offsets, lines, before = [np.zeros(1, dtype=np.int64)], 0, 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            ends = np.flatnonzero(np.frombuffer(chunk, dtype=np.uint8) == 10)
            offsets.append(ends[(STEP - 1 - lines) % STEP :: STEP] + (before + 1))
            lines += len(ends)
            before += len(chunk)
    return np.concatenate(offsets)


def _raise(fault: RecordError) -> None:
    raise fault
