"""Split a file into unparsed records: lines, array elements, or conversations of a transcript stream.

A record over the size limit is truncated to slightly more than the limit, so that memory use is bounded and the parser
still rejects the record.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import closing
from typing import BinaryIO

from chatmill.errors import RecordError
from chatmill.records.files import Units, open_bytes
from chatmill.records.read_log import ReadLog
from chatmill.records.shapes import RAW_BYTES
from chatmill.records.shapes.decode import decode
from chatmill.records.shapes.transcript import EOS
from chatmill.remote import objects
from chatmill.remote.threads import in_threads
from chatmill.remote.urls import Place, Url

_CHUNK = 1 << 18
BLOCK = 1 << 18
"""Block size in bytes; a block fits in the CPU cache."""
WIDE_BLOCK = 1 << 22
"""Block size in bytes when lines are parsed into columns, which is faster with larger blocks."""
LINE_END_BYTES = 1 << 16
"""Number of bytes per request when searching a remote file for the end of a line."""
_SPACE = b" \t\r\n"
_STRING = rb'(?:[^"\\]++|\\.)*+("?)'
_STRING_END = re.compile(_STRING, re.DOTALL)
_TOKEN = re.compile(rb'"' + _STRING + rb"|[{}\[\],]", re.DOTALL)


def lines(path: Place, *, limit: int, log: ReadLog | None = None) -> Units:
    """Yield the number and the bytes of each line that is not blank."""
    before = 0
    for block in blocks(path, limit=limit, log=log):
        pieces = split(block)
        for number, line in enumerate(pieces, before + 1):
            if not is_blank(line):
                yield number, line
        before += len(pieces)


def blocks(
    path: Place,
    *,
    limit: int,
    start: int = 0,
    stop: int | None = None,
    size: int = BLOCK,
    log: ReadLog | None = None,
) -> Iterator[bytes]:
    """Yield the bytes [start, stop) of a file in blocks of whole lines. `start` and `stop` must be at line starts, as
    returned by `cut`. With `stop`, the blocks have about equal sizes, so that the last block is not much smaller.
    """
    held = bytearray()
    with open_bytes(path, log=log, start=start, stop=stop) as file:
        left = 2**63 if stop is None else stop - file.tell()
        if stop is not None:
            size = math.ceil(left / max(1, round(left / size)))
        while left > 0 and (data := file.read1(min(size, left))):
            left -= len(data)
            if end := data.rfind(b"\n") + 1:
                yield b"".join((held, memoryview(data)[:end])) if held or end < len(data) else data
                held.clear()
            held += data[end:]
            # The byte after the limit may be the first byte of a two-byte line end.
            if len(held) > limit + 1:
                yield bytes(held[: limit + 2]) + b"\n"
                held.clear()
                left -= _skip_line(file)
    if held:
        yield bytes(held)


def split(block: bytes) -> list[bytes]:
    return block.replace(b"\r\n", b"\n").removesuffix(b"\n").split(b"\n")


def is_blank(line: bytes) -> bool:
    return not line or line.isspace()


def cut(path: Place, *, size: int, end: int) -> Iterator[tuple[int, int]]:
    """Split the first `end` bytes of a file at line ends, and yield byte ranges (start, stop). All ranges except the
    last have at least `size` bytes.
    """
    if isinstance(path, Url):
        yield from _cut_object(path, size=size, end=end)
        return
    with path.open("rb") as file:
        start = 0
        while start < end:
            # Extend the piece to the end of its last line. The file may have shrunk in the meantime.
            stop = file.seek(min(start + size, end) - 1)
            stop = min(stop + max(1, _skip_line(file)), end)
            yield start, stop
            start = stop


def _cut_object(url: Url, *, size: int, end: int) -> Iterator[tuple[int, int]]:
    """Like `cut`, but for a file in an object store; parallel requests search for the line ends."""
    least = range(size - 1, end - 1, size)
    stops = in_threads(lambda at: _line_end(url, at, end), least, here=url.scheme == "memory")
    start = 0
    # If a line is longer than a piece, several pieces have the same end, so remove duplicates.
    for stop in sorted({*stops, end} - {0}):
        yield start, stop
        start = stop


def _line_end(url: Url, at: int, end: int) -> int:
    while at < end and (data := objects.read(url, at, min(end, at + LINE_END_BYTES))):
        if stop := data.find(b"\n") + 1:
            return at + stop
        at += len(data)
    return end


def conversations(path: Place, *, limit: int, chunk: int = _CHUNK, log: ReadLog | None = None) -> Units:
    """Yield the first line number and the text of each conversation in a transcript stream, except blank ones."""
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
            # A marker may span two chunks.
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
    """If a conversation is not blank, yield its line number and its text without leading whitespace."""
    text = bytes(held[: min(end, limit + 1)])
    begin = len(text) - len(text.lstrip())
    if begin < len(text):
        # Leading whitespace is removed, but counts toward the size limit.
        yield line + text.count(b"\n", 0, begin), text if len(text) > limit else text[begin:]


def _skip_line(file: BinaryIO) -> int:
    skipped = 0
    while piece := file.readline(_CHUNK):
        skipped += len(piece)
        if piece.endswith(b"\n"):
            break
    return skipped


# Array elements are found by their brackets and quotes, so an invalid element causes only one error.


def is_array(path: Place, *, limit: int) -> bool:
    """Whether a .jsonl file contains a single JSON array of records."""
    with closing(lines(path, limit=limit)) as numbered:
        try:
            _, first = next(numbered, (0, b""))
            if not first.lstrip(_SPACE).startswith(b"["):
                return False
            if not _is_json(first):
                return True
            # A single line may also be one record, given as the list of its messages.
            items = decode(first)
            is_record = all(isinstance(item, dict) and not {"role", "from"}.isdisjoint(item) for item in items)
            return not (items and is_record) and next(numbered, None) is None
        except (RecordError, RecursionError):
            return False


def elements(path: Place, *, limit: int, chunk: int = _CHUNK, log: ReadLog | None = None) -> Units:
    """Yield the records of a `.json` file, which can contain a JSON array, a single object, or one object per line."""
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
    """Yield the line number and the text of each array element; the file must be positioned after the opening `[`.

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
            raise _array_fault("text after the end of the array", "expected one array in the file", begins, element)
        if sign:
            ended = sign == b"]"
            # `[]` has no elements; a comma must have an element on each side.
            if element or count or not ended:
                yield begins, bytes(element if len(element) > limit else element.rstrip(_SPACE))
            count += 1
            element.clear()
    if not ended:
        raise _array_fault("the file ends inside its array", 'expected "]" at the end of the file', begins, element)


def _pieces(file: BinaryIO, chunk: int) -> Iterator[tuple[bytes, bytes]]:
    """Yield (text, delimiter) pairs: the delimiter is the comma or bracket after an element, or empty if the element
    continues.
    """
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
                # Treat all text after the end of the array as one element.
                depth = math.inf if sign == b"]" else 0
        # Keep a backslash at the end of the chunk, and read it again together with the byte that it escapes.
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
