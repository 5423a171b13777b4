"""The record a conversation was made of, read again from its file, and whether it still says the same."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from chatmill.errors import ChatmillError, DataError, RecordError
from chatmill.records import FilePart, Record, read_part, record_key
from chatmill.records.files import open_bytes, suffix
from chatmill.show.text import visible

MOST_SHOWN = 200_000
"""Characters of a record that are shown."""
STEP = 1024
"""Lines from one whose place is remembered to the next."""
PIECE = 1 << 22
LINED = (".jsonl", ".txt")
TREES = ("oasst1", "transcript-stream")
"""Shapes whose records run over several lines."""


@dataclass(frozen=True)
class RawRecord:
    """A record as text that may be shown."""

    text: str
    as_read: bool
    """Not the bytes of the file, which has no line for each record, but what was read from them."""
    same: bool | None
    """Whether it says what the conversation was made of; None if that cannot be told."""
    cut: bool


def raw_record(name: str, line: int, *, shape: str | None, key: Sequence[int], folders: Sequence[Path]) -> RawRecord:
    """The record at a line of a file, looked for in these folders; `DataError` says why it cannot be shown."""
    path = _found(name, folders)
    is_lined = suffix(path).removesuffix(".gz") in LINED and shape not in TREES
    try:
        if not is_lined:
            record = _parsed(FilePart(path, shape or "messages", ""), line)
            return _shown(msgspec.json.encode(record), [record], key, as_read=True)
        raw, start = _line(path, line)
        return _shown(raw, _records(path, shape, line, raw, start), key, as_read=False)
    except RecordError as fault:
        raise DataError(f"{visible(name)}:{line}: cannot be read any more ({fault.what})") from None
    except OSError as error:
        raise DataError(f"{visible(name)}: cannot be read ({error.strerror})") from None


def _found(name: str, folders: Sequence[Path]) -> Path:
    if Path(name).is_absolute():
        raise DataError(f"{visible(name)}: is named by a place on one machine, and is not looked for")
    for folder in folders:
        if (path := folder / name).is_file():
            return path
    raise DataError(f"{visible(name)}: is not here; start chatmill where it lies, or name that folder")


def _records(path: Path, shape: str | None, line: int, raw: bytes, start: int | None) -> list[Record]:
    """What a line says, if that can be told. In a compressed file it cannot be gone to, and is read up to."""
    if shape is None:
        return []
    try:
        if start is None:
            return [_parsed(FilePart(path, shape, ""), line)]
        return list(read_part(FilePart(path, shape, "", start=start, stop=start + len(raw)), on_fault=_stop))
    except ChatmillError:
        return []


def _parsed(part: FilePart, line: int) -> Record:
    for record in read_part(part, on_fault=lambda fault: None):
        if record.line == line:
            return record
    raise DataError(f"{part.path}:{line}: holds no record any more")


def _shown(raw: bytes, records: Sequence[Record], key: Sequence[int], *, as_read: bool) -> RawRecord:
    wanted = np.array(key, dtype="<u8").tobytes()
    known = any(wanted)
    same = any(record_key(record) == wanted for record in records) if records and known else None
    text = raw.rstrip(b"\r\n").decode("utf-8", "backslashreplace")
    with contextlib.suppress(ValueError, RecursionError):
        text = json.dumps(json.loads(raw), indent=2, ensure_ascii=False)
    # Surrogates that JSON may name are no text.
    text = text.encode("utf-8", "backslashreplace").decode()
    return RawRecord(visible(text, keep="\n", limit=MOST_SHOWN), as_read, same, len(text) > MOST_SHOWN)


def _line(path: Path, line: int) -> tuple[bytes, int | None]:
    """One line of a file with its end, and where it begins; None in a compressed file, which is read up to there."""
    if line < 1:
        raise DataError(f"{path}: has no line {line}")
    if suffix(path).endswith(".gz"):
        with open_bytes(path) as file:
            for number, raw in enumerate(file, 1):
                if number == line:
                    return raw, None
    else:
        status = path.stat()
        places = _places(path, status.st_size, status.st_mtime_ns)
        step, rest = divmod(line - 1, STEP)
        if step < len(places):
            with path.open("rb") as file:
                file.seek(int(places[step]))
                for _ in range(rest):
                    file.readline()
                start = file.tell()
                if raw := file.readline():
                    return raw, start
    raise DataError(f"{path}: has no line {line} any more")


@lru_cache(maxsize=16)
def _places(path: Path, size: int, changed: int) -> NDArray[np.int64]:
    """Where every 1,024th line of a file begins; read once for each state of the file."""
    places, lines, before = [np.zeros(1, dtype=np.int64)], 0, 0
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            ends = np.flatnonzero(np.frombuffer(piece, dtype=np.uint8) == 10)
            places.append(ends[(STEP - 1 - lines) % STEP :: STEP] + (before + 1))
            lines += len(ends)
            before += len(piece)
    return np.concatenate(places)


def _stop(fault: RecordError) -> None:
    raise fault
