from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

from child_processes import end_children, start_child


def test_a_child_multiplies_matrices_after_its_parent_did(tmp_path):
    import torch

    layer, rows = torch.nn.Linear(512, 512), torch.ones(64, 512)
    wanted = layer(rows).sum().item()

    def print_sum() -> None:
        print(layer(rows).sum().item())

    assert end_children([start_child(print_sum, output=tmp_path)]) == [0]
    assert abs(float((tmp_path / "out").read_text()) - wanted) < 1e-2


def test_a_child_has_the_folder_and_the_variables_of_its_parent(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("CHATMILL_TEST", "inherited")

    def print_surroundings() -> None:
        print(Path.cwd().name, os.environ["CHATMILL_TEST"], os.environ["RANK"], os.environ["OMP_NUM_THREADS"])

    assert end_children([start_child(print_surroundings, variables={"RANK": "3"}, output=tmp_path)]) == [0]
    assert (tmp_path / "out").read_text() == "here inherited 3 1\n"


def test_a_child_that_hangs_prints_its_stacks_and_ends(tmp_path):
    def wait_for_ever() -> None:
        signal.pause()

    assert end_children([start_child(wait_for_ever, output=tmp_path, time_limit=1)]) == [1]
    assert "in wait_for_ever" in (tmp_path / "err").read_text()


def test_when_one_child_fails_the_others_are_ended(tmp_path, monkeypatch):
    monkeypatch.setattr("child_processes.GRACE", 0)
    others = [start_child(signal.pause), start_child(lambda: sys.exit(3)), start_child(signal.pause)]
    assert end_children(others) == [-signal.SIGKILL, 3, -signal.SIGKILL]


def test_children_end_with_the_process_that_started_them(tmp_path):
    code = """
        import os, signal
        import child_processes

        child_processes.IMPORTED_BY_THE_SERVER = []
        child = child_processes.start_child(signal.pause)
        print(child.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True, env=environment, check=False
    )
    assert done.returncode == -signal.SIGKILL
    # The process is not a child of this one, so it must be polled.
    while Path(f"/proc/{int(done.stdout)}").exists():
        time.sleep(0.05)
