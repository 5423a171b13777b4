"""Checks that `chatmill doctor` runs on each node: versions, GPUs, memory, system limits and network settings.

Each check is a function that yields table rows for `chatmill doctor`. The checks also work without torch.
"""

from __future__ import annotations

import fcntl
import os
import platform
import re
import resource
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from chatmill.errors import one_line
from chatmill.train.memory import available_memory

Status = Literal["OK", "warn", "FAIL"]
GIB = 1 << 30
LOW_MEMORY = 4 * GIB
LOW_SHM = GIB
PACKAGES = {"numpy": "", "safetensors": "train", "torch": "train"}
"""Packages that training requires, each with the chatmill extra that installs it."""
OPTIONAL = {
    "transformers": "hf",
    "peft": "lora",
    "bitsandbytes": "qlora",
    "torchao": "lowbit",
    "flash-attn-4": "flash",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
}
"""Packages that only some runs use, each with the chatmill extra that installs it."""
MODULES = {"flash-attn-4": "flash_attn"}
"""Packages with an import name that differs from the package name."""
DRIVER = Path("/proc/driver/nvidia/version")
SHM = Path("/dev/shm")


@dataclass(frozen=True)
class CheckRow:
    """One line of the table that `chatmill doctor` prints."""

    check: str
    value: str
    status: Status = "OK"
    right: str = ""
    """The expected value, if the check did not pass."""

    def to_json(self) -> dict[str, str]:
        return asdict(self)

    @classmethod
    def of(cls, values: Any) -> CheckRow:
        """Parse a table row that another rank sent."""
        return cls(*(one_line(str(values[name]), 500) for name in ("check", "value", "status", "right")))  # type: ignore[arg-type]


def versions() -> Iterator[CheckRow]:
    yield CheckRow("python", f"{platform.python_version()} ({platform.machine()})")
    yield CheckRow("chatmill", str(sys.modules["chatmill"].__version__))
    for name, extra in PACKAGES.items():
        version, install = _version(name), f"pip install 'chatmill[{extra}]'" if extra else f"pip install {name}"
        yield CheckRow(name, version or "not installed", "OK" if version else "FAIL", "" if version else install)
    for name, extra in OPTIONAL.items():
        install = f"pip install 'chatmill[{extra}]'" if extra else f"pip install {name}"
        yield CheckRow(name, _version(name) or f"not installed (optional: {install})")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package) if find_spec(MODULES.get(package, package)) is not None else None
    except (metadata.PackageNotFoundError, ValueError):
        # Treat a package as missing if it has no pip metadata or its import is blocked.
        return None


def gpus() -> Iterator[CheckRow]:
    """Check the GPU of this rank, or all GPUs if the command runs as a single process."""
    driver = _driver()
    yield CheckRow("driver", driver or "none")
    if _version("torch") is None:
        return
    import torch

    yield CheckRow("CUDA", torch.version.cuda or "none; this build of torch supports only CPUs")
    if not torch.cuda.is_available():
        wrong = driver is not None
        right = "a torch build for the CUDA version of this driver, and a correct CUDA_VISIBLE_DEVICES" if wrong else ""
        yield CheckRow(
            "GPU", "torch finds no GPU", "FAIL" if wrong else "warn", right or "a GPU; training on the CPU is slow"
        )
        return
    with suppress(Exception):
        yield CheckRow("NCCL", ".".join(map(str, torch.cuda.nccl.version())))
    count, rank = torch.cuda.device_count(), os.environ.get("LOCAL_RANK")
    if rank is not None and int(rank) >= count > 1:
        yield CheckRow(
            "GPU", f"LOCAL_RANK is {rank}, but the node has {count} GPUs", "FAIL", f"at most {count} ranks on this node"
        )
        return
    for index in range(count) if rank is None else [int(rank) % count]:
        yield _gpu(index)


def _gpu(index: int) -> CheckRow:
    import torch

    about = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    bf16 = about.major >= 8
    value = (
        f"{about.name}, {total / GIB:.1f} GiB, {free / GIB:.1f} free, compute capability {about.major}.{about.minor}"
    )
    value += ", bf16" if bf16 else ", no bf16"
    name = f"GPU {str(getattr(about, 'uuid', index))[:8]}"
    if free < 0.9 * total:
        return CheckRow(name, value, "warn", "no other process on this GPU; see nvidia-smi")
    return CheckRow(
        name, value, "OK" if bf16 else "warn", "" if bf16 else "a GPU with bf16; otherwise, train with --dtype float32"
    )


