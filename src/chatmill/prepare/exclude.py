"""Read the `--exclude` file, which lists records to leave out. The viewer can export an `--exclude` file.

    {"file": "chat.jsonl", "line": 812}    the record at this line; the file has the same name as in the dataset
    {"id": "oasst-17"}                     every record with this id
    chat.jsonl:812                         the same as the first
    oasst-17                               the same as the second, if it does not end in a colon and a number

Empty lines, lines that begin with #, and unknown JSON keys are ignored, so the `removed.jsonl` of a dataset can also be
passed as `--exclude`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from chatmill.errors import DataError, one_line
from chatmill.plain_file import check_plain, open_plain
from chatmill.prepare.dedupe import record_begins
from chatmill.remote.named_files import local_file
from chatmill.rows import Index

if TYPE_CHECKING:
    from chatmill.prepare.select import StagedFile

LIMIT = 1 << 30
"""Maximum size of an `--exclude` file in bytes."""
_PLACE = re.compile(r"(.+):([0-9]{1,18})", re.DOTALL)


@dataclass(frozen=True)
class Excluded:
    """The records that a build leaves out."""

    lines: Mapping[str, Index] = field(default_factory=dict)
    """Excluded lines of each input file."""
    ids: frozenset[str] = frozenset()
    sha256: str | None = None
    """The hash of the `--exclude` file; None if no file was given."""

    def check_files(self, names: Collection[str], path: str) -> None:
        """Raise `DataError` if a listed file is not an input file."""
        if unknown := sorted(set(self.lines) - set(names)):
            known = ", ".join(one_line(name) for name in sorted(names)[:5])
            raise DataError(f"{path}: names {one_line(unknown[0], 200)}, which is not an input file; expected {known}")

    def flags(self, staged: Sequence[StagedFile]) -> list[NDArray[np.bool_]]:
        """Return, for each staged file, a boolean array that marks the rows of records on excluded lines."""
        nothing = np.empty(0, dtype=np.int64)
        return [np.isin(file.head().origins["line"], self.lines.get(file.file.path, nothing)) for file in staged]

    def unmatched(self, staged: Sequence[StagedFile], flags: Sequence[NDArray[np.bool_]] | None) -> int:
        """Return how many of the listed lines and ids match no record; `flags` is the result of the method `flags`."""
        lines, ids = 0, set(self.ids)
        for number, file in enumerate(staged if self.sha256 else ()):
            head = file.head()
            ids.difference_update(head.extra.get("excluded_ids", ()))
            if flags is not None:
                lines += int((flags[number] & record_begins(head)).sum())
        return sum(map(len, self.lines.values())) - lines + len(ids)


NOTHING = Excluded()


def read_excluded(path: str | None) -> Excluded:
    """Read the `--exclude` file; return `NOTHING` if no file is given."""
    if path is None:
        return NOTHING
    lines: dict[str, set[int]] = {}
    ids: set[str] = set()
    digest = hashlib.sha256()
    try:
        here = local_file(path, limit=LIMIT)
        if (size := check_plain(here)) > LIMIT:
            raise DataError(f"{path}: is {size:,} bytes; expected at most {LIMIT:,}")
        with open_plain(here) as file:
            for number, raw in enumerate(file, 1):
                digest.update(raw)
                entry = _entry(raw, f"{path}:{number}")
                if isinstance(entry, str):
                    ids.add(entry)
                elif entry is not None:
                    lines.setdefault(entry[0], set()).add(entry[1])
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); expected a list of excluded records") from None
    arrays = {name: np.array(sorted(numbers), dtype=np.int64) for name, numbers in lines.items()}
    return Excluded(arrays, frozenset(ids), digest.hexdigest())


def _entry(raw: bytes, where: str) -> tuple[str, int] | str | None:
    """Parse a line into a file and line number, or into an id; return None for an empty line or a comment."""
    try:
        text = raw.decode().strip()
        if not text or text.startswith("#"):
            return None
        if not text.startswith("{"):
            place = _PLACE.fullmatch(text)
            return text if place is None else (place[1], int(place[2]))
        values: Any = json.loads(text)
        file, line, id = (values.get(name) for name in ("file", "line", "id"))
        if isinstance(file, str) and type(line) is int and 0 < line < 2**62:
            return file, line
        if isinstance(id, str) and file is None and line is None:
            return id
    except (ValueError, RecursionError):
        pass
    raise DataError(
        f'{where}: does not name a record; expected FILE:LINE, an id, {{"file": …, "line": …}} or {{"id": …}}'
    )
