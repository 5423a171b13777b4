from __future__ import annotations

import functools
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from child_processes import start_child

from chatmill.errors import UsageError
from chatmill.train import doctor, machine_checks, rank_checks
from chatmill.train.machine_checks import CheckRow


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def one_rank(rank: int, folder: Path, *flags: str) -> None:
    rank_checks.VISIBLE_SECONDS = 1.0
    rank_checks.REDUCED["cpu"] = 1 << 16
    socket.gethostname = lambda: f"node-{rank}"
    machine_checks.versions, versions = None, machine_checks.versions
    other = [CheckRow("numpy", "1.0")] if rank else []
    machine_checks.CHECKS["versions"] = lambda: iter(
        [row for row in versions() if not other or row.check != "numpy"] + other
    )
    (folder / str(rank)).mkdir()
    os.chdir(folder / str(rank))
    sys.exit(doctor.main(["--json", "--timeout", "60", *flags]))


def test_doctor_prints_one_table_for_two_nodes_and_leaves_no_files(tmp_path):
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": "2"}
    children = []
    (tmp_path / "together").mkdir()
    for rank in range(2):
        (tmp_path / f"output-{rank}").mkdir()
        work = functools.partial(one_rank, rank, tmp_path, "--shared", str(tmp_path / "together"), "--shared", ".")
        variables = {**common, "RANK": str(rank), "LOCAL_RANK": "0"}
        children.append(start_child(work, variables=variables, output=tmp_path / f"output-{rank}"))
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [1, 0]
    assert (tmp_path / "output-1" / "out").read_text() == ""
    result = json.loads((tmp_path / "output-0" / "out").read_text())
    rows = {(row["check"], row["place"]): row for row in result["checks"]}
    assert result["ok"] is False
    assert (rows["torch", "all"]["status"], rows["python", "all"]["status"]) == ("OK", "OK")
    assert rows["ranks", "all"]["value"] == "2 on 2 nodes"
    assert rows["numpy", "node-1"] == {
        "place": "node-1",
        "check": "numpy",
        "value": "1.0",
        "status": "FAIL",
        "right": "the same value on all nodes",
    }
    assert {place for check, place in rows if check == "memory"} <= {"all", "node-0", "node-1"}
    assert rows[f"shared {tmp_path / 'together'}", "all"]["value"].startswith("written, renamed and read by 2 ranks, ")
    assert rows["shared .", "all"]["value"] == "rank 1 on node-1: does not see the file that rank 0 wrote"
    assert rows["all-reduce gloo", "all"]["value"].startswith("2 ranks, 0 MiB: correct sum, ")
    assert ("clocks", "all") in rows
    failed = {check for (check, _), row in rows.items() if row["status"] == "FAIL"}
    assert failed == {"numpy", "shared ."}
    assert [list((tmp_path / name).iterdir()) for name in ("together", "0", "1")] == [[], [], []]


def test_a_missing_rank_is_a_row_of_the_table(tmp_path, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}.items():
        monkeypatch.setenv(name, value)
    table = doctor.diagnose([tmp_path], seconds=0.5)
    assert table is not None
    [row] = [each.row for each in table if each.row.status == "FAIL"]
    assert (row.check, row.value) == ("ranks", "rank 1 of 2 did not report")


def test_a_check_that_hangs_is_a_row_of_the_table(tmp_path, monkeypatch):
    monkeypatch.setattr(rank_checks, "ABANDONED", [])
    monkeypatch.setattr(doctor, "CHECKS", {"clogged": lambda: time.sleep(30)})
    table = doctor.diagnose([tmp_path], seconds=0.1)
    assert table is not None
    hung = table[0].row
    assert (hung.check, hung.value, hung.status) == ("clogged", "TimeoutError: did not finish within 0.1 s", "FAIL")


def test_missing_and_read_only_folders_are_distinguished(tmp_path, monkeypatch):
    rendezvous = rank_checks.Rendezvous(0, 1, 1.0)
    [row] = rank_checks.shared_folder(rendezvous, tmp_path / "nowhere", ["a"])
    assert (row.status, row.right) == ("FAIL", "a folder that all ranks can write to")
    assert row.value == f"{tmp_path / 'nowhere'}: no such folder; create it or use another folder"

    def refuse(path, data):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(rank_checks.files, "write_file", refuse)
    [row] = rank_checks.shared_folder(rendezvous, tmp_path, ["a"])
    assert (row.status, row.value) == ("warn", "cannot be written (Permission denied); all ranks see the same files")


def test_the_table_names_nodes_ranks_and_gpus_used_twice():
    hosts = ["a", "a", "b", "b"]
    gpu = CheckRow("GPU 1234", "H200")
    rows = [
        *((rank, CheckRow("torch", "2.11" if rank < 3 else "2.12")) for rank in range(4)),
        *((rank, CheckRow("memory", f"{rank} GiB")) for rank in range(4)),
        *((rank, gpu) for rank in (0, 1, 2)),
    ]
    grouped = [(each.row.check, each.place, each.row.value, each.row.status) for each in doctor._grouped(rows, hosts)]
    assert grouped == [
        ("torch", "a, rank 2 on b", "2.11", "FAIL"),
        ("torch", "rank 3 on b", "2.12", "FAIL"),
        ("memory", "a", "0 GiB", "OK"),
        ("memory", "b", "2 GiB", "OK"),
        ("GPU 1234", "a, rank 2 on b", "H200", "OK"),
    ]
    [doubled] = doctor._doubled_gpus(rows, hosts)
    assert (doubled.place, doubled.row.value, doubled.row.status) == ("a", "used by ranks 0, 1", "FAIL")


@pytest.mark.parametrize(("name", "value"), [("RANK", "x"), ("RANK", "2"), ("WORLD_SIZE", "")])
def test_invalid_rank_variables_are_refused(monkeypatch, name, value):
    given = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", name: value}
    for each, text in given.items():
        monkeypatch.setenv(each, text)
    with pytest.raises(UsageError, match=r"expected a(n integer, as set by torchrun| rank from 0 to 1)"):
        doctor.diagnose()


def test_the_doctor_module_needs_only_numpy(tmp_path):
    code = """
import runpy, sys
for name in ("torch", "typer", "rich", "msgspec", "transformers", "peft"):
    sys.modules[name] = None
sys.argv = ["doctor"]
runpy.run_module("chatmill.train.doctor", run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    first, *_, last = done.stdout.splitlines()
    assert first.split() == ["check", "where", "value", "expected"]
    assert "1 of " in last
    [line] = [line for line in done.stdout.splitlines() if "FAIL" in line]
    assert line.split()[0] == "torch"
    assert line.endswith("pip install 'chatmill[train]'")


def test_srun_processes_without_rank_variables_are_refused(monkeypatch):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "8")
    with pytest.raises(UsageError, match=r"^srun started 8 processes without RANK and WORLD_SIZE"):
        doctor.diagnose()


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_an_invalid_time_limit_is_refused(seconds):
    with pytest.raises(UsageError, match="expected a number greater than 0"):
        doctor.diagnose(seconds=seconds)