def _driver() -> str | None:
    try:
        version = re.search(r"\d+\.\d+(\.\d+)?", DRIVER.read_text())
    except OSError:
        return None
    return version[0] if version else "unknown"


def host_memory() -> Iterator[CheckRow]:
    free = available_memory()
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    shown = "unknown" if free == float("inf") else f"{free / GIB:.1f} GiB"
    value = f"{shown} available to this process, {total / GIB:.1f} GiB on the node; {_cpus()} CPUs"
    low = free < LOW_MEMORY
    yield CheckRow("memory", value, "warn" if low else "OK", f"{LOW_MEMORY // GIB} GiB or more" if low else "")
    if SHM.is_dir():
        size = (status := os.statvfs(SHM)).f_frsize * status.f_blocks
        low = size < LOW_SHM
        right = "1 GiB or more, for NCCL: docker run --shm-size 8g, or --ipc host" if low else ""
        yield CheckRow(str(SHM), f"{size / GIB:.2f} GiB", "warn" if low else "OK", right)


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def open_files() -> Iterator[CheckRow]:
    """Check the limit on open files, which include connections to other ranks and the mapped files of a dataset."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    size = os.environ.get("WORLD_SIZE", "1")
    needed = 512 + 4 * (int(size) if size.isdigit() else 1)
    low = soft != resource.RLIM_INFINITY and soft < needed
    value = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft:,}"
    yield CheckRow(
        "ulimit -n", value, "warn" if low else "OK", f"ulimit -n {max(needed, min(hard, 65536))}" if low else ""
    )


def network() -> Iterator[CheckRow]:
    if not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        return
    master, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    known = dict(_interfaces())
    try:
        address = socket.getaddrinfo(master, int(port), type=socket.SOCK_STREAM)[0]
        with socket.socket(address[0], socket.SOCK_DGRAM) as probe:
            # Connecting a datagram socket selects the local address without sending packets.
            probe.connect(address[4])
            mine = str(probe.getsockname()[0])
        value = f"{master}:{port}, from {mine}" + (f" ({known[mine]})" if mine in known else "")
        yield CheckRow("MASTER_ADDR", value)
    except (OSError, ValueError, OverflowError) as error:
        yield CheckRow(
            "MASTER_ADDR",
            f"{master}:{port}: {error}",
            "FAIL",
            "the address of rank 0's node as MASTER_ADDR, and a free port on that node as MASTER_PORT",
        )
        return
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        yield _interface(name, set(known.values()), mine)


def _interface(name: str, known: set[str], mine: str) -> CheckRow:
    chosen = os.environ.get(name)
    if chosen is None:
        own = ""
        with suppress(OSError):
            own = socket.gethostbyname(socket.gethostname())
        if name.startswith("GLOO") and own.startswith("127.") and not mine.startswith("127."):
            right = f"{name} set to the interface of {mine}, because other nodes cannot reach {own}"
            return CheckRow(name, f"not set; the host name resolves to {own}", "warn", right)
        return CheckRow(name, "not set")
    # NCCL accepts a list of name prefixes; a leading ^ excludes these interfaces.
    wanted = chosen.lstrip("^=").split(",")
    there = not known or chosen.startswith("^") or any(each.startswith(prefix) for prefix in wanted for each in known)
    right = "" if there else f"an interface of this node: {', '.join(sorted(known))}"
    return CheckRow(name, chosen, "OK" if there else "FAIL", right)


def _interfaces() -> Iterator[tuple[str, str]]:
    """Yield the IPv4 address and name of each network interface, if the system provides them."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                answer = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
                yield socket.inet_ntoa(answer[20:24]), name


CHECKS: dict[str, Callable[[], Iterator[CheckRow]]] = {
    "versions": versions,
    "GPUs": gpus,
    "memory": host_memory,
    "limits": open_files,
    "network": network,
}
