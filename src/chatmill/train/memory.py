"""The memory that this process may still fill: that of the host, and of the control groups it is in."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

from chatmill.errors import DataError

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def available_memory() -> float:
    """Bytes that this process could still fill; infinite where the system does not say.

    Linux hands out more, and then kills the process that fills it. A container's limit is that of its control group.
    """
    return min([_free_on_host(), *_free_in_groups(), _free_by_rlimit()])


def check_memory(needed: float, place: Path | str, *, what: str = "the model") -> None:
    """Raise `DataError` if so many bytes are not available."""
    if needed > (free := available_memory()):
        raise DataError(
            f"{place}: {what} takes {needed / 2**30:,.1f} GiB of memory, {free / 2**30:,.1f} are available here; "
            "take a smaller model or a larger machine"
        )


def _free_on_host() -> float:
    try:
        lines = (line.split() for line in (PROC / "meminfo").read_text().splitlines())
        return sum(int(size) << 10 for name, size, *_ in lines if name in ("MemAvailable:", "SwapFree:"))
    except (OSError, ValueError):
        return float("inf")


def _free_in_groups() -> Iterator[float]:
    """What is left of the limit of each control group that this process is in, of both versions."""
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
        # A group has the limits of those around it. In a container its path may be one that only the host sees.
        for folder in [root / inside, *(root / inside).parents]:
            if folder == root.parent:
                break
            try:
                most, used = int((folder / limit).read_text()), int((folder / usage).read_text())
                table = dict(each.split() for each in (folder / "memory.stat").read_text().splitlines())
                cached = sum(int(table.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
                yield max(0, most - used + cached)
            except (OSError, ValueError):
                # Not there, or "max": no limit.
                continue


def _free_by_rlimit() -> float:
    """What `ulimit -v` leaves."""
    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    if most == resource.RLIM_INFINITY:
        return float("inf")
    try:
        pages = int((PROC / "self/statm").read_text().split()[0])
    except (OSError, ValueError):
        return float(most)
    return max(0, most - pages * resource.getpagesize())
