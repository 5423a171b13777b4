"""Read, write, list and remove remote objects, with retries. Error messages are one line, and never contain
credentials.

A request is retried after transient errors, such as a broken connection or a rate limit. Retries stop after `ATTEMPTS`
attempts, or after `TIME_LIMIT` seconds if at least two attempts were made. Errors that a retry cannot fix, such as a
wrong name, are raised immediately.
"""

from __future__ import annotations

import posixpath
import random
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from chatmill.errors import ChatmillError, UsageError
from chatmill.remote.faults import (
    ExistingObjectError,
    MissingObjectError,
    RemoteError,
    advice,
    is_missing,
    is_missing_bucket,
    is_permanent,
    is_precondition,
    reason,
    status_of,
)
from chatmill.remote.filesystems import filesystem, shown
from chatmill.remote.multipart import PART_BYTES, upload_in_parts
from chatmill.remote.urls import EXTRAS, READ_ONLY, Url
from chatmill.remote.web import read_web

__all__ = [
    "ATTEMPTS",
    "ExistingObjectError",
    "MissingObjectError",
    "ObjectInfo",
    "RANGE_BYTES",
    "RemoteError",
    "check_writable",
    "find",
    "first_below",
    "infos_below",
    "matches",
    "missing",
    "names_below",
    "read",
    "remove",
    "shown",
    "upload",
    "write",
]

T = TypeVar("T")
ATTEMPTS = 6
"""Maximum number of attempts before a transient error is raised."""
TIME_LIMIT = 15.0
"""Seconds after which a request is no longer retried; it is attempted at least twice."""
FIRST_DELAY = 0.2
"""Seconds before the second attempt. The delay doubles after each attempt, and varies randomly by up to 50%."""
RANGE_BYTES = 8 << 20
"""Maximum number of bytes per request, so that little data must be read again after a broken connection."""
VERSIONS = (
    "generation",
    "ETag",
    "etag",
    "blob_id",
    "mtime",
    "last_modified",
    "LastModified",
    "Last-Modified",
    "created",
)
"""Keys under which storage libraries report the version of an object, in order of preference."""
TIMES = ("LastModified", "last_modified", "mtime", "updated", "created")
"""Keys under which storage libraries report the modification time of an object, in order of preference."""


@dataclass(frozen=True)
class ObjectInfo:
    size: int
    version: str
    """The generation, ETag or modification time, which changes when the object is rewritten; empty if unknown."""
    modified: float | None = None
    """Modification time according to the server, in seconds since 1970; None if unknown."""


def find(url: Url) -> ObjectInfo | None:
    """Return the size and version of an object, or None if the object does not exist or is a folder."""
    try:
        described = _retried(url, "read", lambda opened, path: _fresh(opened).info(path))
    except MissingObjectError:
        return None
    if described.get("type") == "directory":
        return None
    if described.get("size") is None:
        raise RemoteError(
            f"{shown(url)}: the server does not report the size; download the file, and use the local copy"
        )
    return _info(described)


def _info(described: Mapping[str, Any]) -> ObjectInfo:
    version = next((str(described[name]) for name in VERSIONS if described.get(name)), "")
    times = (described.get(name) for name in TIMES)
    modified = next((at.timestamp() for at in times if isinstance(at, datetime) and at.tzinfo), None)
    return ObjectInfo(int(described["size"]), version, modified)


def read(url: Url, start: int = 0, stop: int | None = None) -> bytes:
    """Return the bytes [start, stop) of an object, or fewer if the object is shorter; without `stop`, read to the end.

    Without `stop`, raise `RemoteError` if an object in a bucket is replaced while it is read.
    """
    if stop is not None:
        return _read_ranges(url, start, stop)
    if EXTRAS[url.scheme] == "http":
        return _retried(url, "read", lambda opened, path: read_web(opened, path, start, None))
    if (info := find(url)) is None:
        raise missing(url)
    content = _read_ranges(url, start, info.size)
    if len(content) != max(info.size - start, 0) or (len(content) > RANGE_BYTES and find(url) != info):
        raise RemoteError(f"{shown(url)}: changed while it was being read; try again after the write is complete")
    return content


