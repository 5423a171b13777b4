"""Download objects into the cache before they are needed, in background threads."""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from chatmill.errors import ChatmillError
from chatmill.remote import cache
from chatmill.remote.objects import RemoteError
from chatmill.remote.urls import Url

THREADS = 8
"""Maximum number of concurrent downloads; downloads of small objects mostly wait for the server."""
JOIN_SECONDS = 5.0
"""Maximum time in seconds that an exiting process waits for requests in progress."""


class RemoteObject(NamedTuple):
    """A remote object with a known size and hash."""

    url: Url
    size: int
    sha256: str


class Progress(NamedTuple):
    """Number of objects and bytes downloaded so far, and the total number of objects and bytes."""

    objects: int
    all_objects: int
    bytes: int
    all_bytes: int


class Prefetch:
    """Downloads objects to the cache in the given order, at most `limit` bytes (or one larger object) ahead of use.

    Call `used` after using an object, so that the next object can be downloaded. An object that cannot be downloaded is
    skipped: the code that needs the object tries the download again, and raises the error if that fails too.
    """

    def __init__(self, objects: Sequence[RemoteObject], limit: int) -> None:
        self.process = os.getpid()
        """The process that owns the threads; a forked process needs its own `Prefetch`."""
        self._objects = list(dict.fromkeys(objects))
        self._limit = limit
        self._changed = threading.Condition()
        self._next = self._unused = self._done = self._done_bytes = 0
        self._fetched: dict[str, int] = {}
        self._used: set[str] = set()
        self._stopped = False
        self._threads = [
            threading.Thread(target=self._work, name="chatmill-fetch", daemon=True)
            for _ in range(min(THREADS, len(self._objects)))
        ]
        _running.add(self)
        for thread in self._threads:
            thread.start()

    @property
    def progress(self) -> Progress:
        return Progress(self._done, len(self._objects), self._done_bytes, sum(each.size for each in self._objects))

    def used(self, sha256: str) -> None:
        """Record that an object was used, or that the caller downloads the object itself."""
        if sha256 not in self._used:
            with self._changed:
                self._used.add(sha256)
                self._unused -= self._fetched.pop(sha256, 0)
                self._changed.notify_all()

    def stop(self) -> None:
        """Abort the downloads in progress, and let the threads end."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def join(self, seconds: float) -> None:
        """Wait at most `seconds` seconds for the threads to end."""
        end = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _work(self) -> None:
        while (each := self._take()) is not None:
            try:
                cache.fetch(each.url, size=each.size, sha256=each.sha256, is_stopped=lambda: self._stopped)
            except RemoteError:
                continue
            except (ChatmillError, OSError, cache.DownloadStoppedError):
                # Stop, because the cause, such as a full disk, would probably affect the remaining downloads too.
                self.stop()
                return
            with self._changed:
                self._done += 1
                self._done_bytes += each.size

    def _take(self) -> RemoteObject | None:
        """Wait until there is room for the next object, and return this object; return None after the last object or
        after `stop`.
        """
        with self._changed:
            while not self._stopped and self._next < len(self._objects):
                each = self._objects[self._next]
                if each.sha256 in self._used or not self._unused or self._unused + each.size <= self._limit:
                    self._next += 1
                    if each.sha256 not in self._used:
                        self._fetched[each.sha256] = each.size
                        self._unused += each.size
                    return each
                self._changed.wait()
            return None


_running: weakref.WeakSet[Prefetch] = weakref.WeakSet()


def fetch(url: Url, *, size: int, sha256: str) -> Path:
    """Fetch an object through the cache and mark it as used, so that the next object can be prefetched."""
    path = cache.fetch(url, size=size, sha256=sha256)
    for each in list(_running):
        each.used(sha256)
    return path


def _stop_all() -> None:
    running = list(_running)
    for each in running:
        each.stop()
    end = time.monotonic() + JOIN_SECONDS
    for each in running:
        each.join(end - time.monotonic())


atexit.register(_stop_all)
os.register_at_fork(after_in_child=_running.clear)
