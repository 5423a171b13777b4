"""Records that are read for a command: counted in its ledger, faulty ones raised or written to the file of rejects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Literal, Self

from chatmill.errors import RecordError, UsageError
from chatmill.ledger import Ledger
from chatmill.records.files import expand, shown
from chatmill.records.read import read_records
from chatmill.records.record import Record
from chatmill.records.shapes.decode import json_line

DEFAULT_REJECTS = Path("rejects.jsonl")


class Rejects:
    """Writes a JSONL file of rejected records, and counts them by kind. Call it with each fault.

    A line has file, line, id, kind, reason (the text of the fault) and the beginning of the record. The file is
    created even if nothing is rejected. It must not be one of the `inputs`.
    """

    def __init__(self, path: str | Path, inputs: Sequence[str | Path] = ()) -> None:
        self.path = Path(path)
        if self.path.exists() and any(file.samefile(self.path) for file in expand(inputs)):
            raise UsageError(f"{shown(self.path)}: is read, and rejects would be written over it; name another file")
        self.counts: Counter[str] = Counter()
        self._file: BinaryIO | None = None

    @property
    def is_open(self) -> bool:
        return self._file is not None

    def __enter__(self) -> Self:
        self._file = self.path.open("wb")
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._file.close()

    def __call__(self, fault: RecordError) -> None:
        if self._file is None:
            raise ValueError("rejects are written inside `with Rejects(path)` only")
        line = {name: getattr(fault, name) for name in ("file", "line", "id", "kind")}
        line |= {"reason": f"{fault.what}; {fault.right}", "raw": fault.raw.decode(errors="replace")}
        self._file.write(json_line(line))
        self.counts[fault.kind] += 1


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

    def __enter__(self) -> Self:
        # First: a glob must not match the file of rejects, which is made next.
        self._records = read_records(self._inputs, shape=self._shape, on_error="skip", on_reject=self._reject_unread)
        if self.rejects is not None:
            self.rejects.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self.rejects is not None:
            self.rejects.__exit__()

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
