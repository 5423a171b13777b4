"""A Parquet file as numbered units of bytes: each row as one JSON object, batch by batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from chatmill.errors import DataError, RecordError
from chatmill.records.files import Units, open_bytes, shown

_ROWS = 256
# Types that JSON does not have are written as text.
_ENCODER = msgspec.json.Encoder(enc_hook=str)


def rows(path: Path) -> Units:
    """The rows with their numbers, from 1. A missing number, which is NaN in a table, becomes null.

    Columns of bytes are not read: no field of a conversation has that type.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise DataError(f"{shown(path)}: Parquet needs pyarrow; pip install 'chatmill[parquet]'") from None
    number = 0
    with open_bytes(path) as file:
        try:
            table = parquet.ParquetFile(file)
            columns = [field.name for field in table.schema_arrow if not _holds_bytes(field.type, pyarrow.types)]
            for batch in table.iter_batches(_ROWS, columns=columns, use_threads=False):
                for row in batch.to_pylist():
                    number += 1
                    yield number, _ENCODER.encode(row)
            if number != table.metadata.num_rows:
                raise ValueError("rows are missing")
        except (pyarrow.ArrowException, OSError, ValueError, OverflowError, RecursionError):
            fault = RecordError("the Parquet file is corrupt", "expected a whole file; copy it again", kind="parquet")
            fault.line = number + 1
            raise fault from None


def _holds_bytes(kind: Any, types: Any) -> bool:
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
        return True
    return any(_holds_bytes(kind.field(index).type, types) for index in range(kind.num_fields))
