"""Detect input files that change while they are read, or before an interrupted build is resumed.

    before planning     InputFiles    size, times and inode of every file, size and version of every object
    for each part       BytesRead     which bytes were read, and their hash
    at the end          InputFiles.check

If the `stat` result of a file or the version of an object changes, the bytes are read again and must have the same
hash. Only changed content is an error, so `touch` and `chmod` are allowed.
"""

from __future__ import annotations

import stat
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from chatmill.errors import DataError
from chatmill.records.files import expand, identity, refuse_repeated, shown
from chatmill.records.raw_files import has_bytes
from chatmill.records.read_log import BytesRead
from chatmill.remote import objects
from chatmill.remote.threads import in_threads
from chatmill.remote.urls import Place, Url, place

FRESH = 2.0
"""Resolution of file times in seconds; two changes within this time may have the same timestamp."""


class _State(NamedTuple):
    """The `stat` result of a file. If the file is replaced, the inode or the change time differs."""

    size: int
    modified: int
    changed: int
    inode: tuple[int, int]


class InputFiles:
    """The size, times and version of all input files before they are read. `groups[i]` lists the files that match
    `inputs[i]`.
    """

    def __init__(self, inputs: Sequence[Sequence[str | Place]]) -> None:
        self._inputs = inputs
        refuse_repeated(name for names in inputs for name in names)
        self.groups = [expand(names) for names in inputs]
        began = time.time()
        self._states = _states(path for group in self.groups for path in group)
        self._fresh = {path for path, state in self._states.items() if _may_change_unseen(state, began)}

    @property
    def sizes(self) -> dict[Place, int]:
        return {path: state.size for path, state in self._states.items()}

    def check_size(self, path: Place) -> None:
        """Raise a `DataError` if a file was removed or its size changed.

        Files in object stores are checked only by `check`, at the end, because each check takes a request.
        """
        if isinstance(path, Path):
            self._compare_sizes(path, _state(path))

    def _compare_sizes(self, path: Place, state: _State | objects.ObjectInfo) -> None:
        before, now = self._states[path].size, state.size
        if now != before:
            what = "grew" if now > before else "shrank"
            raise _changed(path, f"{what} from {before:,} to {now:,} bytes")

    def check_times(self) -> None:
        """Raise a `DataError` if the size, times or version of any input file changed. The build calls this method
        after an invalid record, because a changed file may be the cause.
        """
        for path, state in _states(self._states).items():
            self._compare_sizes(path, state)
            if state != self._states[path]:
                raise _changed(path, "was changed")

    def check(self, parts: Iterable[tuple[Place, BytesRead]], *, is_planned: Callable[[], bool]) -> None:
        """Raise a `DataError` if the files no longer contain the bytes that were read.

        If a file may have changed, `is_planned` is called; it must split the files into parts again and return whether
        the parts are the same.
        """
        now = _states(self._states)
        for path, state in now.items():
            self._compare_sizes(path, state)
        doubtful = {path for path, state in now.items() if state != self._states[path] or path in self._fresh}
        for path, read in parts:
            if any(end != self._states[path].size for end in read.ends):
                raise _changed(path, "changed size")
            if path in doubtful and not has_bytes(path, read):
                raise _changed(path, "was changed")
        if doubtful and not is_planned():
            raise _changed(min(doubtful, key=str), "was changed")
        for path, state in _states(doubtful).items():
            if state != now[path]:
                raise _changed(path, "was changed")

    def check_names(self) -> None:
        """Raise a `DataError` if a glob now matches additional files."""
        for names, before in zip(self._inputs, self.groups, strict=True):
            known = {identity(path) for path in before}
            for name in names:
                for path in expand([name]):
                    if identity(path) not in known:
                        raise DataError(
                            f"{shown(path)}: appeared while the input was being read, and matches "
                            f"{shown(place(name))}; build again after all files have been added"
                        )


def _states(paths: Iterable[Place]) -> dict[Place, _State | objects.ObjectInfo]:
    states: dict[Place, _State | objects.ObjectInfo | None] = dict.fromkeys(paths)
    urls = [path for path in states if isinstance(path, Url)]
    # Start no threads if all URLs are memory:// URLs, because the process may fork later.
    infos = in_threads(_object_state, urls, here=all(url.scheme == "memory" for url in urls))
    states |= dict(zip(urls, infos, strict=True))
    return {path: state or _state(path) for path, state in states.items()}  # type: ignore[arg-type]


def _object_state(url: Url) -> objects.ObjectInfo:
    if (info := objects.find(url)) is None:
        raise _changed(url, "was removed")
    return info


def _may_change_unseen(state: _State | objects.ObjectInfo, began: float) -> bool:
    """Whether the content of a file or object could change while its size, times and version stay the same."""
    if isinstance(state, _State):
        return state.changed / 1e9 > began - FRESH
    return not state.version


def _state(path: Path) -> _State:
    try:
        status = path.stat()
    except OSError as error:
        raise _changed(path, f"could no longer be opened ({error.strerror})") from None
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"{shown(path)}: is a pipe or a device; write its output to a file, and pass the file")
    return _State(status.st_size, status.st_mtime_ns, status.st_ctime_ns, (status.st_dev, status.st_ino))


def _changed(path: Place, what: str) -> DataError:
    return DataError(f"{shown(path)}: {what} while it was being read; build again when no process is writing to it")
