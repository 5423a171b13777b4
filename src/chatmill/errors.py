"""Error classes. Each error message states where the problem is, what is wrong, and what is expected.

Every error that a user can cause is a `ChatmillError` with a one-line message. The command line prints the message and
exits with `exit_code`; a traceback is always a bug in chatmill.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from traceback import walk_tb

_NOT_ASCII_PRINTABLE = re.compile(r"[^ -~]+")


class ChatmillError(Exception):
    """An error that the user can fix.

    The error message is one line; it states where the problem is, what is wrong, and what is expected.

    >>> try:
    ...     open_dataset("nowhere")
    ... except ChatmillError as error:
    ...     print(error)
    nowhere: ...
    """

    exit_code = 1

    def __str__(self) -> str:
        # Messages contain names from the data, which may contain any characters.
        return one_line(super().__str__(), None)


class UsageError(ChatmillError):
    """An invalid flag, name or setting, or an invalid combination of settings."""

    exit_code = 2


class DataError(ChatmillError, ValueError):
    """Invalid data. `DataError` is a subclass of `ValueError`, so `except ValueError` also catches it."""


class RecordError(DataError):
    """An invalid record. The error message has the form `file:line (id=…): what; right`.

    The rejects file stores `what` and `right` as the reason, and the ledger counts rejected records by `kind`.
    """

    def __init__(self, what: str, right: str, *, kind: str) -> None:
        super().__init__(f"{what}; {right}")
        self.what = what
        self.right = right
        self.kind = kind
        self.file = ""
        self.line = 0
        self.id: str | None = None
        self.raw = b""
        """The beginning of the record, as in the file."""

    def at(self, file: str, line: int, id: str | None = None) -> RecordError:
        """Set the file, the line and the record id of the error, and return the error."""
        self.file, self.line, self.id = file, line, id
        return self

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle all attributes, because worker processes send errors to the main process."""
        return _record_error, (self.what, self.right, self.kind, vars(self))

    def __str__(self) -> str:
        name = f" (id={one_line(self.id)})" if self.id is not None else ""
        place = f"{one_line(self.file, 1000)}:{self.line}{name}: " if self.file else ""
        return one_line(f"{place}{self.what}; {self.right}", None)


def _record_error(what: str, right: str, kind: str, state: dict[str, object]) -> RecordError:
    fault = RecordError(what, right, kind=kind)
    vars(fault).update(state)
    return fault


def one_line(text: str, limit: int | None = 80, *, keep: str = "") -> str:
    r"""Make text from data safe to print: escape unprintable characters and truncate after `limit` characters.

    Line breaks, control characters, direction marks and other invisible characters are escaped, and so are bytes in
    file names that are not UTF-8. Characters in `keep`, such as line breaks, are not escaped.

    >>> print(one_line("a\x1b[2J\nb\u202e"))
    a\x1b[2J\nb\u202e
    """
    kept = text if limit is None else text[:limit]
    shown = kept if kept.isprintable() else _NOT_ASCII_PRINTABLE.sub(lambda run: _escaped(run[0], keep), kept)
    return shown if len(kept) == len(text) else shown + "…"


def _escaped(run: str, keep: str) -> str:
    if run.isprintable():
        return run
    return "".join(ch if ch.isprintable() or ch in keep else ch.encode("unicode_escape").decode() for ch in run)


def name_file(error: OSError) -> OSError:
    """Add the file name to an `OSError` that has none.

    An `OSError` raised while reading, mapping or closing an open file does not contain the file name. The name is taken
    from the first `Path` in the local variables of the traceback, starting with the innermost frame.
    """
    if error.filename is None and error.errno is not None:
        frames = [frame.f_locals.values() for frame, _ in walk_tb(error.__traceback__)]
        paths = [value for values in reversed(frames) for value in values if isinstance(value, Path)]
        error.filename = str(paths[0]) if paths else None
    return error


def system_fault(error: OSError) -> str:
    """Format an `OSError` as one line: the file, if known, and the reason."""
    name = name_file(error).filename
    return f"{one_line(os.fsdecode(name or 'input or output'), 1000)}: {error.strerror or error}"
