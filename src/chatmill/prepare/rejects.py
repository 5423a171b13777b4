"""Read and count records; for an invalid record, raise an error or write it to the rejects file."""

from __future__ import annotations

import json
import shutil
import stat
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Literal, Self

from chatmill.errors import DataError, RecordError, UsageError
from chatmill.ledger import UNREAD_KEY, Ledger
from chatmill.records.files import local_files, shown
from chatmill.records.read import FilePart, plan, read_records
from chatmill.records.record import Record
from chatmill.records.shapes import ShapeOptions
from chatmill.records.shapes.decode import json_line
from chatmill.remote import objects
from chatmill.remote.urls import Place, Url, place
from chatmill.store import files

KEYS = ("file", "line", "id", "kind", "reason", "raw")
"""Keys of each line of a rejects file, in order."""
LONGEST = 1 << 20
"""Maximum number of bytes to read from the first line of an existing rejects file."""


def note_keys(ledger: Ledger, records: Iterable[Record]) -> None:
    """Count unread keys, and records with a weight other than 1, in the ledger."""
    for record in records:
        for name in record.unread_keys:
            ledger.add("noted", UNREAD_KEY + name, rows=1)
        if record.weight != 1:
            ledger.add("noted", "record_weight", rows=1)


def rejects_path(output: Place | None) -> Path:
    """Return the default path of the rejects file: NAME.rejects.jsonl next to the output, or in the current folder if
    the output is a URL.
    """
    if isinstance(output, Url):
        return Path(f"{output.name}.rejects.jsonl")
    if output is not None and output.name in ("", ".."):
        raise UsageError(f"{output}: has no file name; expected NAME or DIR/NAME as the output")
    return Path("rejects.jsonl") if output is None else output.with_name(f"{output.name}.rejects.jsonl")


class Rejects:
    """Writes a JSONL file of rejected records, and counts them by kind. To reject a record, call the `Rejects` object
    with the `RecordError` of the record.

    Each line has file, line, id, kind, reason (the error message) and the beginning of the record. The rejects file is
    written when the `with` block exits, even if no record was rejected. If the block raises an error, the rejects file
    is written only if the input caused the error. The rejects file must not be one of the files in `reads`, and must
    not be inside the folder `output`. An earlier rejects file is replaced only with `overwrite`; other files are never
    replaced.
    """

    def __init__(
        self, path: str | Place, *, reads: Sequence[Path] = (), output: Place | None = None, overwrite: bool = False
    ) -> None:
        self.path, self._overwrite = place(path), overwrite
        self.counts: Counter[str] = Counter()
        self._file: IO[bytes] | None = None
        self._is_device = False
        if isinstance(self.path, Url):
            objects.check_writable(self.path)
            self._check_object(self.path)
        else:
            self._is_device = self.path.exists() and stat.S_ISCHR(self.path.stat().st_mode)
            if not self._is_device:
                self._check_file(self.path, reads, output if isinstance(output, Path) else None)

    def _check_object(self, url: Url) -> None:
        if objects.find(url) is None:
            return
        if not self._overwrite:
            raise DataError(f"{shown(url)}: already exists; use another name or pass --overwrite")
        if not _is_reject(objects.read(url, 0, LONGEST).partition(b"\n")[0]):
            raise _other_file(url)

    def _check_file(self, path: Path, reads: Sequence[Path], output: Path | None) -> None:
        if output is not None and files.real(output) in (files.real(path), *files.real(path).parents):
            raise UsageError(f"{shown(path)}: is the output, or inside it; use another file for the rejects")
        if any(files.real(each) == files.real(path) or _same(each, path) for each in reads):
            raise UsageError(f"{shown(path)}: is an input, which the rejects would overwrite; use another file")
        # If the rejects file is next to the output, their folder may not exist yet.
        if output is None or output.parent != path.parent or output.parent.exists():
            files.refuse_existing(path, overwrite=self._overwrite)
        if path.exists():
            with path.open("rb") as file:
                if not _is_reject(file.readline(LONGEST)):
                    raise _other_file(path)

    def __enter__(self) -> Self:
        # The file has no name until it is complete, so a command that fails or is killed leaves no file behind.
        if isinstance(self.path, Path) and not self._is_device:
            folder = next(folder for folder in self.path.absolute().parents if folder.is_dir())
            self._file = tempfile.TemporaryFile(dir=folder)
        else:
            self._file = tempfile.NamedTemporaryFile(prefix="chatmill-rejects-")
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *error: object) -> None:
        if self._file is None:
            return
        with self._file as file:
            if kind is not None and not (self.counts and issubclass(kind, DataError)):
                return
            file.seek(0)
            if isinstance(self.path, Url):
                # Check again, because another process may have written the object in the meantime.
                self._check_object(self.path)
                objects.upload(self.path, Path(file.name))
            else:
                files.make_folder(self.path.parent)
                whole = files.writing(self.path, overwrite=self._overwrite)
                with self.path.open("wb") if self._is_device else whole as out:
                    shutil.copyfileobj(file, out)

    def __call__(self, fault: RecordError) -> None:
        if self._file is None:
            raise ValueError("rejects can only be written inside `with Rejects(path)`")
        line = {name: getattr(fault, name) for name in ("file", "line", "id", "kind")}
        line |= {"reason": f"{fault.what}; {fault.right}", "raw": fault.raw.decode(errors="replace")}
        self._file.write(json_line(line))
        self.counts[fault.kind] += 1


