"""Read the rows of Parquet and Arrow files as JSON objects.

Both Arrow formats are supported: files, and the streams that Hugging Face datasets writes.
"""

from __future__ import annotations

import io
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from chatmill.errors import DataError, RecordError, one_line
from chatmill.records.compressed import LOOK, form_of, text_form
from chatmill.records.files import Units, compression, kind, open_bytes, shown
from chatmill.records.read_log import ReadLog
from chatmill.records.shapes.decode import BYTES
from chatmill.records.shapes.fields import MEDIA_KEYS
from chatmill.remote.objects import RemoteError
from chatmill.remote.urls import Place

TABLE_ROWS = 256
"""Maximum number of rows per decoded batch; batches of tables with images have fewer rows."""
ARROW_FILE = b"ARROW1"
"""Magic bytes of the Arrow file format."""
STREAM_END = bytes(4)
"""Last bytes of the Arrow stream format: the end-of-stream marker."""
NO_MEMORY: dict[str, tuple[type[MemoryError], ...]] = {".parquet": (), ".arrow": (MemoryError,)}
"""Arrow allocates as much memory as a file specifies, so a corrupt file may cause a `MemoryError`."""
_BUFFER = 1 << 18
_MAGIC = {".parquet": b"PAR1", ".arrow": ARROW_FILE}
_NAMES = {".parquet": "Parquet", ".arrow": "Arrow"}
# Types without a JSON equivalent are written as text.
_ENCODER = msgspec.json.Encoder(enc_hook=str)


def table_rows(path: Place, *, start: int = 0, stop: int | None = None, log: ReadLog | None = None) -> Units:
    """Yield the rows of a table as JSON objects, numbered from 1.

    From a Parquet file, only the row groups that start in bytes [start, stop) are read. NaN becomes null. Binary values
    are replaced by the marker `BYTES`, so that the parser rejects records with images.
    """
    pyarrow = _pyarrow(path)
    number = 0
    try:
        with _seekable(path, log, stop) as file:
            for rows in _rows(file, kind(path), start, stop):
                for row in rows:
                    number += 1
                    yield number, row
    except (RecordError, RemoteError):
        raise
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError, RecursionError, *NO_MEMORY[kind(path)]):
        name = _NAMES[kind(path)]
        what, right = _other_form(path) or (f"the {name} file is corrupt", "expected a whole file; copy it again")
        fault = RecordError(what, right, kind=name.lower())
        fault.line = number + 1
        raise fault from None


def _other_form(path: Place) -> tuple[str, str] | None:
    """If the format of a file does not match its name, return an error and a suggestion, otherwise None."""
    with open_bytes(path) as file:
        start = file.read(LOOK)
    magic = _MAGIC[kind(path)]
    form = None if magic.startswith(start[: len(magic)]) else form_of(start) or text_form(start)
    if form is None:
        return None
    return (
        f"the file is {form.name}, not {_NAMES[kind(path)]}",
        form.right or "use a file name that ends with .jsonl or .json",
    )


def cut_table(path: Place, *, size: int, end: int) -> list[tuple[int, int]]:
    """Split a Parquet file of `end` bytes at row groups into byte ranges (start, stop); all except the last have at
    least `size` bytes.
    """
    pyarrow = _pyarrow(path)
    if end <= size or kind(path) != ".parquet" or compression(path):
        return [(0, end)]
    try:
        with open_bytes(path) as file:
            firsts = _group_starts(_parquet(file).metadata)
    except RemoteError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError):
        return [(0, end)]
    pieces, start = [], 0
    if firsts == sorted(set(firsts)) and firsts[-1:] < [end]:
        for first in firsts[1:]:
            if first - start >= size:
                pieces.append((start, first))
                start = first
    return [*pieces, (start, end)]


def _pyarrow(path: Place) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        name = _NAMES[kind(path)]
        raise DataError(f"{shown(path)}: {name} needs pyarrow; pip install 'chatmill[parquet]'") from None
    return pyarrow


@contextmanager
def _seekable(path: Place, log: ReadLog | None, stop: int | None) -> Iterator[Any]:
    """Open a table as a seekable file; decompress a compressed table to a temporary file."""
    with open_bytes(path, log=log, stop=stop) as file:
        if not compression(path):
            yield file
            return
        with tempfile.TemporaryFile() as whole:
            shutil.copyfileobj(file, whole, _BUFFER)
            whole.seek(0)
            yield whole


