"""Records that are read for a command: counted in its ledger, faulty ones raised or written to the file of rejects."""

from __future__ import annotations

import json
import shutil
import stat
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Literal, Self

from chatmill.errors import DataError, RecordError, UsageError
from chatmill.ledger import UNREAD_KEY, Ledger
from chatmill.plain_file import local_path
from chatmill.records.files import expand, shown
from chatmill.records.read import FilePart, plan, read_records
from chatmill.records.record import Record
from chatmill.records.shapes import ShapeOptions
from chatmill.records.shapes.decode import json_line
from chatmill.store import files

KEYS = ("file", "line", "id", "kind", "reason", "raw")
"""The keys of a line, in order."""


def note_keys(ledger: Ledger, records: Iterable[Record]) -> None:
    """Note keys that are not read, and records with a weight."""
    for record in records:
        for name in record.unread_keys:
            ledger.add("noted", UNREAD_KEY + name, rows=1)
        if record.weight != 1:
            ledger.add("noted", "record_weight", rows=1)


def rejects_path(output: Path | None) -> Path:
    """Where rejects go if no file is named: beside the output, as NAME.rejects.jsonl."""
    if output is not None and output.name in ("", ".."):
        raise UsageError(f"{output}: has no name of its own; give the output as NAME or DIR/NAME")
    return Path("rejects.jsonl") if output is None else output.with_name(f"{output.name}.rejects.jsonl")


class Rejects:
    """Writes a JSONL file of rejected records, and counts them by kind. Call it with each fault.

    A line has file, line, id, kind, reason (the text of the fault) and the beginning of the record. The file appears
    whole when the block ends, even if nothing is rejected; if it ends with an error, only where that is due to the
    input. It must not be a file that the command `reads`, nor in its `output`; an earlier file of rejects is replaced
    only with `overwrite`, any other file never.
    """

    def __init__(
        self, path: str | Path, *, reads: Sequence[Path] = (), output: Path | None = None, overwrite: bool = False
    ) -> None:
        self.path, self._overwrite = local_path(path), overwrite
        self.counts: Counter[str] = Counter()
        self._file: IO[bytes] | None = None
        self._is_device = self.path.exists() and stat.S_ISCHR(self.path.stat().st_mode)
        if self._is_device:
            # Such as /dev/null.
            return
        if output is not None and files.real(output) in (files.real(self.path), *files.real(self.path).parents):
            raise UsageError(f"{shown(self.path)}: is the output, or lies in it; name another file for the rejects")
        if any(files.real(each) == files.real(self.path) or _same(each, self.path) for each in reads):
            raise UsageError(f"{shown(self.path)}: is read, and rejects would be written over it; name another file")
        if output is None or output.parent != self.path.parent or output.parent.exists():
            # The folder of the output is made if need be.
            files.refuse_existing(self.path, overwrite=overwrite)
        if self.path.exists() and not _holds_rejects(self.path):
            raise DataError(f"{shown(self.path)}: is no file of rejects, so that it is not replaced; name another")

    def __enter__(self) -> Self:
        # Without a name until it is complete: a command that fails or is killed leaves nothing.
        place = next(folder for folder in self.path.absolute().parents if folder.is_dir())
        self._file = tempfile.TemporaryFile(dir=None if self._is_device else place)
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *error: object) -> None:
        if self._file is None:
            return
        with self._file as file:
            if kind is None or (self.counts and issubclass(kind, DataError)):
                file.seek(0)
                files.make_folder(self.path.parent)
                whole = files.writing(self.path, overwrite=self._overwrite)
                with self.path.open("wb") if self._is_device else whole as out:
                    shutil.copyfileobj(file, out)

    def __call__(self, fault: RecordError) -> None:
        if self._file is None:
            raise ValueError("rejects are written inside `with Rejects(path)` only")
        line = {name: getattr(fault, name) for name in ("file", "line", "id", "kind")}
        line |= {"reason": f"{fault.what}; {fault.right}", "raw": fault.raw.decode(errors="replace")}
        self._file.write(json_line(line))
        self.counts[fault.kind] += 1


def _same(one: Path, other: Path) -> bool:
    """Whether two paths are one file, by links of any kind."""
    return one.exists() and other.exists() and one.samefile(other)


def _holds_rejects(path: Path) -> bool:
    """Whether a file is empty or begins with a line as `Rejects` writes it."""
    with path.open("rb") as file:
        line = file.readline(1 << 20)
    try:
        return not line or tuple(json.loads(line)) == KEYS
    except (ValueError, TypeError, RecursionError):
        return False


class CountedRecords:
    """The records of some inputs, each counted in its ledger. A context manager, which writes the file of rejects."""

    def __init__(
        self,
        inputs: list[str],
        *,
        shape: str | None = None,
        options: ShapeOptions | None = None,
        on_error: Literal["stop", "skip"] = "stop",
        rejects: Path | None = None,
        reads: Sequence[Path] = (),
        output: Path | None = None,
        overwrite: bool = False,
    ) -> None:
        """`reads` is what the command reads besides the inputs, `output` what it writes; see `Rejects`."""
        self._inputs, self._shape, self._options, self.ledger = inputs, shape, options or ShapeOptions(), Ledger()
        self.rejects = None
        if on_error == "skip":
            path, reads = rejects or rejects_path(output), [*expand(inputs), *reads]
            self.rejects = Rejects(path, reads=reads, output=output, overwrite=overwrite)
        self._records: Iterator[Record] = iter(())

    def __enter__(self) -> Self:
        if self.rejects is not None:
            self.rejects.__enter__()
        self._records = read_records(
            self._inputs, shape=self._shape, options=self._options, on_error="skip", on_reject=self._reject_unread
        )
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if self.rejects is not None:
            self.rejects.__exit__(kind, *error)

    def __iter__(self) -> Iterator[Record]:
        for record in self._records:
            self.ledger.add("read", rows=1)
            note_keys(self.ledger, (record,))
            yield record

    def files(self) -> list[FilePart]:
        """The files that are read, with their shapes."""
        return plan(self._inputs, shape=self._shape, options=self._options)

    def reject(self, fault: RecordError) -> None:
        """Reject a record that was read: raise its fault, or write it to the rejects."""
        if self.rejects is None:
            raise fault
        self.rejects(fault)
        self.ledger.add("rejected", fault.kind, rows=1)

    def _reject_unread(self, fault: RecordError) -> None:
        self.ledger.add("read", rows=1)
        self.reject(fault)
