"""Records that were left out, written down with their reasons."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import msgspec

from chatmill.errors import RecordError


class Rejects:
    """A JSONL file of rejected records, and how many there are of each kind. Call it with each fault.

    A line has file, line, id, kind, reason (the whole text a person would read) and the beginning of the record.
    The file is made even when nothing is rejected: an empty one says so.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.counts: Counter[str] = Counter()
        self._file: BinaryIO | None = None

    def __enter__(self) -> Self:
        self._file = self.path.open("wb")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._file is not None:
            self._file.close()

    def __call__(self, fault: RecordError) -> None:
        if self._file is None:
            raise ValueError("rejects are written inside `with Rejects(path)` only")
        line = {
            "file": fault.file,
            "line": fault.line,
            "id": fault.id,
            "kind": fault.kind,
            "reason": f"{fault.what}; {fault.right}",
            "raw": fault.raw.decode(errors="replace"),
        }
        self._file.write(msgspec.json.encode(line) + b"\n")
        self.counts[fault.kind] += 1
