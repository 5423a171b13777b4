"""Handle SIGINT and SIGTERM: a run finishes its current step, writes a checkpoint, and ends."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from chatmill.errors import ChatmillError

STEP_SECONDS = 600.0
"""After a signal, a run is terminated if it does not finish its step within this many seconds."""
SAME_SECONDS = 2.0
"""Under torchrun, a second signal within this many seconds is treated as a repetition of the first signal."""


class StopRequest:
    """A request to end the run with a checkpoint; `by` is the name of the signal, or None until a signal arrives."""

    def __init__(self) -> None:
        self.by: str | None = None
        self._arrived, self._finished = threading.Event(), threading.Event()
        # Start the thread now: a signal handler may interrupt code that holds a lock needed to start a thread.
        threading.Thread(target=self._end_if_stuck, name="stop request", daemon=True).start()

    def arrives(self, number: int) -> None:
        self.by = signal.Signals(number).name
        self._arrived.set()

    def finished_step(self) -> None:
        """Cancel the time limit when a step has finished, because saving a checkpoint can take a long time."""
        if self.by is not None:
            self._finished.set()

    def close(self) -> None:
        self._finished.set()
        self._arrived.set()

    def _end_if_stuck(self) -> None:
        """Terminate a run that cannot finish its step.

        A signal to all processes of a run, such as one from `timeout`, also ends the processes that compile the model.
        A run could wait forever for a compile process that has ended.
        """
        self._arrived.wait()
        if self._finished.wait(STEP_SECONDS):
            return
        rank = f"rank {os.environ['RANK']}: " if "RANK" in os.environ else ""
        with suppress(OSError, ValueError):
            print(
                f"chatmill: {rank}no step finished within {STEP_SECONDS / 60:.3g} minutes after {self.by}, so the run "
                "ends without another checkpoint; continue with --resume auto",
                file=sys.stderr,
                flush=True,
            )
        os._exit(1)


def _is_of_compiler(error: Exception) -> bool:
    return any(kind.__module__.startswith(("torch._inductor", "torch._dynamo")) for kind in type(error).__mro__)


@contextmanager
def stop_on_signal() -> Iterator[StopRequest]:
    """Record the first SIGINT or SIGTERM; a second signal has its usual effect."""
    request = StopRequest()
    previous: dict[signal.Signals, Any] = {}
    first = 0.0

    def restore() -> None:
        while previous:
            signal.signal(*previous.popitem())

    def note(number: int, _: Any) -> None:
        nonlocal first
        if request.by is None:
            first = time.monotonic()
            request.arrives(number)
            # Under torchrun, keep the handler, because a signal may arrive twice: from a terminal or Slurm, and
            # forwarded by torchrun.
            if "TORCHELASTIC_RUN_ID" not in os.environ:
                restore()
        elif time.monotonic() - first > SAME_SECONDS:
            restore()
            signal.raise_signal(number)

    try:
        for each in (signal.SIGINT, signal.SIGTERM):
            previous[each] = signal.signal(each, note)
    except ValueError:
        # Python allows signal handlers only in the main thread, so a run in another thread does not handle signals.
        previous.clear()
    try:
        yield request
    except Exception as error:
        if request.by is None or not _is_of_compiler(error):
            raise
        raise ChatmillError(
            f"{request.by} also ended processes that compile the model, so the run ends without another checkpoint; "
            "continue with --resume auto"
        ) from None
    finally:
        restore()
        request.close()
