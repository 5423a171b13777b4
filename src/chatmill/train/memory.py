"""Compute the memory that this process can still use, as limited by the host and by control groups (cgroups)."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

from chatmill.errors import DataError

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def available_memory() -> float:
    """Return the bytes that this process can still use, or infinity if the system does not report a limit.

    Linux lets a process allocate more memory than is available, and kills the process once it uses that memory. In a
    container, the control group sets the memory limit.
    """
    return min([_free_on_host(), *_free_in_groups(), _free_by_rlimit()])


def check_memory(needed: float, place: Path | str, *, what: str = "the model") -> None:
    """Raise `DataError` if fewer than `needed` bytes of memory are available."""
    if needed > (free := available_memory()):
        raise DataError(
            f"{place}: {what} takes {needed / 2**30:,.1f} GiB of memory, but {free / 2**30:,.1f} GiB are available; "
            "use a smaller model or a larger machine"
        )


def _free_on_host() -> float:
    try:
        lines = (line.split() for line in (PROC / "meminfo").read_text().splitlines())
        return sum(int(size) << 10 for name, size, *_ in lines if name in ("MemAvailable:", "SwapFree:"))
    except (OSError, ValueError):
        return float("inf")


def _free_in_groups() -> Iterator[float]:
    """Yield the free memory in each control group of this process, for cgroup v1 and v2."""
    try:
        lines = (PROC / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, name = line.split(":", 2)
        inside = Path(name.lstrip("/"))
        if not controllers:
            root, limit, usage, prefix = CGROUPS, "memory.max", "memory.current", ""
        elif "memory" in controllers.split(","):
            root, limit, usage = CGROUPS / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            prefix = "total_"
        else:
            continue
        # Also check the parent control groups, because their limits apply too. Skip missing folders: in a container,
        # the path of a control group may exist only on the host.
        for folder in [root / inside, *(root / inside).parents]:
            if folder == root.parent:
                break
            try:
                most, used = int((folder / limit).read_text()), int((folder / usage).read_text())
                table = dict(each.split() for each in (folder / "memory.stat").read_text().splitlines())
                cached = sum(int(table.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
                yield max(0, most - used + cached)
            except (OSError, ValueError):
                # A group has no limit if its limit file does not exist or contains "max".
                continue


def _free_by_rlimit() -> float:
    """Return the number of bytes that the process can still allocate under `ulimit -v`."""
    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    if most == resource.RLIM_INFINITY:
        return float("inf")
    try:
        pages = int((PROC / "self/statm").read_text().split()[0])
    except (OSError, ValueError):
        return float(most)
    return max(0, most - pages * resource.getpagesize())
