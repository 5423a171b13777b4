"""Write `removed.jsonl`, which lists the records that were removed by filters, deduplication and `max_samples`, with
the reasons.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.prepare import filters, select
from chatmill.prepare.dedupe import record_begins
from chatmill.prepare.select import Selection, StagedFile
from chatmill.rows import File, Index
from chatmill.store.files import make_folder
from chatmill.store.hashed import FileInfo, HashedFile

REASONS = (*select.REASONS, *map(filters.reason, filters.NAMES))
PIECE = 2**12
"""Maximum number of lines in memory at once."""
_ENTRY = np.dtype([("line", "<u8"), ("reason", "u1"), ("twin", "<i8")])


def write_removed(path: Path, staged: Sequence[StagedFile], selection: Selection, *, filtered: bool) -> FileInfo | None:
    """Write one JSON line for each removed record, ordered by input file and line. If no record was removed, write no
    file and return None. `filtered` tells whether filters removed records.

    {"source": "chat", "file": "chat.jsonl", "line": 7, "reason": "duplicate", "twin": {"source": "chat", …}}
    """
    if not filtered and not selection.removed:
        return None
    lines = _lines(staged, selection)
    with ExitStack() as opened:
        out: HashedFile | None = None
        for text in lines:
            if out is None:
                make_folder(path.parent)
                out = opened.enter_context(HashedFile(path))
            out.write(text)
    return None if out is None else out.info()


def _lines(staged: Sequence[StagedFile], selection: Selection) -> Iterator[bytes]:
    selected = {part.file: part for part in selection.removed}
    twins = _Twins(staged, selection)
    for _, group in groupby(enumerate(staged), key=lambda each: each[1].unit):
        entries: list[NDArray[Any]] = []
        for number, file in group:
            head = file.head()
            if (filtered := head.columns.get("removed")) is not None:
                entries.append(np.empty(len(filtered), dtype=_ENTRY))
                entries[-1]["line"] = filtered["line"] + file.lines_before
                entries[-1]["reason"] = filtered["filter"] + len(select.REASONS)
                entries[-1]["twin"] = -1
            if (part := selected.get(number)) is not None:
                entries.append(np.empty(len(part.row), dtype=_ENTRY))
                entries[-1]["line"] = head.origins["line"][part.row]
                entries[-1]["reason"], entries[-1]["twin"] = part.reason, part.twin
        if entries:
            table = np.concatenate(entries)
            table = table[np.argsort(table["line"], kind="stable")]
            begin = _place(file.file)
            for start in range(0, len(table), PIECE):
                piece = table[start : start + PIECE]
                yield "".join(
                    f'{{{begin}, "line": {line}, "reason": "{REASONS[reason]}"{twin}}}\n'
                    for (line, reason, _), twin in zip(piece.tolist(), twins.texts(piece["twin"]), strict=True)
                ).encode()


def _place(file: File) -> str:
    return f'"source": {json.dumps(file.source)}, "file": {json.dumps(file.path)}'


class _Twins:
    """The input files and lines of the records that are kept instead of removed duplicates."""

    def __init__(self, staged: Sequence[StagedFile], selection: Selection) -> None:
        numbers = np.concatenate([np.empty(0, np.int64), *(part.twin for part in selection.removed)])
        if len(numbers):
            # Skip empty input, because `np.unique` would import additional modules.
            numbers = np.unique(numbers)
        self._numbers = numbers[numbers >= 0]
        self._line = np.empty(len(self._numbers), dtype=np.uint64)
        self._file = np.empty(len(self._numbers), dtype=np.uint32)
        self._files = [_place(file.file) for file in staged]
        before = 0
        for number, file in enumerate(staged if len(self._numbers) else ()):
            head = file.head()
            rows = np.flatnonzero(record_begins(head))
            here = slice(*np.searchsorted(self._numbers, (before, before + len(rows))))
            self._line[here] = head.origins["line"][rows[self._numbers[here] - before]]
            self._file[here] = number
            before += len(rows)

    def texts(self, twins: Index) -> Iterator[str]:
        """Yield, for each record index, the JSON text with the file and line of the record, or an empty string for the
        index -1.
        """
        at = np.minimum(np.searchsorted(self._numbers, twins), max(len(self._numbers) - 1, 0))
        for twin, place in zip(twins.tolist(), at.tolist(), strict=True):
            if twin < 0:
                yield ""
            else:
                yield f', "twin": {{{self._files[self._file[place]]}, "line": {self._line[place]}}}'