def _rows(file: Any, ending: str, start: int, stop: int | None) -> Iterator[list[bytes]]:
    import pyarrow
    from pyarrow import compute, types

    table = _parquet(file) if ending == ".parquet" else _arrow(file)
    schema = table.schema_arrow if ending == ".parquet" else table.schema
    names = schema.names
    if repeated := [name for at, name in enumerate(names) if name in names[:at]]:
        what = f'the table has two columns named "{one_line(repeated[0])}"'
        raise RecordError(what, "expected each name once", kind="duplicate_key")
    of_bytes = [field.name for field in schema if _holds_bytes(field.type, types)]
    media = [name for name in of_bytes if name in MEDIA_KEYS]
    others = {name: BYTES for name in of_bytes if name not in media}
    columns = [name for name in names if name not in others]
    size = TABLE_ROWS // 16 if media else TABLE_ROWS
    if ending == ".parquet":
        batches = _parquet_batches(table, columns, size, start, stop)
    else:
        batches = _arrow_batches(table, columns, size, pyarrow)
    for batch in batches:
        present = {name: _is_present(batch.column(name), compute, types) for name in media}
        encoded = []
        for at, row in enumerate(batch.drop_columns(media).to_pylist()):
            marks = {name: BYTES if values[at] else None for name, values in present.items()}
            encoded.append(_ENCODER.encode({**row, **marks, **others}))
        yield encoded
    if ending == ".arrow":
        _check_end(file)


def _parquet(file: Any) -> Any:
    from pyarrow import parquet

    return parquet.ParquetFile(file)


def _group_starts(metadata: Any) -> list[int]:
    starts = []
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        chunks = [group.column(index) for index in range(group.num_columns)]
        offsets = [offset for each in chunks for offset in (each.data_page_offset, each.dictionary_page_offset)]
        # Some writers store the offset 0 for a missing dictionary.
        starts.append(min((offset for offset in offsets if offset), default=0))
    return starts


def _parquet_batches(table: Any, columns: list[str], size: int, start: int, stop: int | None) -> Iterator[Any]:
    metadata = table.metadata
    groups = list(range(metadata.num_row_groups))
    if start or stop is not None:
        starts = _group_starts(metadata)
        groups = [number for number in groups if start <= starts[number] and (stop is None or starts[number] < stop)]
    seen = 0
    if groups:
        for batch in table.iter_batches(size, row_groups=groups, columns=columns, use_threads=False):
            seen += batch.num_rows
            yield batch
    if seen != sum(metadata.row_group(number).num_rows for number in groups):
        raise ValueError("rows are missing")


def _arrow(file: Any) -> Any:
    from pyarrow import ipc

    is_file = file.read(len(ARROW_FILE)) == ARROW_FILE
    bounded = _BoundedReader(file)
    return ipc.open_file(bounded) if is_file else ipc.open_stream(bounded)


class _BoundedReader(io.BufferedIOBase):
    """Limits reads to the size of the file, because Arrow allocates the requested size before reading."""

    def __init__(self, file: Any) -> None:
        self._file, self._size = file, file.seek(0, io.SEEK_END)
        file.seek(0)

    def read(self, size: int | None = -1, /) -> bytes:
        left = max(0, self._size - self._file.tell())
        data: bytes = self._file.read(left if size is None or size < 0 else min(size, left))
        return data

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        at: int = self._file.seek(offset, whence)
        return at

    def tell(self) -> int:
        at: int = self._file.tell()
        return at


def _arrow_batches(table: Any, columns: list[str], size: int, pyarrow: Any) -> Iterator[Any]:
    if isinstance(table, pyarrow.ipc.RecordBatchFileReader):
        whole = (table.get_batch(number) for number in range(table.num_record_batches))
    else:
        whole = iter(table)
    for batch in whole:
        # Arrow itself does not check the buffer offsets stored in the file.
        batch.validate(full=True)
        for at in range(0, batch.num_rows, size):
            yield batch.select(columns).slice(at, size)


def _check_end(file: Any) -> None:
    """Raise `ValueError` if a stream has no end marker, because data may be missing."""
    file.seek(0)
    if file.read(len(ARROW_FILE)) != ARROW_FILE:
        file.seek(-len(STREAM_END), io.SEEK_END)
        if file.read() != STREAM_END:
            raise ValueError("the stream is truncated")


def _is_present(column: Any, compute: Any, types: Any) -> list[bool]:
    """Return whether each row has a value in the column; an empty list is not a value."""
    if types.is_list(column.type) or types.is_large_list(column.type):
        return [bool(length) for length in compute.list_value_length(column).to_pylist()]
    present: list[bool] = column.is_valid().to_pylist()
    return present


def _holds_bytes(kind: Any, types: Any) -> bool:
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
        return True
    return any(_holds_bytes(kind.field(index).type, types) for index in range(kind.num_fields))
