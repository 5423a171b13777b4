"""`chatmill doctor`: check the nodes of a training run before it starts.

    python -m chatmill.train.doctor                               where typer and rich are not installed
    torchrun --nproc-per-node 8 -m chatmill.train.doctor --shared /data/runs

Rank 0 prints one table for all nodes. Each check has a time limit, so that a broken network does not block the command.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from chatmill.errors import ChatmillError, UsageError, one_line
from chatmill.plain_file import local_path
from chatmill.train.launcher import place_in_world
from chatmill.train.machine_checks import CHECKS, OPTIONAL, PACKAGES, CheckRow
from chatmill.train.rank_checks import ABANDONED, Rendezvous, all_reduces, leave_group, limited, shared_folder

SECONDS = 60.0
"""Default time limit for each check, in seconds."""
MOST_SECONDS = 86_400
SAME_EVERYWHERE = ("python", "chatmill", *PACKAGES, *OPTIONAL, "CUDA", "NCCL", "driver")
"""Checks whose values must be equal on all nodes."""
OF_A_MACHINE = ("memory", "/dev/shm", "ulimit -n")
"""Checks whose values are shown once for each node."""
SHOWN_PLACES = 4


@dataclass(frozen=True)
class TableRow:
    """The result of a check, and the nodes or ranks to which the result applies."""

    row: CheckRow
    place: str

    def to_json(self) -> dict[str, str]:
        return {"place": self.place, **self.row.to_json()}


def diagnose(folders: Sequence[str | Path] = (), *, seconds: float = SECONDS) -> list[TableRow] | None:
    """Run all checks; return the table of results on rank 0, and None on other ranks.

    All ranks must call this function. `folders` lists the folders that must be on a file system shared by all ranks.
    """
    if not 0 < seconds <= MOST_SECONDS:
        raise UsageError(
            f"the time limit is {seconds:g} s; expected a number greater than 0 and at most {MOST_SECONDS:,}"
        )
    shared = [local_path(folder) for folder in folders or _default_folders()]
    rank, size = place_in_world() or (0, 1)
    local = [row for name in CHECKS for row in _rows_of(name, seconds, quiet=rank > 0)]
    has_torch = all(row.status != "FAIL" for row in local if row.check == "torch")
    if size > 1 and not has_torch:
        row = CheckRow("ranks", f"{size} ranks cannot connect without torch", "FAIL", "pip install 'chatmill[train]'")
        return [TableRow(each, _host()) for each in [*local, row]] if rank == 0 else None
    try:
        rendezvous = limited(lambda: Rendezvous(rank, size, seconds), seconds + 5)
    except Exception as error:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        fault = f"rank {rank} on {_host()} cannot connect to {address}: {one_line(str(error), 200)}"
        if rank:
            raise ChatmillError(fault) from None
        row = CheckRow(
            "ranks",
            fault,
            "FAIL",
            "the address of rank 0's node as MASTER_ADDR, and a free port on that node as MASTER_PORT",
        )
        return [TableRow(each, _host()) for each in [*local, row]]
    return _together(rendezvous, local, shared)


def _together(rendezvous: Rendezvous, local: Sequence[CheckRow], folders: Sequence[Path]) -> list[TableRow] | None:
    cuda = any(row.check.startswith("GPU ") for row in local)
    report = {"host": _host(), "rows": [row.to_json() for row in local], "cuda": cuda}
    _show("waiting for the other ranks", quiet=rendezvous.rank > 0 or rendezvous.size == 1)
    reports = rendezvous.collect("report", report)
    hosts = [one_line(str(each["host"]), 64) if each else "?" for each in reports]
    missing = [rank for rank, each in enumerate(reports) if each is None]
    plan = rendezvous.announce("plan", {"all": not missing, "cuda": all(each and each["cuda"] for each in reports)})
    table: list[CheckRow] = []
    if missing:
        named = ", ".join(map(str, missing[:8])) + (", …" if len(missing) > 8 else "")
        ranks = "rank" if len(missing) == 1 else "ranks"
        right = "all ranks started on nodes that can reach MASTER_ADDR, with the same WORLD_SIZE"
        table.append(CheckRow("ranks", f"{ranks} {named} of {rendezvous.size} did not report", "FAIL", right))
    elif rendezvous.size > 1:
        count = len(set(hosts))
        table.append(CheckRow("ranks", f"{rendezvous.size} on {count} {'node' if count == 1 else 'nodes'}"))
    if plan is not None and plan["all"]:
        for folder in folders:
            _show(f"checking {folder}", quiet=rendezvous.rank > 0)
            table += shared_folder(rendezvous, folder, hosts)
        if rendezvous.size > 1:
            _show("checking collectives", quiet=rendezvous.rank > 0)
            table += all_reduces(rendezvous, hosts, cuda=plan["cuda"])
            leave_group()
    _show("", quiet=rendezvous.rank > 0)
    if rendezvous.rank:
        return None
    everyone = [
        (rank, CheckRow.of(values)) for rank, each in enumerate(reports) if each is not None for values in each["rows"]
    ]
    all_hosts = "all" if len(set(hosts)) > 1 else hosts[0]
    return [*_grouped(everyone, hosts), *_doubled_gpus(everyone, hosts), *(TableRow(row, all_hosts) for row in table)]


def _grouped(rows: Sequence[tuple[int, CheckRow]], hosts: Sequence[str]) -> Iterator[TableRow]:
    """Yield each distinct check result once, with the names of the nodes or ranks that reported it."""
    first_ranks = {hosts.index(host) for host in hosts}
    by_row: dict[CheckRow, list[int]] = {}
    for rank, row in rows:
        if row.check not in OF_A_MACHINE or rank in first_ranks:
            by_row.setdefault(row, []).append(rank)
    checks = list(dict.fromkeys(row.check for row in by_row))
    for check in checks:
        values = [(row, ranks) for row, ranks in by_row.items() if row.check == check]
        for row, ranks in values:
            if len(values) > 1 and check in SAME_EVERYWHERE and row.status == "OK":
                row = replace(row, status="warn" if check == "driver" else "FAIL", right="the same value on all nodes")
            yield TableRow(row, _place(ranks, hosts, first_ranks if check in OF_A_MACHINE else set(range(len(hosts)))))


def _place(ranks: Sequence[int], hosts: Sequence[str], expected: set[int]) -> str:
    """Return the names of the nodes or ranks that reported a result, or `all`."""
    if len(set(hosts)) == 1 and set(ranks) == expected:
        return hosts[0]
    if set(ranks) == expected:
        return "all"
    places = []
    for host in dict.fromkeys(hosts[rank] for rank in ranks):
        there = {rank for rank in expected if hosts[rank] == host}
        if there <= set(ranks):
            places.append(host)
        else:
            places += [f"rank {rank} on {host}" for rank in ranks if rank in there]
    return ", ".join(places[:SHOWN_PLACES]) + (", …" if len(places) > SHOWN_PLACES else "")


def _doubled_gpus(rows: Sequence[tuple[int, CheckRow]], hosts: Sequence[str]) -> Iterator[TableRow]:
    """Yield a failed check for each GPU that more than one rank would use."""
    if len(hosts) == 1:
        return
    used: dict[tuple[str, str], list[int]] = {}
    for rank, row in rows:
        if row.check.startswith("GPU "):
            used.setdefault((hosts[rank], row.check), []).append(rank)
    for (host, gpu), ranks in used.items():
        if len(ranks) > 1:
            row = CheckRow(
                gpu,
                f"used by ranks {', '.join(map(str, ranks))}",
                "FAIL",
                "a different LOCAL_RANK for each rank on a node",
            )
            yield TableRow(row, host)


def _rows_of(name: str, seconds: float, *, quiet: bool) -> list[CheckRow]:
    _show(f"checking {name}", quiet=quiet)
    try:
        return limited(lambda: list(CHECKS[name]()), seconds)
    except Exception as error:
        return [
            CheckRow(
                name, one_line(f"{type(error).__name__}: {error}", 300), "FAIL", "a check that runs without errors"
            )
        ]


def _default_folders() -> list[str]:
    return [".", *(name for name in ("checkpoints",) if Path(name).is_dir())]


def _host() -> str:
    return one_line(socket.gethostname(), 64)


def _show(text: str, *, quiet: bool) -> None:
    if not quiet and sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()


# Printing.


def table_text(table: Sequence[TableRow]) -> str:
    head = ("check", "where", "value", "", "expected")
    cells = [head, *((each.row.check, each.place, each.row.value, each.row.status, each.row.right) for each in table)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head) - 1)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip()
        for row in cells
    ]
    return "\n".join([*lines, "", _summary(table)])


def _summary(table: Sequence[TableRow]) -> str:
    failed = sum(each.row.status == "FAIL" for each in table)
    warned = sum(each.row.status == "warn" for each in table)
    if not failed:
        return "all checks pass" + (f", {warned} {'warning' if warned == 1 else 'warnings'}" if warned else "")
    return f"{failed} of {len(table)} checks fail"


def print_diagnosis(folders: Sequence[str | Path], *, seconds: float, as_json: bool) -> int:
    """Run the checks and print the table on rank 0; return the exit code."""
    table = diagnose(folders, seconds=seconds) or []
    ok = all(each.row.status != "FAIL" for each in table)
    if table:
        print(json.dumps({"ok": ok, "checks": [each.to_json() for each in table]}) if as_json else table_text(table))
    if any(thread.is_alive() for thread in ABANDONED):
        # Exit without cleanup, because a collective that never returns can keep the interpreter from exiting.
        sys.stdout.flush()
        os._exit(0 if ok else 1)
    return 0 if ok else 1


class _DoctorParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")


def main(args: Sequence[str] | None = None) -> int:
    parser = _DoctorParser(
        prog="python -m chatmill.train.doctor", description="Check the nodes of a run before it starts."
    )
    parser.add_argument(
        "--shared",
        action="append",
        metavar="DIR",
        help="a folder that all ranks must share (default: the current folder and, if it exists, checkpoints)",
    )
    parser.add_argument(
        "--timeout", type=float, default=SECONDS, metavar="S", help="time limit of each check in seconds (default: 60)"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    try:
        given: Any = parser.parse_args(args)
        return print_diagnosis(given.shared or (), seconds=given.timeout, as_json=given.json)
    except ChatmillError as error:
        print(f"chatmill: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