def _same(one: Path, other: Path) -> bool:
    """Whether two paths refer to the same file, including through links."""
    return one.exists() and other.exists() and one.samefile(other)


def _other_file(path: Place) -> DataError:
    return DataError(f"{shown(path)}: is not a rejects file, so it is not replaced; use another name")


def _is_reject(line: bytes) -> bool:
    """Whether a line is empty or was written by `Rejects`."""
    try:
        return not line or tuple(json.loads(line)) == KEYS
    except (ValueError, TypeError, RecursionError):
        return False


class CountedRecords:
    """Iterates over the records of the input files and counts them in a ledger. When used as a context manager, writes
    the rejects file.
    """

    def __init__(
        self,
        inputs: list[str],
        *,
        shape: str | None = None,
        options: ShapeOptions | None = None,
        on_error: Literal["stop", "skip"] = "stop",
        rejects: Place | None = None,
        reads: Sequence[Path] = (),
        output: Path | None = None,
        overwrite: bool = False,
    ) -> None:
        """`reads` lists files that the command reads in addition to its inputs; for `output`, see `Rejects`."""
        self._inputs, self._shape, self._options, self.ledger = inputs, shape, options or ShapeOptions(), Ledger()
        self.rejects, self._on_error = None, on_error
        if on_error == "skip":
            path, reads = rejects or rejects_path(output), [*local_files(inputs), *reads]
            self.rejects = Rejects(path, reads=reads, output=output, overwrite=overwrite)

    def __enter__(self) -> Self:
        if self.rejects is not None:
            self.rejects.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if self.rejects is not None:
            self.rejects.__exit__(kind, *error)

    def __iter__(self) -> Iterator[Record]:
        for record in read_records(**self.read_options()):
            self.ledger.add("read", rows=1)
            note_keys(self.ledger, (record,))
            yield record

    def files(self) -> list[FilePart]:
        """Return the input files with their shapes."""
        return plan(self._inputs, shape=self._shape, options=self._options, on_error=self._on_error)

    def read_options(self) -> dict[str, Any]:
        """Return the arguments for `read_records` and `survey`."""
        how = {"inputs": self._inputs, "shape": self._shape, "options": self._options}
        return {**how, "on_error": self._on_error, "on_reject": self._reject_unread}

    def reject(self, fault: RecordError) -> None:
        """Reject a record: raise its error, or write it to the rejects file."""
        if self.rejects is None:
            raise fault
        self.rejects(fault)
        self.ledger.add("rejected", fault.kind, rows=1)

    def _reject_unread(self, fault: RecordError) -> None:
        self.ledger.add("read", rows=1)
        self.reject(fault)
