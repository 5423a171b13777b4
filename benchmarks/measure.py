"""What every benchmark shares: medians of interleaved runs, the machine, and a table."""

from __future__ import annotations

import gc
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any


def interleaved(runs: int, **works: Callable[[], object]) -> dict[str, float]:
    """The median seconds of each work, run in turns so that a slow moment of the machine meets all of them."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    # What is loaded for the other side is not searched for garbage in this side's time.
    gc.collect()
    gc.freeze()
    for _ in range(runs):
        for name, work in works.items():
            gc.collect()
            started = time.perf_counter()
            work()
            seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(taken) for name, taken in seconds.items()}


def machine(*packages: str) -> str:
    versions = ", ".join(f"{package} {version(package)}" for package in packages)
    return f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}, Python {platform.python_version()}, {versions}"


def report(title: str, lines: list[tuple[str, str]], figures: dict[str, Any], *, as_json: bool) -> None:
    """The figures for a machine, or the lines for a person."""
    if as_json:
        print(json.dumps({"title": title, **figures}))
        return
    print(title)
    for name, value in lines:
        print(f"  {name:<58} {value}")
