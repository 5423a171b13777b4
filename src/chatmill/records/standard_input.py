"""Copy standard input to a temporary file, because chatmill reads its input several times."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from chatmill.errors import RecordError, UsageError
from chatmill.records.compressed import MAGIC, SKIPPABLE, decompressed
from chatmill.records.shapes.decode import decode

NAME = "-"
"""The file name that means standard input."""
_PREFIX = "chatmill-standard-input-"
_LOOK = 1 << 18
_CHUNK = 1 << 20
_folder: Path | None = None
"""Folder with the copy of standard input."""


def is_standard_input(path: Any) -> bool:
    """Whether a file is a copy of standard input."""
    return isinstance(path, Path) and path.parent.name.startswith(_PREFIX)


def standard_input() -> Path:
    """Copy standard input to a temporary file with the suffix of its format, and return the path of the file."""
    global _folder
    if _folder is None:
        if sys.stdin is None or sys.stdin.closed:
            raise UsageError("-: standard input is closed; pass a file, or pipe records to chatmill")
        if sys.stdin.isatty():
            print("chatmill: reading records from the terminal; press Ctrl-D to finish", file=sys.stderr)
        _folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        atexit.register(remove_standard_input, os.getpid())
        _remove_when_terminated()
        path = _folder / "stdin"
        with path.open("xb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file, _CHUNK)
        path.rename(_folder / f"stdin{_suffix(path)}")
    [path] = _folder.iterdir()
    return path


def remove_standard_input(process: int | None = None) -> None:
    """Remove the copy of standard input, if this process wrote it."""
    global _folder
    if _folder is not None and process in (None, os.getpid()):
        shutil.rmtree(_folder, ignore_errors=True)
        _folder = None


def _remove_when_terminated() -> None:
    """Remove the copy of standard input when a signal ends the process, because atexit handlers do not run then."""
    owner = os.getpid()

    def remove_and_end(number: int, frame: Any) -> None:
        remove_standard_input(owner)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            # Do not replace handlers that other code has set.
            if signal.getsignal(number) == signal.SIG_DFL:
                signal.signal(number, remove_and_end)


def _suffix(path: Path) -> str:
    with path.open("rb", buffering=0) as file:
        start = file.read(_LOOK)
        compression = next((ending for ending, magic in MAGIC.items() if start.startswith(magic)), "")
        if start.startswith(SKIPPABLE):
            compression = ".zst"
        if compression:
            file.seek(0)
            reader = decompressed(file, compression, NAME)
            try:
                start = reader.read(_LOOK)
            except RecordError:
                # The error is reported later, when the file is read.
                start = b"{"
    return _kind(start) + compression


def _kind(start: bytes) -> str:
    if start.startswith(b"PAR1"):
        return ".parquet"
    if start.startswith((b"ARROW1", b"\xff\xff\xff\xff")):
        return ".arrow"
    lines = start.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    first, *others = [line for line in lines if line.strip()] or [b"{"]
    if not first.lstrip().startswith((b"{", b"[")):
        return ".txt"
    # If one object spans several lines, its first line is not valid JSON, and the next line does not start an object.
    is_object = first.startswith(b"{") and others and not others[0].startswith(b"{") and not _is_json(first)
    return ".json" if is_object else ".jsonl"


def _is_json(line: bytes) -> bool:
    try:
        decode(line)
    except (RecordError, RecursionError):
        return False
    return True
