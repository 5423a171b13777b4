"""Run a function in a forked child process, and report its return value, its one-line chatmill error, or its failure.

A forked child inherits a trial's patches to the library, such as a planted fault or a fake disk. Forking is safe only
in a process with one thread. `begin` checks the number of threads, `run.py` limits it, and no forking process computes
with torch.
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
"""CPU time limit of a child; unlike elapsed time, CPU time does not depend on the load of the machine."""
IDLE_SECONDS = 300.0
"""A child that used no CPU time for this many seconds is considered stuck."""
STACK_SIGNAL = signal.SIGUSR1
"""A child that receives this signal prints the stacks of its threads to standard error."""


@dataclass(frozen=True)
class Ended:
    """The result of a child process; exactly one field is set."""

    value: Any = None
    """Return value of the work, which must be serializable as JSON; None if another field is set."""
    refused: str = ""
    """The one-line error message of chatmill."""
    broke: str = ""
    """Description of an unexpected exception, an unexpected signal, or a timeout."""
    killed: bool = False
    """Whether the child was killed by SIGKILL."""


class Child:
    def __init__(self, pid: int, result: int) -> None:
        self.pid, self.result = pid, result
        self._cpu, self._at = 0.0, time.monotonic()

    def why_stuck(self, cpu_seconds: float) -> str:
        used, now = cpu_time(self.pid), time.monotonic()
        if used > cpu_seconds:
            return f"the child used more than {cpu_seconds:.0f} seconds of CPU time"
        if used > self._cpu:
            self._cpu, self._at = used, now
        return f"the child used no CPU time for {IDLE_SECONDS:.0f} seconds" if now - self._at > IDLE_SECONDS else ""

    def end(self, cpu_seconds: float = CPU_SECONDS) -> Ended:
        """Return the result of the child. If the child is stuck, make it print its stack traces, then kill it;
        `Ended.broke` gives the reason.
        """
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
        return Ended(**json.loads(raw)) if raw else Ended(broke="the child exited without a result")

    def kill(self) -> Ended:
        os.kill(self.pid, signal.SIGKILL)
        return self.end()


def cpu_time(pid: int) -> float:
    try:
        # Fields 11 to 14 after the process name are utime, stime, cutime and cstime.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        used = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
        for thread in Path(f"/proc/{pid}/task").iterdir():
            used += sum(cpu_time(int(child)) for child in (thread / "children").read_text().split())
        return used
    except OSError:
        return 0.0


def begin(work: Callable[[], Any]) -> Child:
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
    # A joined thread may remain in /proc for a moment.
    for _ in range(1000):
        if (threads := len(list(Path("/proc/self/task").iterdir()))) == 1:
            return
        time.sleep(0.01)
    raise AssertionError(
        f"cannot fork a process with {threads} threads: locks held by the other threads would stay locked"
    )


def apart(work: Callable[[], Any], *, cpu_seconds: float = CPU_SECONDS) -> Ended:
    return begin(work).end(cpu_seconds)


def outcome(work: Callable[[], Any]) -> Ended:
    return Ended(**_outcome(work))


def _outcome(work: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"value": work()}
    except ChatmillError as error:
        line = str(error)
        return (
            {"refused": line}
            if line and "\n" not in line
            else {"broke": f"error message has more than one line: {line!r}"}
        )
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return {"broke": f"{type(error).__name__}: {str(error)[:300]} ({where.name}, line {where.lineno})"}


def limited(work: Callable[[], Any], room: int) -> Callable[[], Any]:
    """Return a function that runs `work` with a memory limit, which does not include memory-mapped files."""

    def within() -> Any:
        status = Path("/proc/self/status").read_text()
        has = int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmData"))) << 10
        resource.setrlimit(resource.RLIMIT_DATA, (has + room, has + room))
        return work()

    return within


def load_torch() -> None:
    """Import torch before forking, so that children need not import it. The forking process must not compute with
    torch.
    """
    import torch
    import torch._dynamo

    torch.set_num_threads(1)
