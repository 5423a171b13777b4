"""Read .gz, .zst, .xz and .bz2 files in bounded memory, including files that contain several streams or frames.

Reading raises a `RecordError` if a file is truncated or corrupt, or has other data after the last stream.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from codecs import getincrementaldecoder
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from chatmill.errors import DataError, RecordError

NAMES = {".gz": "gzip", ".zst": "zstd", ".xz": "xz", ".bz2": "bzip2"}
MAGIC = {".gz": b"\x1f\x8b", ".zst": b"\x28\xb5\x2f\xfd", ".xz": b"\xfd7zXZ\0", ".bz2": b"BZh"}
SKIPPABLE = tuple(bytes((0x50 + kind, 0x2A, 0x4D, 0x18)) for kind in range(16))
"""Magic bytes of skippable zstd frames, which may precede the data."""
LOOK = 16
"""Number of bytes read to detect the format of a file."""
MAX_WINDOW = 1 << 27
"""Largest decompression window in bytes, the default limit of the `zstd` command."""
_BUFFER = 1 << 18
_FED = 1 << 12
"""Number of bytes to pass to zstd at a time; small, because four bytes can decompress to 128 KiB."""


class Form(NamedTuple):
    """The name of a detected file format, and the advice to show in the error message."""

    name: str
    right: str


def form_of(start: bytes) -> Form | None:
    """Detect the format of a file from its first bytes; return None for UTF-8 text and unknown formats."""
    if start.startswith(b"BZh") and start[4:10] != b"1AY&SY":
        return None
    for ending, magic in MAGIC.items():
        if start.startswith((magic, *SKIPPABLE) if ending == ".zst" else magic):
            return Form(NAMES[ending], f"use a file name that ends with {ending}")
    if start.startswith(b"PAR1\x15"):
        return Form("Parquet", "use a file name that ends with .parquet")
    if start.startswith(b"ARROW1\0\0"):
        return Form("Arrow", "use a file name that ends with .arrow")
    even, odd = start[:8:2], start[1:8:2]
    if start.startswith((b"\xff\xfe", b"\xfe\xff")) or (
        len(odd) == 4 and ((all(even) and not any(odd)) or (all(odd) and not any(even)))
    ):
        return Form("UTF-16 text", "convert the file to UTF-8")
    return None


def text_form(start: bytes) -> Form | None:
    """Detect from its first bytes whether a file is printable UTF-8 text; return None if it is not."""
    try:
        text = getincrementaldecoder("utf-8-sig")().decode(start)
    except UnicodeDecodeError:
        return None
    return Form("text", "") if "".join(text.split()).isprintable() else None


def decompressed(raw: io.RawIOBase, compression: str, name: str) -> io.BufferedReader:
    """Return a reader for the decompressed bytes; `name` is used in error messages."""
    source = io.BufferedReader(raw, _BUFFER)
    start = source.peek(LOOK)[:LOOK]
    if start and not _begins(start, compression) and (form := form_of(start) or text_form(start)):
        what = f"the file is {form.name}, not {NAMES[compression]}"
        raise RecordError(what, form.right or f"remove {compression} from the file name", kind=NAMES[compression])
    if compression == ".gz":
        # GzipFile behaves like a raw file, but is not declared as one.
        file: Any = _Gunzip(fileobj=source)
        file.begins = _begins(start, compression)
        return io.BufferedReader(file, _BUFFER)
    return io.BufferedReader(_Streams(source, compression, _maker(compression, name)), _BUFFER)


def _maker(compression: str, name: str) -> Callable[[], Any]:
    if compression == ".bz2":
        return bz2.BZ2Decompressor
    if compression == ".xz":
        return lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=MAX_WINDOW)
    try:
        import zstandard
    except ImportError:
        raise DataError(f"{name}: .zst needs zstandard; pip install 'chatmill[zstd]'") from None
    return lambda: zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW).decompressobj()


class _Gunzip(gzip.GzipFile):
    """Reads the decompressed bytes of a .gz file. Corrupt data raises a `RecordError`."""

    begins = False
    """Whether the file starts with the gzip magic bytes."""

    def readinto(self, buffer: Any) -> int:
        try:
            return super().readinto(buffer)
        except EOFError:
            _cut_off(".gz")
        except (gzip.BadGzipFile, zlib.error) as error:
            if self.begins and str(error).startswith("Not a gzipped file"):
                _has_more(".gz")
            _corrupt(".gz")


class _Streams(io.RawIOBase):
    """Reads the decompressed bytes of all streams in a .zst, .xz or .bz2 file."""

    def __init__(self, source: io.BufferedReader[io.RawIOBase], compression: str, make: Callable[[], Any]) -> None:
        self._source, self._compression, self._make = source, compression, make
        self._stream: Any = None
        """Decompressor of the current stream; None between streams."""
        self._data = memoryview(b"")
        """Decompressed bytes that have not been returned yet."""
        self._input = b""
        """Bytes read from the file that have not been decompressed yet."""
        self._at, self._ended = 0, False
        """The position in the decompressed data, and whether a stream has ended."""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        # Seeks work only within the reader's buffer, which is enough to skip the byte order mark.
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        # Allow a seek to the current position, which the reader requests if the file is empty.
        if whence != io.SEEK_SET or offset != self._at:
            raise io.UnsupportedOperation("seek")
        return offset

    def close(self) -> None:
        self._source.close()
        super().close()

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer).cast("B")
        while not len(self._data) and self._more(len(view)):
            pass
        count = min(len(view), len(self._data))
        view[:count], self._data = self._data[:count], self._data[count:]
        self._at += count
        return count

    def _more(self, size: int) -> bool:
        """Decompress the next bytes; return False at the end of the file."""
        is_zstd = self._compression == ".zst"
        waits = self._stream is not None and not is_zstd and not self._stream.needs_input
        if not self._input and not waits:
            self._input = self._source.read1(_FED if is_zstd else _BUFFER)
            if not self._input:
                if self._stream is not None:
                    _cut_off(self._compression)
                return False
        if self._stream is None:
            if self._compression == ".xz":
                # Zeros may follow a stream, as padding.
                self._input = self._input.lstrip(b"\0")
                if not self._input:
                    return True
            while self._ended and len(self._input) < LOOK and (more := self._source.read1(_FED)):
                self._input += more
            if self._ended and not _begins(self._input, self._compression):
                _has_more(self._compression)
            self._stream = self._make()
        try:
            data = self._stream.decompress(self._input) if is_zstd else self._stream.decompress(self._input, size)
        except Exception as error:
            # Each library raises its own type of exception.
            if "memory" in str(error).lower():
                _too_large(self._compression)
            _corrupt(self._compression)
        self._data, self._input = memoryview(data), b""
        if self._stream.eof:
            self._input, self._stream, self._ended = self._stream.unused_data, None, True
        return True


def _begins(start: bytes, compression: str) -> bool:
    """Whether a file can be in the given compression format, according to its first bytes."""
    magic = MAGIC[compression]
    is_frame = compression == ".zst" and start[:4].startswith(SKIPPABLE)
    return is_frame or start.startswith(magic) or magic.startswith(start)


def _cut_off(compression: str) -> NoReturn:
    right = "expected the whole file; copy it again"
    raise RecordError("the compressed file is truncated", right, kind=NAMES[compression]) from None


def _has_more(compression: str) -> NoReturn:
    what = f"other data follows the end of the {NAMES[compression]} data"
    raise RecordError(what, "remove this data, or copy the file again", kind=NAMES[compression])


def _corrupt(compression: str) -> NoReturn:
    name = NAMES[compression]
    raise RecordError("the compressed data is corrupt", f"expected a valid {name} file; copy it again", kind=name)


def _too_large(compression: str) -> NoReturn:
    what = f"decompression needs more than {MAX_WINDOW >> 20} MiB of memory"
    raise RecordError(what, "compress the file with a smaller window, without --long", kind=NAMES[compression])
