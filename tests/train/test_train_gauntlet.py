"""The kill gauntlet of training in short: `scripts/train_gauntlet.py` does it at length."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "train_gauntlet.py"


def test_a_killed_run_comes_to_the_bits_of_an_undisturbed_one():
    """In a process of its own, which forks the runs that it kills."""
    command = [sys.executable, SCRIPT, "--kills", "4", "--steps", "60"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    counts = {name: int(count) for name, count in (line.rsplit(maxsplit=1) for line in done.stdout.splitlines())}
    assert counts["killed while it ran"] == counts["tried"] == 4
    assert (counts["files of equal bits"], counts["equal losses"]) == (2, 66)