def _read_ranges(url: Url, start: int, stop: int) -> bytes:
    pieces = []
    while start < stop:
        length = min(stop - start, RANGE_BYTES)
        piece = _retried(url, "read", partial(_read_range, url, start, start + length))
        pieces.append(piece)
        start += len(piece)
        if len(piece) < length:
            break
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _read_range(url: Url, start: int, stop: int, opened: Any, path: str) -> bytes:
    if EXTRAS[url.scheme] == "http":
        return read_web(opened, path, start, stop)
    # Disable read-ahead in the Hugging Face Hub filesystem, because the request already covers the whole range.
    options = {"cache_type": "none"} if url.scheme == "hf" else {}
    try:
        return bytes(opened.cat_file(path, start=start, end=stop, **options))
    except Exception as error:
        if status_of(error) == 416:
            # Status 416 means that the object ends before the range starts.
            return b""
        raise


def write(url: Url, data: bytes, *, new: bool = False, replaces: str | None = None) -> None:
    """Write an object atomically.

    With `new`, raise `ExistingObjectError` if the object exists. With `replaces`, raise `ExistingObjectError` if the
    object is missing or has a different version. If the store supports conditional writes, only one of two concurrent
    writers succeeds; see docs/how-to/remote.md.
    """
    check_writable(url)
    if new or replaces:
        # Check the condition first, because some stores ignore conditions on writes.
        info = find(url)
        if info is not None if new else (info is None or info.version != replaces):
            raise _exists(url)
    call = partial(_write_once, data=data, new=new, replaces=replaces)
    _retried(url, "written", call, is_done=lambda: (new or bool(replaces)) and read(url) == data)


def _write_once(opened: Any, path: str, *, data: bytes, new: bool, replaces: str | None) -> None:
    kind = EXTRAS[opened.protocol if isinstance(opened.protocol, str) else opened.protocol[0]]
    options: dict[str, Any] = {}
    if new:
        options = {"mode": "create"}
    elif replaces and kind == "s3":
        options = {"IfMatch": replaces}
    elif replaces and kind == "az":
        from azure.core import MatchConditions

        options = {"etag": replaces, "match_condition": MatchConditions.IfNotModified}
    elif replaces and kind == "gs":
        bucket, key, _ = opened.split_path(path)
        address = opened.base.replace("/storage/v1/", "/upload/storage/v1/") + f"b/{bucket}/o"
        opened.call("POST", address, uploadType="media", name=key, ifGenerationMatch=replaces, data=data)
        return
    opened.pipe_file(path, data, **options)


def upload(url: Url, path: Path) -> None:
    """Upload a local file of any size as an object."""
    check_writable(url)
    size = path.stat().st_size
    if EXTRAS[url.scheme] != "s3" or size <= PART_BYTES:
        _retried(url, "written", lambda opened, target: opened.put_file(str(path), target), bulk=True)
        return

    def call(method: str, **arguments: Any) -> Any:
        def send(opened: Any, target: str) -> Any:
            bucket, key, _ = opened.split_path(target)
            return opened.call_s3(method, Bucket=bucket, Key=key, **arguments)

        try:
            return _retried(url, "written", send)
        except MissingObjectError:
            # If an earlier attempt completed the upload but its response was lost, the upload id no longer exists.
            if method == "complete_multipart_upload" and (info := find(url)) is not None and info.size == size:
                return None
            raise

    upload_in_parts(path, size, call)


def names_below(url: Url) -> list[Url]:
    """Return the sorted URLs of all objects in a folder and its subfolders; empty if the folder does not exist."""
    _check_listable(url)
    try:
        listed = _retried(url, "listed", lambda opened, path: _fresh(opened).find(path))
    except MissingObjectError:
        return []
    return _urls_of(url, listed)


def infos_below(url: Url) -> dict[Url, ObjectInfo]:
    """Return all objects in a folder and its subfolders, each with its size and version."""
    _check_listable(url)
    try:
        listed = _retried(url, "listed", lambda opened, path: _fresh(opened).find(path, detail=True))
    except MissingObjectError:
        return {}
    files = {name: each for name, each in listed.items() if each.get("type") != "directory"}
    return dict(zip(_urls_of(url, files), (_info(files[name]) for name in _object_names(files)), strict=True))


def first_below(url: Url) -> list[str]:
    """Return the sorted names of the objects and subfolders directly in a folder.

    On S3, the result has at most 1,000 names, because only one request is made.
    """
    _check_listable(url)

    def call(opened: Any, path: str) -> list[str]:
        if EXTRAS[url.scheme] != "s3":
            return [str(each["name"]) for each in _fresh(opened).ls(path, detail=True)]
        # Do not use `ls`, which lists the whole parent folder if the folder does not exist.
        bucket, key, _ = opened.split_path(path)
        listed = opened.call_s3("list_objects_v2", Bucket=bucket, Prefix=f"{key}/", Delimiter="/")
        folders = [each["Prefix"] for each in listed.get("CommonPrefixes", [])]
        return [*folders, *(each["Key"] for each in listed.get("Contents", []) if each["Key"] != f"{key}/")]

    try:
        return sorted({posixpath.basename(name.rstrip("/")) for name in _retried(url, "listed", call)})
    except MissingObjectError:
        return []


