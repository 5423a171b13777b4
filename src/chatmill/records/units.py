"""A file as numbered units of bytes, one for each record: lines, the elements of an array, the conversations of a
transcript stream, or the rows of a table.

Of a unit longer than the limit only a beginning is passed on, long enough for the parser to refuse it; the remaining
bytes are skipped and never held.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from chatmill.errors import DataError, RecordError, one_line
from chatmill.records.files import Units, open_bytes, shown
from chatmill.records.read_log import ReadLog
from chatmill.records.shapes import RAW_BYTES
from chatmill.records.shapes.decode import BYTES, decode
from chatmill.records.shapes.fields import MEDIA_KEYS
from chatmill.records.shapes.transcript import EOS

_CHUNK = 1 << 18
BLOCK = 1 << 18
"""Bytes of lines that are parsed together: small enough that they and their records stay in the CPU cache."""
WIDE_BLOCK = 1 << 20
"""The same for columns, which are compact, and cheaper per row the more rows they have."""
TABLE_ROWS = 256
"""Rows of a table that are decoded together; fewer where they hold images."""
_SPACE = b" \t\r\n"
_STRING = rb'(?:[^"\\]++|\\.)*+("?)'
_STRING_END = re.compile(_STRING, re.DOTALL)
_TOKEN = re.compile(rb'"' + _STRING + rb"|[{}\[\],]", re.DOTALL)
# Types that JSON does not have are written as text.
_ENCODER = msgspec.json.Encoder(enc_hook=str)


def lines(path: Path, *, limit: int, log: ReadLog | None = None) -> Units:
    """The lines of a file with their numbers, without line ends and blank lines."""
    before = 0
    for block in blocks(path, limit=limit, log=log):
        pieces = split(block)
        for number, line in enumerate(pieces, before + 1):
            if not is_blank(line):
                yield number, line
        before += len(pieces)


def blocks(
    path: Path,
    *,
    limit: int,
    start: int = 0,
    stop: int | None = None,
    size: int = BLOCK,
    log: ReadLog | None = None,
) -> Iterator[bytes]:
    """The lines of bytes [start, stop), some at a time. `start` and `stop` are beginnings of lines, as from `cut`.

    Lines before a fault of the file are yielded before the fault is raised.
    """
    held = bytearray()
    with open_bytes(path, log=log, start=start) as file:
        left = 2**63 if stop is None else stop - file.tell()
        while left > 0 and (data := file.read1(min(size, left))):
            left -= len(data)
            if end := data.rfind(b"\n") + 1:
                yield b"".join((held, memoryview(data)[:end])) if held or end < len(data) else data
                held.clear()
            held += data[end:]
            # One byte over the limit, because the last byte kept may be the first of a two-byte line end.
            if len(held) > limit + 1:
                yield bytes(held[: limit + 2]) + b"\n"
                held.clear()
                left -= _skip_line(file)
    if held:
        yield bytes(held)


def split(block: bytes) -> list[bytes]:
    """All lines of a block, without line ends."""
    return block.replace(b"\r\n", b"\n").removesuffix(b"\n").split(b"\n")


def is_blank(line: bytes) -> bool:
    return not line or line.isspace()


def cut(path: Path, *, size: int, end: int) -> Iterator[tuple[int, int]]:
    """Cut the first `end` bytes of an uncompressed file of lines into pieces of at least `size` bytes: (start, stop).

    Only the ends of the pieces are read, so that planning is fast for very large files.
    """
    with path.open("rb") as file:
        start = 0
        while start < end:
            # From the last byte that the piece must have to the end of its line; a file may have grown or shrunk since.
            stop = file.seek(min(start + size, end) - 1)
            stop = min(stop + max(1, _skip_line(file)), end)
            yield start, stop
            start = stop


def conversations(path: Path, *, limit: int, chunk: int = _CHUNK, log: ReadLog | None = None) -> Units:
    """The pieces of a stream between `<|EOS|>` marks with the line each begins on, without blank ones."""
    held, searched, overlong, line = bytearray(), 0, False, 1
    with open_bytes(path, log=log) as file:
        while data := file.read(chunk):
            held += data
            while (end := held.find(EOS, searched)) >= 0:
                if not overlong:
                    yield from _piece(held, end, line, limit)
                line += held.count(b"\n", 0, end)
                del held[: end + len(EOS)]
                searched, overlong = 0, False
            # A mark may straddle two chunks.
            searched = max(0, len(held) - len(EOS) + 1)
            if len(held) > limit + len(EOS):
                if not overlong:
                    yield from _piece(held, len(held), line, limit)
                    overlong = True
                line += held.count(b"\n", 0, searched)
                del held[:searched]
                searched = 0
        if not overlong:
            yield from _piece(held, len(held), line, limit)


def _piece(held: bytearray, end: int, line: int, limit: int) -> Units:
    """The text before `end` without leading space, at the line of its first character."""
    text = bytes(held[: min(end, limit + 1)])
    begin = len(text) - len(text.lstrip())
    if begin < len(text):
        # Leading space is dropped for the line number, but counts for the length of the piece.
        yield line + text.count(b"\n", 0, begin), text if len(text) > limit else text[begin:]


def _skip_line(file: BinaryIO) -> int:
    """Skip to the end of a line and return the number of bytes."""
    skipped = 0
    while piece := file.readline(_CHUNK):
        skipped += len(piece)
        if piece.endswith(b"\n"):
            break
    return skipped


# The elements of an array are located by brackets and quotes and decoded later: a broken element is one fault.


def is_array(path: Path, *, limit: int) -> bool:
    """Whether a file of lines is one JSON array instead: its first line does not end it, or is all there is."""
    with closing(lines(path, limit=limit)) as numbered:
        try:
            _, first = next(numbered, (0, b""))
            if not first.lstrip(_SPACE).startswith(b"["):
                return False
            if not _is_json(first):
                return True
            # A single line may also be one record, the list of its messages.
            items = decode(first)
            is_record = all(isinstance(item, dict) and not {"role", "from"}.isdisjoint(item) for item in items)
            return not (items and is_record) and next(numbered, None) is None
        except (RecordError, RecursionError):
            return False


def elements(path: Path, *, limit: int, chunk: int = _CHUNK, log: ReadLog | None = None) -> Units:
    """The records of a `.json` file with the line each begins on: elements of an array, one object, or lines."""
    with open_bytes(path, log=log) as file:
        line = 1
        while (first := file.read(1)) and first in _SPACE:
            line += first == b"\n"
        if first == b"[":
            yield from _elements(file, line, limit=limit, chunk=chunk)
            return
    with closing(lines(path, limit=limit, log=log)) as numbered:
        line, begin = next(numbered, (0, b""))
    if _is_json(begin):
        yield from lines(path, limit=limit, log=log)
    elif begin:
        with open_bytes(path, log=log) as file:
            yield line, file.read(limit + 1)


def _elements(file: BinaryIO, line: int, *, limit: int, chunk: int) -> Units:
    """The elements of an array from after its `[` on, each with its line, without the space around it.

    {"a": 1}, {"b": [2, 3]} ]  ->  {"a": 1}  ·  {"b": [2, 3]}
    """
    element, begins, count, ended = bytearray(), line, 0, False
    for piece, sign in _pieces(file, chunk):
        solid = piece if element else piece.lstrip(_SPACE)
        if not element:
            begins = line + piece.count(b"\n", 0, len(piece) - len(solid))
        element += (solid.rstrip(_SPACE) if sign else solid)[: limit + 1 - len(element)]
        line += piece.count(b"\n")
        if ended and element:
            raise _array_fault(
                "text stands after the end of the array", "expected one array in the file", begins, element
            )
        if sign:
            ended = sign == b"]"
            # `[]` has no element; a comma has one on both sides.
            if element or count or not ended:
                yield begins, bytes(element if len(element) > limit else element.rstrip(_SPACE))
            count += 1
            element.clear()
    if not ended:
        raise _array_fault("the file ends inside its array", 'expected "]" at the end', begins, element)


def _pieces(file: BinaryIO, chunk: int) -> Iterator[tuple[bytes, bytes]]:
    """The text of an array in pieces of its elements, each with the comma or bracket that ends the element, if any."""
    depth, held = 0.0, b""
    in_string = False
    while data := file.read(chunk):
        data, start, at = held + data, 0, 0
        while token := (_STRING_END if in_string else _TOKEN).search(data, at):
            at, sign, in_string = token.end(), token[0], token[1] == b""
            if in_string:
                break
            if sign in (b"{", b"["):
                depth += 1
            elif depth and sign in (b"}", b"]"):
                depth -= 1
            elif not depth and sign in (b",", b"]"):
                yield data[start : token.start()], sign
                start = at
                # After the array nothing ends an element.
                depth = math.inf if sign == b"]" else 0
        # A backslash at the end is read again with the byte that it escapes.
        stop = at if in_string else len(data)
        yield data[start:stop], b""
        held = data[stop:]


def _array_fault(what: str, right: str, line: int, raw: bytearray) -> RecordError:
    fault = RecordError(what, right, kind="array")
    fault.line, fault.raw = line, bytes(raw[:RAW_BYTES])
    return fault


def _is_json(line: bytes) -> bool:
    try:
        decode(line)
    except RecordError:
        return False
    except RecursionError:
        pass
    return True


def table_rows(path: Path, *, log: ReadLog | None = None) -> Units:
    """The rows of a Parquet file, each as one JSON object, with their numbers, from 1.

    A missing number, which is NaN in a table, becomes null. Bytes become `BYTES`: no field of a conversation has that
    type, but whether a record has images decides whether it is refused.
    """
    try:
        import pyarrow
        from pyarrow import compute, parquet
    except ImportError:
        raise DataError(f"{shown(path)}: Parquet needs pyarrow; pip install 'chatmill[parquet]'") from None
    number = 0
    with open_bytes(path, log=log) as file:
        try:
            table = parquet.ParquetFile(file)
            names = table.schema_arrow.names
            if repeated := [name for at, name in enumerate(names) if name in names[:at]]:
                what = f'the table has two columns "{one_line(repeated[0])}"'
                raise RecordError(what, "expected each name once", kind="duplicate_key")
            of_bytes = [field.name for field in table.schema_arrow if _holds_bytes(field.type, pyarrow.types)]
            media = [name for name in of_bytes if name in MEDIA_KEYS]
            others = {name: BYTES for name in of_bytes if name not in media}
            columns = [name for name in names if name not in others]
            size = TABLE_ROWS // 16 if media else TABLE_ROWS
            for batch in table.iter_batches(size, columns=columns, use_threads=False):
                present = {name: _is_present(batch.column(name), compute, pyarrow.types) for name in media}
                for at, row in enumerate(batch.drop_columns(media).to_pylist()):
                    number += 1
                    marks = {name: BYTES if values[at] else None for name, values in present.items()}
                    yield number, _ENCODER.encode({**row, **marks, **others})
            if number != table.metadata.num_rows:
                raise ValueError("rows are missing")
        except RecordError:
            raise
        except (pyarrow.ArrowException, OSError, ValueError, OverflowError, RecursionError):
            fault = RecordError("the Parquet file is corrupt", "expected a whole file; copy it again", kind="parquet")
            fault.line = number + 1
            raise fault from None


def _is_present(column: Any, compute: Any, types: Any) -> list[bool]:
    """By row: whether a column holds anything, where an empty list is nothing."""
    if types.is_list(column.type) or types.is_large_list(column.type):
        return [bool(length) for length in compute.list_value_length(column).to_pylist()]
    present: list[bool] = column.is_valid().to_pylist()
    return present


def _holds_bytes(kind: Any, types: Any) -> bool:
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
        return True
    return any(_holds_bytes(kind.field(index).type, types) for index in range(kind.num_fields))
