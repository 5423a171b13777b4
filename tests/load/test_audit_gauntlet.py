"""The kill gauntlet of the audit log in short: `scripts/audit_gauntlet.py` does it at length."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "audit_gauntlet.py"


def test_after_a_kill_at_any_moment_log_and_loader_agree():
    """In a process of its own, which forks the loops that it kills."""
    done = subprocess.run([sys.executable, SCRIPT, "--kills", "6"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    counts = {name: int(count) for name, count in (line.rsplit(maxsplit=1) for line in done.stdout.splitlines())}
    assert counts["killed while it ran"] == counts["tried"] == 6
    assert counts["log and state agree"] >= 2
    assert counts["steps"] > 20
