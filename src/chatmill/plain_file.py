"""Check local paths and read untrusted files safely: only regular files of a bounded size, without blocking.

Opening a FIFO waits for a writer, and reading a device may never end. The functions in this module raise `OSError` for
FIFOs and devices.
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
"""Maximum size of a JSON file in bytes."""
KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


_URL = re.compile("([a-z][a-z0-9+.-]+):/+", re.IGNORECASE)
"""Matches `s3://bucket/x` and its form as a `Path`, `s3:/bucket/x`, but not the local names `c:/x` and `a:b`."""


def local_path(name: str | Path) -> Path:
    """Return a local path; raise `UsageError` for a URL, because writing to it would create a local folder `s3:`.

    A local folder named `s3:` must be given as an absolute path.
    """
    if url := _URL.match(str(name)):
        text = name if isinstance(name, str) else f"{url[1]}://{str(name)[url.end() :]}"
        # Show the URL without user, password and signature.
        shown = re.sub(r"^([^/]*//)[^/]*@", r"\1", text.partition("?")[0])
        raise UsageError(f"{shown}: is a URL, but a local path is required; download or mount it, and pass the path")
    return Path(name)


def check_plain(path: Path) -> int:
    """Return the size of a regular file; raise `OSError` for any other kind of file, without opening it."""
    status = local_path(path).stat()
    _check(status.st_mode, path)
    return status.st_size


def open_plain(path: Path) -> io.BufferedReader:
    """Open a regular file for reading."""
    check_plain(path)
    # O_NONBLOCK and O_NOCTTY prevent blocking if a FIFO or a terminal has replaced the file since the check.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        _check(os.fstat(fd).st_mode, path)
        return os.fdopen(fd, "rb")
    except BaseException:
        os.close(fd)
        raise


def read_plain(path: Path, limit: int = JSON_LIMIT) -> bytes:
    """Read a regular file; raise `OSError` if it is larger than `limit` bytes."""
    too_large = OSError(errno.EFBIG, f"it is larger than {limit:,} bytes", str(path))
    with open_plain(path) as file:
        # Reading `limit + 1` bytes at once would allocate memory for all of them, even if the file is small.
        if (size := os.fstat(file.fileno()).st_size) > limit:
            raise too_large
        data = file.read(size + 1)
        # Read on if the file has grown, or does not report its size.
        while len(data) <= limit and (more := file.read(min(len(data), limit + 1 - len(data)))):
            data += more
    if len(data) > limit:
        raise too_large
    return data


def _check(mode: int, path: Path) -> None:
    if not stat.S_ISREG(mode):
        kind = KINDS.get(stat.S_IFMT(mode), "a special file")
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))
