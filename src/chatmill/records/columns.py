"""Plain conversations in columns: the lines of a block at once, without an object for each message.

    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]}

    ->  data ...Hi...Yes...   roles [1 2]   start, stop of both texts in the data   first_message [0 2]

The work is done in C. Where that was not compiled there are no columns, and every record is read for itself: slower,
and the same rows.
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
    """Records of consecutive lines, each nothing but roles and texts. As a sequence it makes them when it is asked."""

    source: str
    file: str
    line: int
    """Of the first record."""
    data: bytes
    record_stop: Index
    """Where each record ends in the data: as MessagePack, of which its key is made."""
    first_message: Index
    roles: NDArray[np.uint8]
    """Indices into ROLES."""
    start: Index
    stop: Index
    made: Callable[[], Sequence[Record]]

    def __len__(self) -> int:
        return len(self.record_stop)

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Record]: ...
    def __getitem__(self, index: int | slice) -> Record | Sequence[Record]:
        return self._records[index]

    def keys(self) -> bytes:
        """What `record_key` gives for each, one after the other."""
        data, start, keys = memoryview(self.data), 0, []
        for stop in self.record_stop.tolist():
            keys.append(hashlib.sha256(data[start:stop]).digest()[:16])
            start = stop
        return b"".join(keys)

    @cached_property
    def _records(self) -> Sequence[Record]:
        records = self.made()
        if len(records) != len(self):
            raise RuntimeError(
                f"{self.file}:{self.line}: {len(self)} records in columns, {len(records)} of the same lines"
            )
        return records


def plain_lines(
    block: bytes, at: int, *, source: str, file: str, line: int, made: Callable[[int, bytes], Sequence[Any]]
) -> tuple[int, ChatColumns]:
    """The plain lines of a block from byte `at` on, and where they end; `made` makes records of them when asked."""
    end, data, messages, record_stop, roles, start, stop = _columns.columns(block, at)
    found = ChatColumns(
        source,
        file,
        line,
        data,
        record_stop=np.frombuffer(record_stop, dtype=np.int64),
        first_message=offsets(np.frombuffer(messages, dtype=np.int64)),
        roles=np.frombuffer(roles, dtype=np.uint8),
        start=np.frombuffer(start, dtype=np.int64),
        stop=np.frombuffer(stop, dtype=np.int64),
        made=lambda: made(line, block[at:end]),
    )
    return end, found


def keys_of(records: Sequence[Record]) -> bytes:
    """The sixteen bytes of each record's key, one after the other."""
    return records.keys() if isinstance(records, ChatColumns) else b"".join(map(record_key, records))
