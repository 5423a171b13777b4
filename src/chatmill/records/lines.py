"""A file as numbered units of bytes: lines, or the conversations of a transcript stream.

Of a unit longer than the limit only a beginning is passed on, long enough for the parser to refuse it; the remaining
bytes are skipped and never held.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from chatmill.records.files import Units, open_bytes
from chatmill.records.shapes.transcript import EOS

_CHUNK = 1 << 18
BLOCK = 1 << 18
"""Bytes of lines that are parsed together: small enough that they and their records stay in the CPU cache."""
WIDE_BLOCK = 1 << 20
"""The same for columns, which are compact, and cheaper per row the more rows they have."""


def lines(path: Path, *, limit: int) -> Units:
    """The lines of a file with their numbers, without line ends and blank lines."""
    before = 0
    for block in blocks(path, limit=limit):
        pieces = split(block)
        for number, line in enumerate(pieces, before + 1):
            if not is_blank(line):
                yield number, line
        before += len(pieces)


def blocks(path: Path, *, limit: int, start: int = 0, stop: int | None = None, size: int = BLOCK) -> Iterator[bytes]:
    """The lines of bytes [start, stop), some at a time. `start` and `stop` are beginnings of lines, as from `cut`.

    Lines before a fault of the file are yielded before the fault is raised.
    """
    held = bytearray()
    with open_bytes(path) as file:
        if start:
            file.seek(start)
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


def cut(path: Path, *, size: int) -> Iterator[tuple[int, int]]:
    """Cut an uncompressed file of lines into pieces of at least `size` bytes: (start, stop) each.

    Only the ends of the pieces are read, so that planning is fast for very large files.
    """
    end = path.stat().st_size
    with path.open("rb") as file:
        start = 0
        while start < end:
            # From the last byte that the piece must have to the end of its line.
            stop = file.seek(min(start + size, end) - 1)
            stop += _skip_line(file)
            yield start, stop
            start = stop


def conversations(path: Path, *, limit: int, chunk: int = _CHUNK) -> Units:
    """The pieces of a stream between `<|EOS|>` marks with the line each begins on, without blank ones."""
    held, searched, overlong, line = bytearray(), 0, False, 1
    with open_bytes(path) as file:
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
