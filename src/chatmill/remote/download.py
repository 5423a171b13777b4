"""Download objects with several concurrent range requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future

from chatmill.remote.objects import RANGE_BYTES, read
from chatmill.remote.threads import submit
from chatmill.remote.urls import Url

AHEAD = 4
"""Maximum number of byte ranges of one object that are requested or in memory at the same time."""


def ordered_pieces(url: Url, size: int) -> Iterator[bytes]:
    """Yield the first `size` bytes of an object in consecutive pieces, or all bytes of a shorter object."""
    ranges = ((start, min(size, start + RANGE_BYTES)) for start in range(0, size, RANGE_BYTES))
    if size <= RANGE_BYTES:
        yield from (read(url, *each) for each in ranges)
        return
    pending: deque[Future[bytes]] = deque()
    try:
        for start, stop in ranges:
            pending.append(submit(lambda start=start, stop=stop: read(url, start, stop)))  # type: ignore[misc]
            if len(pending) == AHEAD:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        for future in pending:
            future.cancel()
