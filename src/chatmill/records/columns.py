"""Parse plain conversations into columns, a block of lines at a time. Plain conversations have only roles and texts.

    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]}

    ->  data ...Hi...Yes...   roles [1 2]   start, stop of both texts in the data   first_message [0 2]

The parser is written in C. Without the compiled module, records are parsed one by one, which is slower.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from chatmill.records.part_hashes import part_hashes
from chatmill.records.record import Record, record_key
from chatmill.rows import Index, offsets

try:
    from chatmill._native import _columns
except ImportError:  # pragma: no cover
    _columns = None  # type: ignore[assignment]

COMPILED = _columns is not None


@dataclass(frozen=True, eq=False)
class ChatColumns(Sequence[Record]):
    """Consecutive records that have only roles and texts; `Record` objects are created on access."""

    source: str
    file: str
    line: int
    """Line of the first record."""
    data: bytes
    record_stop: Index
    """End offset of each record in `data`, the MessagePack encoding that `record_key` hashes."""
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
        messages = slice(*self.first_message[row : row + 2].tolist())
        ranges = zip(self.start[messages].tolist(), self.stop[messages].tolist(), strict=True)
        return [self.data[start:stop].decode() for start, stop in ranges]

    def keys(self) -> bytes:
        """Return the `record_key` of each record, concatenated."""
        return part_hashes(self.data, self.record_stop)

    @cached_property
    def _records(self) -> Sequence[Record]:
        records = self.load_records()
        if len(records) != len(self):
            raise RuntimeError(
                f"{self.file}:{self.line}: the columns have {len(self)} records, but the lines have {len(records)}"
            )
        return records


def parse(
    block: bytes, at: int, *, source: str, file: str, line: int, parse_lines: Callable[[int, bytes], Sequence[Any]]
) -> tuple[int, ChatColumns]:
    """Parse consecutive plain conversations from byte `at` of a block; return their end offset and their columns.

    `parse_lines` is called to create the `Record` objects when they are first accessed.
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
