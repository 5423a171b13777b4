"""Read records for a command: counted in its ledger, faulty ones raised or written to the rejects."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

from chatmill.errors import RecordError
from chatmill.ledger import Ledger
from chatmill.records.read import read_records
from chatmill.records.record import Record
from chatmill.records.rejects import Rejects

DEFAULT_REJECTS = Path("rejects.jsonl")


class CountedRecords:
    """The records of some inputs, each counted in its ledger. A context manager, which opens the file of rejects."""

    def __init__(
        self,
        inputs: list[str],
        *,
        shape: str | None = None,
        on_error: Literal["stop", "skip"] = "stop",
        rejects: Path = DEFAULT_REJECTS,
    ) -> None:
        self._inputs, self._shape, self.ledger = inputs, shape, Ledger()
        self.rejects = Rejects(rejects, inputs) if on_error == "skip" else None
        self._records: Iterator[Record] = iter(())
        self._opened = ExitStack()

    def __enter__(self) -> CountedRecords:
        if self.rejects is None:
            self._records = read_records(self._inputs, shape=self._shape)
        else:
            self._opened.enter_context(self.rejects)
            skip = self._reject_unread
            self._records = read_records(self._inputs, shape=self._shape, on_error="skip", on_reject=skip)
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.close()

    def __iter__(self) -> Iterator[Record]:
        for record in self._records:
            self.ledger.add("read", rows=1)
            yield record

    def reject(self, fault: RecordError) -> None:
        """Reject a record that was read: raise its fault, or write it to the rejects."""
        if self.rejects is None:
            raise fault
        self.rejects(fault)
        self.ledger.add("rejected", fault.kind, rows=1)

    def _reject_unread(self, fault: RecordError) -> None:
        self.ledger.add("read", rows=1)
        self.reject(fault)
