"""Work in a process of its own: what it gave, the one line with which it refused, or how it broke."""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chatmill.errors import ChatmillError


@dataclass(frozen=True)
class Ended:
    """How a child ended: exactly one of these holds."""

    value: Any = None
    """What the work gave, as JSON holds it; None if anything else is set."""
    refused: str = ""
    """The one line with which chatmill refused."""
    broke: str = ""
    """An exception that no user should see, a death nobody asked for, or no end at all."""
    killed: bool = False
    """SIGKILL ended it."""


@dataclass(frozen=True)
class Child:
    pid: int
    told: int

    def end(self, seconds: float = 120.0) -> Ended:
        """Wait for it; one that takes longer is killed, and broke."""
        raw, until, late = b"", time.monotonic() + seconds, False
        while True:
            ready, _, _ = select.select([self.told], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                late = True
                os.kill(self.pid, signal.SIGKILL)
                until = time.monotonic() + seconds
                continue
            if not (piece := os.read(self.told, 1 << 16)):
                break
            raw += piece
        os.close(self.told)
        _, status = os.waitpid(self.pid, 0)
        if late:
            return Ended(broke=f"it did not end within {seconds:.0f} seconds")
        if os.WIFSIGNALED(status):
            by = os.WTERMSIG(status)
            return Ended(killed=True) if by == signal.SIGKILL else Ended(broke=f"signal {by}")
        return Ended(**json.loads(raw)) if raw else Ended(broke="it ended without a word")

    def kill(self) -> Ended:
        os.kill(self.pid, signal.SIGKILL)
        return self.end()


def begin(work: Callable[[], Any]) -> Child:
    """Start work in a forked process, which ends with it."""
    told, tell = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        os.close(tell)
        return Child(pid, told)
    try:
        os.close(told)
        said = json.dumps(_outcome(work)).encode()
        while said:
            said = said[os.write(tell, said) :]
    finally:
        os._exit(0)


def apart(work: Callable[[], Any], *, seconds: float = 120.0) -> Ended:
    """Do work in a process of its own, and wait for it."""
    return begin(work).end(seconds)


def outcome(work: Callable[[], Any]) -> Ended:
    """Do work here."""
    return Ended(**_outcome(work))


def _outcome(work: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"value": work()}
    except ChatmillError as error:
        line = str(error)
        return {"refused": line} if line and "\n" not in line else {"broke": f"not one line: {line!r}"}
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return {"broke": f"{type(error).__name__}: {str(error)[:300]} ({where.name}, line {where.lineno})"}


def limited(work: Callable[[], Any], room: int) -> Callable[[], Any]:
    """The work in a process that may take so many bytes of memory more than it has when it begins; files are none."""

    def within() -> Any:
        status = Path("/proc/self/status").read_text()
        has = int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmData"))) << 10
        resource.setrlimit(resource.RLIMIT_DATA, (has + room, has + room))
        return work()

    return within


def load_torch() -> None:
    """Before processes are forked that train: what they would each import is here once, and nobody has threads."""
    import torch
    import torch._dynamo  # the optimizer's first step would import it

    torch.set_num_threads(1)
