"""Functions shared by all benchmarks."""

from __future__ import annotations

import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any


def interleaved(runs: int, **works: Callable[[], object]) -> dict[str, float]:
    """Return the median run time of each function in seconds. Runs of the functions alternate, so that a temporary
    slowdown affects all of them.
    """
    seconds: dict[str, list[float]] = {name: [] for name in works}
    # Without `freeze`, the garbage collector would scan the objects of one function while another is timed.
    gc.collect()
    gc.freeze()
    for _ in range(runs):
        for name, work in works.items():
            gc.collect()
            started = time.perf_counter()
            work()
            seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(taken) for name, taken in seconds.items()}


# Memory.


def watched(command: Iterable[object], *, every: float = 0.05) -> tuple[str, int]:
    """Run a command; return its output and the peak total memory (PSS) of all its processes, in bytes."""
    with tempfile.TemporaryFile("w+") as printed:
        process = subprocess.Popen([str(word) for word in command], stdout=printed, start_new_session=True)
        peak = 0
        while process.poll() is None:
            peak = max(peak, memory_of(process.pid))
            time.sleep(every)
        if process.returncode:
            raise SystemExit(f"{' '.join(process.args)}: exit {process.returncode}")
        printed.seek(0)
        return printed.read(), peak


def alone(script: str, *args: object, every: float = 0.05) -> tuple[Any, int]:
    """Run a Python script in a separate process; return the JSON value that it prints, and its peak memory in bytes."""
    printed, peak = watched([sys.executable, script, *args], every=every)
    return json.loads(printed) if printed.strip() else None, peak


def memory_of(leader: int) -> int:
    """Return the total memory (PSS), in bytes, of all processes in the session of the process `leader`."""
    return sum(_pss(pid) for pid in _session(leader))


def own_peak() -> int:
    return 1024 * int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])


def _session(leader: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if int(fields[3]) == leader:
                found.append(int(entry.name))
    return found


def _pss(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def versions(*packages: str) -> dict[str, str]:
    return {package: version(package) for package in packages}


def machine(*packages: str) -> str:
    named = ", ".join(f"{package} {number}" for package, number in versions(*packages).items())
    return f"{len(os.sched_getaffinity(0))} cores, {processor()}, Python {platform.python_version()}, {named}"


def processor() -> str:
    """Return the name of the processor, or its architecture if the system reports no name."""
    known = Path("/proc/cpuinfo").read_text()
    # On ARM, the kernel reports only numbers; lscpu reports the names.
    with suppress(OSError):
        known += subprocess.run(["lscpu"], stdout=subprocess.PIPE, text=True, env={"LC_ALL": "C"}, check=False).stdout
    names = [line.split(":", 1)[1].strip() for line in known.splitlines() if line.lower().startswith("model name")]
    return names[0] if names else platform.machine()


def report(title: str, lines: list[tuple[str, str]], figures: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"title": title, **figures}))
        return
    print(title)
    for name, value in lines:
        print(f"  {name:<58} {value}")
