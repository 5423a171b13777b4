"""A `.json` file as numbered units of bytes: the elements of an array, one object, or lines.

Elements are located by brackets and quotes and decoded later: a broken element is one fault, and only one element is in
memory at a time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import BinaryIO

from chatmill.errors import RecordError
from chatmill.records.files import Units, open_bytes
from chatmill.records.lines import lines
from chatmill.records.shapes import RAW_BYTES
from chatmill.records.shapes.decode import decode

_CHUNK = 1 << 18
_SPACE = b" \t\r\n"
# Commas matter between elements only.
_BETWEEN = re.compile(rb'["{}\[\],]')
_INSIDE = re.compile(rb'["{}\[\]]')
_SOLID = re.compile(rb"[^ \t\r\n]")


def units(path: Path, *, limit: int, chunk: int = _CHUNK) -> Units:
    """The records of a `.json` file with the line each begins on."""
    with open_bytes(path) as file:
        array = _Array(file, limit=limit, chunk=chunk)
        if array.opens():
            yield from array
            return
    with closing(lines(path, limit=limit)) as numbered:
        first = next(numbered, None)
    if first is None:
        return
    if _is_json(first[1]):
        yield from lines(path, limit=limit)
        return
    with open_bytes(path) as file:
        yield first[0], file.read(limit + 1)


class _Array:
    """The elements of an array, each with its line, without the space around it.

    [ {"a": 1}, {"b": [2, 3]} ]  ->  {"a": 1}  ·  {"b": [2, 3]}
    """

    def __init__(self, file: BinaryIO, *, limit: int, chunk: int) -> None:
        self.file, self.limit, self.chunk = file, limit, chunk
        self.held = bytearray()
        self.line = 1
        """The line of the first byte held."""

    def opens(self) -> bool:
        """Read past the `[`, if the file begins with one."""
        self._skip_space()
        opened = self.held.startswith(b"[")
        self._drop(opened)
        return opened

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        any_before = False
        while True:
            self._skip_space()
            line = self.line
            element, last = self._element()
            # `[]` has no element; a comma has one on both sides.
            if element or any_before or not last:
                yield line, element
            any_before = True
            if last:
                break
        self._skip_space()
        if self.held:
            raise self._fault("text stands after the end of the array", "expected one array in the file", self.line)

    def _element(self) -> tuple[bytes, bool]:
        """The bytes up to the comma or bracket that ends an element, and whether it was the bracket."""
        line, position, depth, beginning = self.line, 0, 0, b""
        while True:
            token = (_INSIDE if depth else _BETWEEN).search(self.held, position)
            position = token.start() if token else len(self.held)
            sign = token[0] if token else b""
            if sign == b'"' and (end := _string_end(self.held, position + 1)) is not None:
                position = end + 1
                continue
            if sign in (b"", b'"'):
                # Of an element over the limit only the beginning is kept.
                if not beginning and len(self.held) > self.limit:
                    beginning = bytes(self.held[: self.limit + 1])
                if beginning:
                    self._forget(position)
                    position = 0
                if not self._read():
                    raise self._fault("the file ends inside its array", 'expected "]" at the end', line)
                continue
            if sign in b"{[":
                depth += 1
            elif depth:
                depth -= 1
            elif sign in b",]":
                break
            position += 1
        element = beginning or bytes(self.held[:position]).rstrip(_SPACE)[: self.limit + 1]
        self._drop(position + 1)
        return element, sign == b"]"

    def _forget(self, position: int) -> None:
        """Drop what is held, but stay inside a string that opens at `position`."""
        slashes = _slashes(self.held, len(self.held))
        inside = position < len(self.held)
        self._drop(len(self.held))
        if inside:
            self.held += b'"' + b"\\" * (slashes % 2)

    def _skip_space(self) -> None:
        while True:
            match = _SOLID.search(self.held)
            self._drop(match.start() if match else len(self.held))
            if self.held or not self._read():
                return

    def _drop(self, count: int) -> None:
        self.line += self.held.count(b"\n", 0, count)
        del self.held[:count]

    def _read(self) -> bool:
        # As much as is held already: a long string is scanned again after each read, which stays linear this way.
        size = len(self.held)
        data = self.file.read(max(self.chunk, min(size, self.limit + 1 - size)))
        self.held += data
        return bool(data)

    def _fault(self, what: str, right: str, line: int) -> RecordError:
        fault = RecordError(what, right, kind="array")
        fault.line, fault.raw = line, bytes(self.held[:RAW_BYTES])
        return fault


def _string_end(held: bytearray, position: int) -> int | None:
    """The position of the quote that closes the string around `position`; None if it is not held yet."""
    while (quote := held.find(b'"', position)) >= 0:
        if _slashes(held, quote) % 2 == 0:
            return quote
        position = quote + 1
    return None


def _slashes(held: bytearray, stop: int) -> int:
    """How many consecutive backslashes there are before `stop`."""
    start = stop
    while start and held[start - 1] == 0x5C:
        piece = held[max(0, start - 1024) : start]
        start -= len(piece) - len(piece.rstrip(b"\\"))
    return stop - start


def _is_json(line: bytes) -> bool:
    try:
        decode(line)
    except RecordError:
        return False
    except RecursionError:
        pass
    return True
