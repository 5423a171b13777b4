"""Standard streams that escape control characters and handle closed pipes, full disks and closed file descriptors."""

from __future__ import annotations

import codecs
import io
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

_NOT_PLAIN = re.compile(r"[^ -~\n\t\u200c\u200d]+")
"""Matches characters that may need escaping. Zero-width joiners and non-joiners are kept, because words and emoji
contain them.
"""


class Styled:
    """Standard output for styled text. If the reader closes the pipe, as `| head` does, the process exits with code
    0.
    """

    def __init__(self, stream: io.TextIOWrapper) -> None:
        self._stream = stream
        self._failure: OSError | None = None

    def __getattr__(self, name: str) -> Any:
        # Hide the buffer, so that no library can bypass this class.
        if name == "buffer":
            raise AttributeError(name)
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._failures():
            self._stream.write(text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        with self._failures():
            self._stream.flush()

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            # Raise at every call: a library may have swallowed the first exception.
            if self._failure is not None:
                raise self._failure
            yield
        except BrokenPipeError as error:
            self._failure = error
            discard(self._stream)
            raise SystemExit(0) from None
        except OSError as error:
            self._failure = OSError(error.errno, error.strerror, "standard output")
            discard(self._stream)
            raise self._failure from None


class Output(Styled):
    """Standard output without control characters.

    Control characters in names and texts are written as JSON escapes, so they cannot affect the terminal, and JSON
    output stays valid.
    """

    @property
    def styled(self) -> Styled:
        return Styled(self._stream)

    def write(self, text: str) -> int:
        # Nearly all lines are plain ASCII, and `isascii` is much faster than the regular expression.
        plain = text.isascii() and text.replace("\n", "").isprintable()
        super().write(text if plain else _NOT_PLAIN.sub(_printable, text))
        return len(text)


class ErrorOutput(Styled):
    """Standard error; the command continues even if writing to standard error fails."""

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            discard(self._stream)


def _printable(run: re.Match[str]) -> str:
    return run[0] if run[0].isprintable() else _in_json(run[0])


def _in_json(text: str) -> str:
    return "".join(ch if ch.isprintable() else json.dumps(ch)[1:-1] for ch in text)


def _escape_unencodable(error: UnicodeError) -> tuple[str, int]:
    r"""Write JSON escapes such as `\udcff` for characters that cannot be encoded."""
    assert isinstance(error, UnicodeEncodeError)
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


codecs.register_error("escaped", _escape_unencodable)


def discard(stream: io.TextIOWrapper) -> None:
    """Redirect a stream to the null device, so that flushing it at interpreter exit cannot fail."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


@contextmanager
def standard_streams() -> Iterator[None]:
    """Replace standard output and standard error inside the `with` block."""
    _open_closed()
    before = sys.stdout, sys.stderr
    for stream in before:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="escaped")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout = Output(sys.stdout)
    if isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr = ErrorOutput(sys.stderr)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def _open_closed() -> None:
    """Reopen standard streams closed with `>&-`; otherwise the next opened file would get their file descriptor."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))
