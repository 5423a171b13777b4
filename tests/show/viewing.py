"""The viewer as a user starts it, and a real browser to look at it with."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SHOTS = Path(__file__).resolve().parents[2] / "artifacts" / "show"
"""Where screenshots are kept to be looked at; not part of the repository."""


@contextmanager
def viewer(dataset: Path, folder: Path, *options: str) -> Iterator[str]:
    """`chatmill view` in a folder, until the end of the block: its address."""
    command = [Path(sys.executable).with_name("chatmill"), "view", dataset, "--index", folder / "index", "--json"]
    process = subprocess.Popen([*command, *options], cwd=folder, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["url"]
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


def chromium() -> str:
    """Debian's Chromium, which `make test` installs; tests are skipped only where that cannot be done."""
    found = shutil.which("chromium")
    if found is None:
        if _succeeds("apt-get", "install", "--simulate", "chromium") and (
            os.geteuid() == 0 or _succeeds("sudo", "-n", "true")
        ):
            pytest.fail("chromium is not installed; run make browser")
        pytest.skip("chromium is not here and cannot be installed: that needs apt-get, a package server, and root")
    return found


def _succeeds(*command: str) -> bool:
    return (
        shutil.which(command[0]) is not None
        and subprocess.run(command, capture_output=True, check=False).returncode == 0
    )