def matches(url: Url) -> list[Url]:
    """Return the sorted URLs of the objects that match a glob pattern."""
    _check_listable(url)
    listed = _retried(url, "listed", lambda opened, path: _fresh(opened).glob(path, detail=True))
    return _urls_of(url, (name for name, described in listed.items() if described.get("type") != "directory"))


def remove(urls: Iterable[Url]) -> None:
    """Remove objects, and ignore objects that do not exist."""
    for url in urls:
        check_writable(url)
        try:
            _retried(url, "removed", lambda opened, path: opened.rm_file(path))
        except MissingObjectError:
            continue


def check_writable(url: Url) -> None:
    """Raise `UsageError` if chatmill cannot write to URLs with this scheme."""
    if url.scheme in READ_ONLY:
        raise UsageError(
            f"{shown(url)}: {url.scheme}:// can only be read; write to s3://, gs://, az:// or a local path"
        )


def _check_listable(url: Url) -> None:
    if EXTRAS[url.scheme] == "http":
        raise UsageError(f"{shown(url)}: files on web servers cannot be listed; pass the URL of each file")


def missing(url: Url) -> MissingObjectError:
    if EXTRAS[url.scheme] == "http":
        return MissingObjectError(f"{shown(url)}: no such file (404); check the URL")
    return MissingObjectError(f"{shown(url)}: no such object; check the name")


def _holder(url: Url) -> str:
    """Describe the bucket, container or repository of an object, such as "the bucket NAME"."""
    if url.scheme == "hf":
        return "the repository"
    name = shown(url).partition("://")[2].partition("/")[0].partition("@")[0]
    return f"the {'container' if EXTRAS[url.scheme] == 'az' else 'bucket'} {name}"


def _exists(url: Url) -> ExistingObjectError:
    return ExistingObjectError(f"{shown(url)}: the object already exists, or was replaced in the meantime")


def _urls_of(url: Url, names: Iterable[str]) -> list[Url]:
    objects = _object_names(names)
    # Listed names lack the scheme and, for abfs://CONTAINER@ACCOUNT/…, the account, so take both from `url`.
    scheme, _, path = url.address.partition("://")
    host = path.partition("/")[0]
    account = f"@{host.partition('@')[2]}" if "@" in host else ""
    urls = []
    for name in objects:
        first, slash, key = name.lstrip("/").partition("/")
        urls.append(Url(f"{scheme}://{first}{account}{slash}{key}"))
    return urls


def _object_names(names: Iterable[str]) -> list[str]:
    """Return the sorted names without folder placeholders, which end with "/"."""
    return sorted(name for name in names if not name.endswith("/"))


def _fresh(opened: Any) -> Any:
    """Clear the filesystem's cached listings, because other processes may have written objects."""
    opened.invalidate_cache()
    return opened


def _retried(
    url: Url,
    what: str,
    call: Callable[[Any, str], T],
    *,
    bulk: bool = False,
    is_done: Callable[[], bool] = lambda: False,
) -> T | Any:
    """Return the result of `call(filesystem, path)`; retry the call after transient errors.

    If `bulk` is set, `TIME_LIMIT` does not apply. If a precondition fails on a retry, `is_done` checks whether an
    earlier attempt has succeeded.
    """
    delay = FIRST_DELAY
    first = time.monotonic()
    for attempt in range(ATTEMPTS):
        try:
            return call(*filesystem(url))
        except ChatmillError:
            raise
        except Exception as error:
            if is_precondition(error):
                if attempt and is_done():
                    return None
                raise _exists(url) from None
            if is_missing_bucket(error):
                raise RemoteError(f"{shown(url)}: {_holder(url)} does not exist; create it or check its name") from None
            if is_missing(error):
                raise missing(url) from None
            late = attempt > 0 and not bulk and time.monotonic() - first > TIME_LIMIT
            if attempt + 1 == ATTEMPTS or late or is_permanent(error):
                help_text = advice(error, is_s3=EXTRAS[url.scheme] == "s3")
                raise RemoteError(f"{shown(url)}: cannot be {what} ({reason(error)}); {help_text}") from None
        time.sleep(delay * random.uniform(0.5, 1.5))
        delay *= 2
    raise AssertionError
