"""The fault-injection trials at small sizes; `make gauntlet` runs them at full size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fault_injection.planted import PLANTED
from fault_injection.run import BEGIN, END, PAGE, main, page_part, plain_table, write_page
from fault_injection.trial import Tally, Trial
from fault_injection.trials import TRIALS

RUN = Path(__file__).with_name("run.py")


def run_json(*flags: str) -> Any:
    """Run the trials in a separate process, because a process that forks must have only one thread."""
    done = subprocess.run([sys.executable, RUN, *flags, "--json"], capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


def test_every_planted_fault_has_its_trial():
    assert {fault.trial.name for fault in PLANTED} <= {trial.name for trial in TRIALS}
    assert len({fault.name for fault in PLANTED}) == len(PLANTED) >= 50


def test_a_child_that_makes_no_progress_is_ended_with_its_stacks():
    code = """
import threading, time
from fault_injection import processes

processes.IDLE_SECONDS = 2.0
def spin():
    while True:
        pass
def wait_forever():
    time.sleep(1000)
print(processes.apart(spin, cpu_seconds=0.5).broke)
print(processes.apart(wait_forever).broke)
threading.Thread(target=wait_forever, daemon=True).start()
try:
    processes.begin(spin)
except AssertionError as error:
    print(error)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(RUN.parents[1]), *sys.path]))}
    environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert done.stdout.splitlines() == [
        "the child used more than 0 seconds of CPU time",
        "the child used no CPU time for 2 seconds",
        "cannot fork a process with 2 threads: locks held by the other threads would stay locked",
    ]
    assert " in spin" in done.stderr and " in wait_forever" in done.stderr


def test_every_attempt_is_counted_once():
    tally = Tally("x")
    tally.judge(survived=True, found=True)
    tally.judge(found=True)
    tally.judge(lost="gone")
    tally.is_wrong("other")
    assert (tally.tried, tally.survived, tally.found, tally.lost, tally.wrong) == (4, 1, 1, 1, 1)
    assert tally.is_red
    assert tally.examples == ["lost: gone", "silently wrong: other"]


def test_a_trial_that_tries_nothing_is_no_trial():
    with pytest.raises(AssertionError, match="no attempt was made"):
        Trial("idle", "nothing", lambda size, seed, folder, tally: None, 1, 1).run(1, 1)


def test_the_tables_hold_every_trial_and_the_sums():
    tallies = [Tally(trial.name, survived=3, found=2, seconds=1.5) for trial in TRIALS]
    total = f"{5 * len(TRIALS)}"
    assert plain_table(tallies).splitlines()[-1].split()[:2] == ["all", total]
    part = page_part(TRIALS, tallies, seed=1, seconds=60)
    for trial in TRIALS:
        assert f"| {trial.name} | 5 | 3 | 2 | 0 | 0 | 2 |" in part
        assert f"- **{trial.name}**: {trial.does}." in part.replace("\n  ", " ")
    assert f"| all | {total} |" in part


def test_the_page_has_a_place_for_the_figures():
    text = PAGE.read_text()
    assert text.count(BEGIN) == text.count(END) == 1
    assert text.index(BEGIN) < text.index(END)


def test_the_figures_go_between_their_marks_and_nowhere_else(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text(f"before\n\n{BEGIN}\n\nold\n\n{END}\n\nafter\n")
    monkeypatch.setattr("fault_injection.run.PAGE", page)
    write_page("new")
    assert page.read_text() == f"before\n\n{BEGIN}\n\nnew\n\n{END}\n\nafter\n"


def test_names_are_unique_and_an_unknown_one_is_refused(capsys):
    names = [trial.name for trial in TRIALS]
    assert len(set(names)) == len(names)
    with pytest.raises(SystemExit) as ended:
        main(["--only", "no such trial"])
    assert ended.value.code == 2
    assert "no trial has a matching name; choose from: power loss" in capsys.readouterr().err
