"""Work in a child process: the value it returned, the one line with which chatmill refused, or how it broke.

Children are forked, so that what a trial changed in the library (a planted fault, another disk) holds in them too. That
is safe only in a process with one thread: `begin` checks it, `run.py` sets the number of threads, and no process that
forks computes with torch itself.
"""

from __future__ import annotations

import faulthandler
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

CPU_SECONDS = 120.0
"""Processor time that a child may use: unlike time on the clock it does not depend on what else the machine does."""
IDLE_SECONDS = 300.0
"""A child that used no processor time for so long waits for something that never comes."""
STACK_SIGNAL = signal.SIGUSR1
"""A child that gets it prints the stacks of its threads to standard error."""


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


class Child:
    """A process that was begun; `result` is the pipe that it writes its outcome to."""

    def __init__(self, pid: int, result: int) -> None:
        self.pid, self.result = pid, result
        self._cpu, self._at = 0.0, time.monotonic()

    def why_stuck(self, cpu_seconds: float) -> str:
        """Why it is not to be waited for any longer; empty while it makes progress."""
        used, now = cpu_time(self.pid), time.monotonic()
        if used > cpu_seconds:
            return f"it used more than {cpu_seconds:.0f} seconds of processor time"
        if used > self._cpu:
            self._cpu, self._at = used, now
        return f"it did nothing for {IDLE_SECONDS:.0f} seconds" if now - self._at > IDLE_SECONDS else ""

    def end(self, cpu_seconds: float = CPU_SECONDS) -> Ended:
        """Wait for it; one that is stuck prints its stacks, is killed, and broke."""
        raw, stuck = b"", ""
        while True:
            ready, _, _ = select.select([self.result], [], [], 1.0)
            if ready:
                if not (piece := os.read(self.result, 1 << 16)):
                    break
                raw += piece
            elif not stuck and (stuck := self.why_stuck(cpu_seconds)):
                os.kill(self.pid, STACK_SIGNAL)
                time.sleep(1.0)
                os.kill(self.pid, signal.SIGKILL)
        os.close(self.result)
        _, status = os.waitpid(self.pid, 0)
        if stuck:
            return Ended(broke=stuck)
        if os.WIFSIGNALED(status):
            by = os.WTERMSIG(status)
            return Ended(killed=True) if by == signal.SIGKILL else Ended(broke=f"signal {by}")
        return Ended(**json.loads(raw)) if raw else Ended(broke="it ended without a word")

    def kill(self) -> Ended:
        os.kill(self.pid, signal.SIGKILL)
        return self.end()


def cpu_time(pid: int) -> float:
    """Seconds of processor time that a process, its children and theirs have used."""
    try:
        # After the name, which may hold anything: utime, stime, and both of the children that have ended.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        used = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
        for thread in Path(f"/proc/{pid}/task").iterdir():
            used += sum(cpu_time(int(child)) for child in (thread / "children").read_text().split())
        return used
    except OSError:
        return 0.0


def begin(work: Callable[[], Any]) -> Child:
    """Start work in a forked process, which ends with it."""
    _check_one_thread()
    result, send = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        os.close(send)
        return Child(pid, result)
    try:
        faulthandler.register(STACK_SIGNAL, file=2)
        os.close(result)
        data = json.dumps(_outcome(work)).encode()
        while data:
            data = data[os.write(send, data) :]
    finally:
        os._exit(0)


def _check_one_thread() -> None:
    # A thread that was joined may take a moment to leave the system's list.
    for _ in range(1000):
        if (threads := len(list(Path("/proc/self/task").iterdir()))) == 1:
            return
        time.sleep(0.01)
    raise AssertionError(f"a process with {threads} threads is not to be forked: locks that they hold stay locked")


def apart(work: Callable[[], Any], *, cpu_seconds: float = CPU_SECONDS) -> Ended:
    """Do work in a separate process, and wait for it."""
    return begin(work).end(cpu_seconds)


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
    """Before processes are forked that train: import once what each of them would, and compute nothing."""
    import torch
    import torch._dynamo

    torch.set_num_threads(1)
