"""Stop requests: the first SIGINT or SIGTERM is noted, and the run ends after saving a checkpoint."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class StopRequest:
    """Whether a signal requested the end of the run, and which one."""

    by: str | None = None


@contextmanager
def stop_on_signal() -> Iterator[StopRequest]:
    """Note the first signal; the second has its usual effect."""
    request = StopRequest()
    previous: dict[signal.Signals, Any] = {}

    def restore() -> None:
        while previous:
            signal.signal(*previous.popitem())

    def note(number: int, _: Any) -> None:
        request.by = signal.Signals(number).name
        restore()

    try:
        for each in (signal.SIGINT, signal.SIGTERM):
            previous[each] = signal.signal(each, note)
    except ValueError:
        # Only the main thread can handle signals; in another one they are left to the main thread.
        previous.clear()
    try:
        yield request
    finally:
        restore()
