"""Checks of `chatmill doctor` that involve all ranks: the c10d store, shared folders, and collectives."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from chatmill.errors import ChatmillError, one_line
from chatmill.store import files
from chatmill.train.machine_checks import GIB, CheckRow

if TYPE_CHECKING:
    from torch.distributed import Store

T = TypeVar("T")
LOW_DISK = 10 * GIB
SKEW_SECONDS = 2.0
VISIBLE_SECONDS = 60.0
"""Maximum time until a file that another node wrote is visible on NFS, in seconds."""
REDUCED = {"cpu": 1 << 22, "cuda": 1 << 26}
"""Number of float32 values in the all-reduce, by device type."""
ROUNDS = 3
ABANDONED: list[threading.Thread] = []
"""Threads of checks that did not finish within the time limit."""


def limited(work: Callable[[], T], seconds: float) -> T:
    """Call a function in a thread; if it takes too long, raise `TimeoutError` and leave the thread running."""
    results: list[T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(work())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        ABANDONED.append(thread)
        raise TimeoutError(f"did not finish within {seconds:g} s")
    return results[0]


class Rendezvous:
    """Exchanges JSON values between ranks through the c10d store, with a time limit. A single rank uses no store."""

    def __init__(self, rank: int, size: int, seconds: float) -> None:
        self.rank, self.size, self.seconds = rank, size, seconds
        self.store: Store | None = None
        if size == 1:
            return
        from torch.distributed import PrefixStore, TCPStore

        has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        store = TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            size,
            is_master=rank == 0 and not has_agent,
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,
        )
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self.store = PrefixStore(f"chatmill doctor/{attempt}", store)

    def collect(self, key: str, value: Any) -> list[Any]:
        """Collect the values of all ranks on rank 0, with None for late ranks; return an empty list on other ranks."""
        if self.store is None:
            return [value]
        if self.rank:
            self.store.set(f"{key}/{self.rank}", json.dumps(value))
            return []
        end = time.monotonic() + self.seconds
        return [value, *(self._get(f"{key}/{rank}", end - time.monotonic()) for rank in range(1, self.size))]

    def announce(self, key: str, value: Any) -> Any:
        """Broadcast a value from rank 0; return None on ranks that do not receive the value in time."""
        if self.store is None:
            return value
        if self.rank == 0:
            self.store.set(key, json.dumps(value))
            return value
        # Wait longer than the time limit, because rank 0 may itself wait for another rank.
        return self._get(key, 2 * self.seconds + VISIBLE_SECONDS)

    def _get(self, key: str, seconds: float) -> Any:
        assert self.store is not None
        try:
            self.store.wait([key], timedelta(seconds=max(0.01, seconds)))
            return json.loads(self.store.get(key))
        except (RuntimeError, ValueError):
            return None


# Folders.


def shared_folder(rendezvous: Rendezvous, folder: Path, hosts: Sequence[str]) -> Iterator[CheckRow]:
    """Check that all ranks see a file that rank 0 writes, and that rank 0 sees their files. Rank 0 yields the rows of
    the result table.

    Files are written in the same way as checkpoints: under a temporary name, then synced and renamed.
    """
    key, check = f"folder {folder}", f"shared {folder}"
    name = f".chatmill-doctor-{secrets.token_hex(8)}"
    about = rendezvous.announce(f"{key}/about", _write(folder, name) if rendezvous.rank == 0 else None)
    if about is None:
        return
    mine = folder / f"{about['name']}-{rendezvous.rank}"
    try:
        fault = "" if rendezvous.rank == 0 else _compare(folder, about, mine)
        faults = rendezvous.collect(f"{key}/seen", fault)
        if rendezvous.rank == 0:
            yield from _folder_rows(check, folder, about, faults, hosts, min(rendezvous.seconds, VISIBLE_SECONDS))
        rendezvous.announce(f"{key}/end", True)
    finally:
        for path in [mine, folder / about["name"]] if rendezvous.rank == 0 else [mine]:
            with suppress(OSError):
                path.unlink()


def _write(folder: Path, name: str) -> dict[str, str]:
    """Write a file with random content; return the name and content that other ranks must read.

    If the file cannot be written, also return the reason and a hash of the folder's file list.
    """
    about = {"name": name, "content": secrets.token_hex(16), "fault": "", "listing": ""}
    try:
        files.write_file(folder / name, about["content"].encode())
    except (OSError, ChatmillError) as error:
        about["fault"] = _what_failed(error)
        with suppress(OSError):
            about["listing"] = _listing(folder)
    return about


def _what_failed(error: OSError | ChatmillError) -> str:
    # Omit the name of the temporary file, which does not help the user.
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


def _listing(folder: Path) -> str:
    entries = sorted((path.name, path.stat().st_size) for path in folder.iterdir() if path.is_file())
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()


def _compare(folder: Path, about: Mapping[str, str], mine: Path) -> str:
    """Return how the files that this rank sees differ from those on rank 0, or "" if they are the same."""
    try:
        if about["fault"]:
            same = not about["listing"] or _listing(folder) == about["listing"]
            return "" if same else "does not see the same files as rank 0"
        end = time.monotonic() + VISIBLE_SECONDS
        while not (path := folder / about["name"]).exists():
            if time.monotonic() > end or not folder.is_dir():
                return "does not see the file that rank 0 wrote"
            time.sleep(0.2)
        if path.read_text() != about["content"]:
            return "reads content that differs from what rank 0 wrote"
        files.write_file(mine, about["content"].encode())
    except (OSError, ChatmillError) as error:
        return _what_failed(error)
    return ""


def _folder_rows(
    check: str, folder: Path, about: Mapping[str, str], faults: Sequence[Any], hosts: Sequence[str], seconds: float
) -> Iterator[CheckRow]:
    if about["fault"] and not about["listing"]:
        yield CheckRow(check, about["fault"], "FAIL", "a folder that all ranks can write to")
        return
    for rank, fault in enumerate(faults):
        theirs = folder / f"{about['name']}-{rank}"
        end = time.monotonic() + seconds
        while rank and fault == "" and not about["fault"] and not theirs.exists():
            if time.monotonic() > end:
                fault = "wrote a file that rank 0 does not see"
            time.sleep(0.05)
        if fault != "":
            shown = "did not answer in time" if fault is None else one_line(str(fault), 300)
            right = "a folder on a file system that all nodes share and can write to"
            yield CheckRow(check, f"rank {rank} on {hosts[rank]}: {shown}", "FAIL", right)
            return
    free = (status := os.statvfs(folder)).f_frsize * status.f_bavail
    ranks = f"{len(faults)} ranks" if len(faults) > 1 else "this process"
    if about["fault"]:
        right = "a folder that all ranks can write to; a read-only folder can contain datasets, but not checkpoints"
        yield CheckRow(check, f"cannot be written ({about['fault']}); all ranks see the same files", "warn", right)
        return
    low = free < LOW_DISK
    right = "space for checkpoints, which take 12 to 16 bytes per parameter" if low else ""
    value = f"written, renamed and read by {ranks}, {free / GIB:,.0f} GiB free"
    yield CheckRow(check, value, "warn" if low else "OK", right)


# Collectives.


def all_reduces(rendezvous: Rendezvous, hosts: Sequence[str], *, cuda: bool) -> Iterator[CheckRow]:
    """Test all-reduce with gloo and, if every rank has a GPU, with NCCL; rank 0 yields the rows of the result table."""
    for backend, device in (("gloo", "cpu"), ("nccl", "cuda")):
        if device == "cuda" and not cuda:
            return
        try:
            mine = limited(lambda device=device: _reduce(rendezvous, device, cuda=cuda), rendezvous.seconds)  # type: ignore[misc]
        except Exception as error:
            mine = {"fault": one_line(str(error).splitlines()[0] if str(error) else type(error).__name__, 300)}
        results = rendezvous.collect(f"reduce {device}", mine)
        going = True
        if rendezvous.rank == 0:
            rows = list(_reduce_rows(backend, device, results, hosts))
            going = all(row.status != "FAIL" for row in rows)
            yield from rows
        if not rendezvous.announce(f"reduced {device}", going):
            return


def _reduce(rendezvous: Rendezvous, device: str, *, cuda: bool) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        assert rendezvous.store is not None
        # Use a timeout longer than the time limit of the check: NCCL ends the process when its timeout expires.
        patience = timedelta(seconds=3 * rendezvous.seconds + 60)
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
        store = dist.PrefixStore("group", rendezvous.store)
        dist.init_process_group(
            backend, store=store, rank=rendezvous.rank, world_size=rendezvous.size, timeout=patience
        )
    where = torch.device(device)
    if device == "cuda":
        where = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
        torch.cuda.set_device(where)
    # Synchronize with gloo, because torch's barrier may choose the same GPU for all ranks.
    ready = torch.zeros(1)
    numbers = torch.empty(REDUCED[device], device=where)
    seconds, is_right = [], True
    for _ in range(1 + ROUNDS):
        numbers.fill_(rendezvous.rank + 1)
        dist.all_reduce(ready)
        began = time.perf_counter()
        dist.all_reduce(numbers)
        is_right = is_right and bool((numbers == rendezvous.size * (rendezvous.size + 1) / 2).all())
        seconds.append(time.perf_counter() - began)
    dist.all_reduce(ready)
    return {"fault": "" if is_right else "the sum is wrong", "seconds": min(seconds), "clock": time.time()}


def leave_group() -> None:
    """Destroy the process group of the checks, unless a check is still waiting in a collective."""
    import torch.distributed as dist

    if dist.is_initialized() and not ABANDONED:
        dist.destroy_process_group()


def _reduce_rows(backend: str, device: str, results: Sequence[Any], hosts: Sequence[str]) -> Iterator[CheckRow]:
    check, size = f"all-reduce {backend}", len(results)
    faults = [
        (rank, "did not answer in time" if each is None else str(each["fault"]))
        for rank, each in enumerate(results)
        if each is None or each["fault"]
    ]
    if faults:
        rank, fault = faults[0]
        more = f" (ranks that failed: {len(faults)})" if len(faults) > 1 else ""
        right = "open ports between all nodes, and GLOO_SOCKET_IFNAME set to the interface that connects the nodes"
        if device == "cuda":
            right = "NCCL_SOCKET_IFNAME set, or NCCL_IB_DISABLE=1; NCCL_DEBUG=INFO prints the attempted connections"
        yield CheckRow(check, f"rank {rank} on {hosts[rank]}: {one_line(fault, 300)}{more}", "FAIL", right)
        return
    sent = REDUCED[device] * 4
    speed = 2 * (size - 1) / size * sent / max(each["seconds"] for each in results) / 1e9
    yield CheckRow(check, f"{size} ranks, {sent >> 20} MiB: correct sum, {speed:.2f} GB/s")
    if device == "cpu":
        clocks = [each["clock"] for each in results]
        skew, late = max(clocks) - min(clocks), max(clocks) - min(clocks) > SKEW_SECONDS
        right = "the same time on all nodes; synchronize the clocks with chrony or ntpd" if late else ""
        yield CheckRow("clocks", f"differ by {skew:.2f} s", "warn" if late else "OK", right)
