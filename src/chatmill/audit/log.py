"""Read and write audit log files, in which each line ends with the hash of the previous line.

    2026-01-03T16:44:19.628Z | TRAINING | INFO | action=epoch_start | epoch=0 | seed=42 | … | previous=9f2c…

A field value is written as plain text or as a JSON string in which `|` is escaped, so it never contains `|` or a line
break. The log is append-only. If a crash truncates a line, the truncated line stays in the file, and the next line
records its length and hash.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

from chatmill.errors import ChatmillError, DataError, one_line
from chatmill.plain_file import check_plain, local_path, open_plain
from chatmill.store import files

START = "0" * 64
"""The `previous` value of the first line of a log, which has no previous line."""
PREVIOUS = "previous"
PLAIN = re.compile(r"[A-Za-z0-9_.:/+@-]+\Z")
NAME = re.compile(r"[a-z][a-z0-9_]*\Z")
HASH = re.compile(r"[0-9a-f]{64}\Z")
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z\Z")
SEPARATOR = " | "

Clock = Callable[[], datetime]


class AuditError(ChatmillError):
    """Raised if the audit log cannot be written or continued. The training run then stops."""


@dataclass(frozen=True)
class LogLine:
    """One parsed line of an audit log; `raw` is the line without the line break."""

    raw: bytes
    time: str
    action: str
    fields: Mapping[str, str]
    """All fields of the line except `action` and `previous`."""
    previous: str

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.raw).hexdigest()


def now() -> datetime:
    return datetime.now(UTC)


def write_line(time: datetime, action: str, fields: Mapping[str, Any], previous: str) -> bytes:
    """Return the bytes of a log line, without the line break."""
    stamp = time.astimezone(UTC).isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"
    parts = [stamp, "TRAINING", "INFO"]
    for name, value in {"action": action, **fields, PREVIOUS: previous}.items():
        if not NAME.match(name):
            raise ValueError(f"{name!r} is not a valid field name")
        parts.append(f"{name}={_escaped(as_text(value))}")
    return SEPARATOR.join(parts).encode("ascii")


def parse_line(raw: bytes) -> LogLine:
    """Parse a log line; raise `DataError` unless `write_line` would produce exactly the same bytes."""
    try:
        time, category, level, *pairs = raw.decode("ascii").split(SEPARATOR)
        fields = {}
        for pair in pairs:
            name, _, value = pair.partition("=")
            if name in fields:
                raise ValueError(f"the field {one_line(name)} occurs twice")
            fields[name] = json.loads(value) if value.startswith('"') else value
        action, previous = fields.pop("action"), fields.pop(PREVIOUS)
        if not TIME.match(time) or (category, level) != ("TRAINING", "INFO"):
            raise ValueError("the line does not start with a time, TRAINING and INFO")
        if not HASH.match(previous):
            # The hash is the last field, so a truncated line never ends with a complete hash.
            raise ValueError("the line does not end with a complete hash")
        if write_line(datetime.fromisoformat(time), action, fields, previous) != raw:
            raise ValueError("the line is formatted differently from the lines that chatmill writes")
    except KeyError as error:
        raise DataError(f"has no {error.args[0]} field") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"is not an audit log line ({one_line(str(error))})") from None
    return LogLine(raw, time, action, fields, previous)


def as_text(value: Any) -> str:
    """Return a field value as text: strings unchanged, other values as JSON."""
    return value if isinstance(value, str) else json.dumps(value)


def _escaped(text: str) -> str:
    return text if PLAIN.match(text) else json.dumps(text).replace("|", "\\u007c")


@dataclass(frozen=True)
class TornLine:
    """A line of the log file that is not a valid log line, for example because a crash truncated it."""

    raw: bytes
    why: str
    breaks_off: bool = False
    """Whether this is the last line of the file and has no line break."""


def read_log(path: Path) -> list[LogLine | TornLine]:
    """Return the lines of an audit log; an invalid line becomes a `TornLine`."""
    try:
        with open_plain(path) as file:
            raw = file.read()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); expected an audit log") from None
    *complete, unfinished = raw.split(b"\n")
    lines: list[LogLine | TornLine] = []
    for line in complete:
        try:
            lines.append(parse_line(line))
        except DataError as error:
            lines.append(TornLine(line, str(error)))
    if unfinished:
        lines.append(TornLine(unfinished, "is truncated", breaks_off=True))
    return lines


def torn_fields(torn: Sequence[TornLine]) -> dict[str, Any]:
    """Return the fields `torn_bytes` and `torn_sha256`, which the next log line records about invalid lines."""
    raw = b"\n".join(part.raw for part in torn)
    return {"torn_bytes": len(raw), "torn_sha256": hashlib.sha256(raw).hexdigest()}


class AuditLog:
    """An audit log that is open for appending and locked by this process; a failed write raises `AuditError`."""

    def __init__(self, path: Path, fd: int, *, head: str, clock: Clock) -> None:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            files.disk.close(fd)
            raise AuditError(f"{path}: another run is writing this log; use another folder") from None
        self.path = path
        self.head = head
        """The hash of the last line, which depends on all earlier lines."""
        self._fd: int | None = fd
        self._clock = clock
        self._made: list[Path] = []
        """Folders created for this log, innermost first."""
        self._line_break = b""
        """A line break to write before the next line if a crash truncated the last line; otherwise empty."""

    @classmethod
    def create(cls, folder: str | Path, *, clock: Clock = now) -> AuditLog:
        """Create an empty log file, named after the current time."""
        place = local_path(folder)
        stamp = clock().astimezone(UTC).strftime("%Y%m%dT%H%M%SZ")
        made = files.missing_folders(place)
        try:
            files.make_folder(place)
            names = (f"audit_{stamp}{f'_{number}' if number else ''}.log" for number in count())
            path = next(place / name for name in names if not (place / name).exists())
            fd = files.disk.create(path)
            files.disk.sync(place)
        except OSError as error:
            files.remove_all(made)
            raise AuditError(f"{place}: cannot create the audit log ({error.strerror})") from None
        log = cls(path, fd, head=START, clock=clock)
        log._made = made
        return log

    @classmethod
    def reopen(cls, path: str | Path, *, head: str, clock: Clock = now) -> tuple[AuditLog, dict[str, Any]]:
        """Open a log to resume after the line with the hash `head`; return the log and the fields for a new `resume`
        line.

        The lines after `head`, which belong to steps that the resumed run repeats, stay in the file. The `resume` line
        records the number of these lines.
        """
        place = Path(path)
        try:
            check_plain(place)
            fd = files.disk.append(place)
        except OSError as error:
            raise AuditError(
                f"{place}: cannot continue the audit log ({error.strerror}); "
                "restore the log that belongs to the checkpoint"
            ) from None
        log = cls(place, fd, head=head, clock=clock)
        try:
            fields = log._continue()
        except BaseException:
            log.close()
            raise
        return log, fields

    def _continue(self) -> dict[str, Any]:
        """Set `head` to the hash of the last valid line; return the fields for a new `resume` line."""
        everything = read_log(self.path)
        lines = [line for line in everything if isinstance(line, LogLine)]
        torn: list[TornLine] = []
        for line in everything:
            torn = [] if isinstance(line, LogLine) else [*torn, line]
        at = next((number for number, line in enumerate(lines) if line.sha256 == self.head), None)
        if at is None:
            raise AuditError(
                f"{self.path}: no line has the hash {self.head[:12]}… that the checkpoint records; "
                "the log was truncated or changed"
            )
        self._line_break = b"\n" if torn and torn[-1].breaks_off else b""
        if len(torn) == 1 and self._line_break and (whole := _next_line(torn[0].raw, lines[-1])) is not None:
            lines, torn = [*lines, whole], []
        fields = {"head": self.head, "abandoned": len(lines) - 1 - at, **(torn_fields(torn) if torn else {})}
        self.head = lines[-1].sha256
        return fields

    def add(self, action: str, fields: Mapping[str, Any], *, durable: bool = False) -> str:
        """Append a line, store its hash in `head`, and return the hash. With `durable`, also sync the line to disk."""
        if self._fd is None:
            raise AuditError(f"{self.path}: the audit log is closed, or an earlier write failed")
        raw = write_line(self._clock(), action, fields, self.head)
        data = memoryview(self._line_break + raw + b"\n")
        fd, self._fd = self._fd, None
        try:
            while data:
                data = data[files.disk.write(fd, data) :]
            if durable:
                files.disk.sync(self.path)
        except OSError as error:
            files.disk.close(fd)
            raise AuditError(
                f"{self.path}: cannot write the audit log ({error.strerror}); the run stops because it needs the log"
            ) from None
        self._fd, self._line_break, self.head = fd, b"", hashlib.sha256(raw).hexdigest()
        return self.head

    def close(self) -> None:
        if self._fd is not None:
            files.disk.close(self._fd)
            self._fd = None

    def remove(self) -> None:
        """Remove a log file made by `create`, and the folders that `create` made."""
        self.close()
        files.remove_all([self.path, *self._made])


def _next_line(raw: bytes, last: LogLine) -> LogLine | None:
    """Parse `raw` as the line after `last`; return None if `raw` is invalid or does not contain the hash of `last`."""
    try:
        line = parse_line(raw)
    except DataError:
        return None
    return line if line.previous == last.sha256 else None
