"""Parse plain conversations (roles and texts only) into columns, a block of lines at a time, without an object per
message.

    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]}

    ->  data ...Hi...Yes...   roles [1 2]   start, stop of both texts in the data   first_message [0 2]

Implemented in C. Without the compiled module every record is parsed separately, which is slower but gives the same
rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from chatmill.records.record import Record, record_key
from chatmill.rows import Index, offsets

try:
    from chatmill._native import _columns
except ImportError:  # pragma: no cover
    _columns = None  # type: ignore[assignment]

COMPILED = _columns is not None


@dataclass(frozen=True, eq=False)
class ChatColumns(Sequence[Record]):
    """Plain records from consecutive lines. `ChatColumns` is a sequence that creates `Record` objects on access."""

    source: str
    file: str
    line: int
    """Line of the first record."""
    data: bytes
    record_stop: Index
    """End offset of each record in `data`, which contains the MessagePack form that `record_key` hashes."""
    first_message: Index
    roles: NDArray[np.uint8]
    """Indices into ROLES."""
    start: Index
    stop: Index
    load_records: Callable[[], Sequence[Any]]

    def __len__(self) -> int:
        return len(self.record_stop)

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Record]: ...
    def __getitem__(self, index: int | slice) -> Record | Sequence[Record]:
        return self._records[index]

    def texts(self, row: int) -> list[str]:
        """Return the texts of one record."""
        messages = slice(*self.first_message[row : row + 2].tolist())
        ranges = zip(self.start[messages].tolist(), self.stop[messages].tolist(), strict=True)
        return [self.data[start:stop].decode() for start, stop in ranges]

    def keys(self) -> bytes:
        """Return the `record_key` of each record, concatenated."""
        data, start, keys = memoryview(self.data), 0, []
        for stop in self.record_stop.tolist():
            keys.append(hashlib.sha256(data[start:stop]).digest()[:16])
            start = stop
        return b"".join(keys)

    @cached_property
    def _records(self) -> Sequence[Record]:
        records = self.load_records()
        if len(records) != len(self):
            raise RuntimeError(
                f"{self.file}:{self.line}: {len(self)} records in columns, but {len(records)} when parsed by line"
            )
        return records


def parse(
    block: bytes, at: int, *, source: str, file: str, line: int, parse_lines: Callable[[int, bytes], Sequence[Any]]
) -> tuple[int, ChatColumns]:
    """Return the end offset of the consecutive plain lines that start at byte `at`, and the columns of these lines.

    `parse_lines` creates the records on access, given the number of the first line.
    """
    end, data, messages, record_stop, roles, start, stop = _columns.columns(block, at)
    record_stops, counts, starts, stops = (
        np.frombuffer(column, dtype=np.int64) for column in (record_stop, messages, start, stop)
    )
    texts = (offsets(counts), np.frombuffer(roles, dtype=np.uint8), starts, stops)
    return end, ChatColumns(source, file, line, data, record_stops, *texts, lambda: parse_lines(line, block[at:end]))


def keys_of(records: Sequence[Record]) -> bytes:
    """Return the `record_key` of each record, concatenated."""
    return records.keys() if isinstance(records, ChatColumns) else b"".join(map(record_key, records))
