"""Paths of this machine, and files that others wrote: plain files of a bounded size, without waiting for anyone.

Opening a FIFO waits for a writer, and reading a device may never end. Here both are an `OSError` at once.
"""

from __future__ import annotations

import errno
import io
import os
import re
import stat
from pathlib import Path

from chatmill.errors import UsageError

JSON_LIMIT = 1 << 26
"""Bytes of a JSON file that are read at most."""
KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


_URL = re.compile("([a-z][a-z0-9+.-]+):/+", re.IGNORECASE)
"""As in `s3://bucket/x`, or in `s3:/bucket/x`, which is what a `Path` makes of it. `c:/x` and `a:b` are local names."""


def local_path(name: str | Path) -> Path:
    """The local path that a user gave; raises `UsageError` for a URL, which would name a local folder `s3:`.

    Give a local path that begins with such a folder as an absolute path.
    """
    if url := _URL.match(str(name)):
        text = name if isinstance(name, str) else f"{url[1]}://{str(name)[url.end() :]}"
        # Without user, password and signature.
        shown = re.sub(r"^([^/]*//)[^/]*@", r"\1", text.partition("?")[0])
        raise UsageError(
            f"{shown}: is a URL, and this must be a local path; download or mount it, and give the path here"
        )
    return Path(name)


def check_plain(path: Path) -> int:
    """The size of a plain file; `OSError` for anything else of that name, which is not opened."""
    status = local_path(path).stat()
    _check(status.st_mode, path)
    return status.st_size


def open_plain(path: Path) -> io.BufferedReader:
    """A plain file, open for reading."""
    check_plain(path)
    # Even if it is exchanged for a FIFO or a terminal in between, nothing waits.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        _check(os.fstat(fd).st_mode, path)
        return os.fdopen(fd, "rb")
    except BaseException:
        os.close(fd)
        raise


def read_plain(path: Path, limit: int = JSON_LIMIT) -> bytes:
    """The bytes of a plain file; `OSError` if there are more than `limit`."""
    with open_plain(path) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"it is larger than {limit:,} bytes", str(path))
    return data


def _check(mode: int, path: Path) -> None:
    if not stat.S_ISREG(mode):
        kind = KINDS.get(stat.S_IFMT(mode), "no file")
        raise OSError(errno.EINVAL, f"it is {kind}, not a plain file", str(path))
