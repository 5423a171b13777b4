"""Being asked to stop: the first SIGINT or SIGTERM is noted, and the run ends when it has saved."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class StopRequest:
    """Whether somebody asked to stop, and by which signal."""

    by: str | None = None


@contextmanager
def noted() -> Iterator[StopRequest]:
    """Note the first signal; the second does what signals always do."""
    asked = StopRequest()
    usual: dict[signal.Signals, Any] = {}

    def restore() -> None:
        while usual:
            signal.signal(*usual.popitem())

    def note(number: int, _: Any) -> None:
        asked.by = signal.Signals(number).name
        restore()

    try:
        for each in (signal.SIGINT, signal.SIGTERM):
            usual[each] = signal.signal(each, note)
    except ValueError:
        # Only the main thread hears signals; in another one they are somebody else's.
        usual.clear()
    try:
        yield asked
    finally:
        restore()
