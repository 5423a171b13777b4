"""The file of rejected records and their reasons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from chatmill.errors import RecordError, UsageError
from chatmill.records.files import expand, shown
from chatmill.records.shapes.decode import json_line


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
        self._file.write(json_line(line))
        self.counts[fault.kind] += 1
