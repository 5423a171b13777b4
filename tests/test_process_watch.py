from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import process_watch

TESTS = Path(__file__).parent
HANGING = """
import signal, subprocess, sys

CODE = "def waits_in_the_child():\\n  print(flush=True)\\n  import time\\n  time.sleep(1000)\\nwaits_in_the_child()"

def test_hangs():
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", CODE], stdout=pipe, stderr=pipe, text=True) as child:
        child.stdout.readline()
        # As the timer of the test does when its time is over.
        signal.raise_signal(signal.SIGALRM)

def test_goes_on():
    pass
"""
LEAVING = """
import subprocess, process_watch

def test_leaves_processes():
    process_watch.PATIENCE = 0.5
    subprocess.run("sleep 1001 & setsid sleep 1002 & (sleep 1003 &)", shell=True, check=True)

def test_leaves_none():
    pass
"""


def test_a_hanging_test_shows_the_stacks_of_its_processes_and_none_is_left_behind(tmp_path):
    (tmp_path / "test_a.py").write_text(HANGING)
    (tmp_path / "test_b.py").write_text(LEAVING)
    (tmp_path / "conftest.py").write_text((TESTS / "conftest.py").read_text())
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *filter(None, sys.path)])}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "600", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert "1 failed, 3 passed, 1 error" in done.stdout, done.stdout + done.stderr
    assert "Timeout (>600.0s)" in done.stdout
    assert re.search(r"process \d+ \(\S*python\S* -c def waits_in_the_child", done.stdout)
    assert "Fatal Python error: Aborted" in done.stdout and " in waits_in_the_child" in done.stdout
    left = re.findall(r"process (\d+) \((sleep \d+)\)", done.stdout.partition("short test summary")[0])
    assert sorted(command for _, command in left) == ["sleep 1001", "sleep 1002", "sleep 1003"]
    assert all(process_watch._look_at(Path(f"/proc/{pid}")) is None for pid, _ in left)


def test_a_process_without_an_environment_is_found_below_its_parent():
    with subprocess.Popen(["sleep", "1004"], env={}) as child:
        [started] = [each for each in process_watch.started_processes() if each.pid == child.pid]
        assert (started.command, started.marked) == ("sleep 1004", False)
        child.kill()
