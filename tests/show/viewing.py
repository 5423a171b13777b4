from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

WAIT = 500_000
"""Timeout for browser waits in milliseconds, slightly below the time limit of a test."""
SHOTS = Path(__file__).resolve().parents[2] / "artifacts" / "show"
"""Folder for screenshots to inspect; not tracked."""


@contextmanager
def viewer(dataset: Path, folder: Path, *options: str) -> Iterator[str]:
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
    """Return the path of Debian's Chromium, which `make test` installs; skip the test if it cannot be installed."""
    found = shutil.which("chromium")
    if found is None:
        if _succeeds("apt-get", "install", "--simulate", "chromium") and (
            os.geteuid() == 0 or _succeeds("sudo", "-n", "true")
        ):
            pytest.fail("chromium is not installed; run make browser")
        pytest.skip("chromium is not installed and cannot be installed without apt-get, a package server and root")
    return found


def _succeeds(*command: str) -> bool:
    return (
        shutil.which(command[0]) is not None
        and subprocess.run(command, capture_output=True, check=False).returncode == 0
    )


@contextmanager
def open_browser() -> Iterator[Any]:
    executable = chromium()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Chromium cannot use its sandbox as root in a container. The tests open only pages from chatmill, so no sandbox
        # is needed.
        opened = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"], timeout=WAIT)
        yield opened
        opened.close()


def count(page: Any, selector: str, number: int) -> None:
    page.wait_for_function(f"() => document.querySelectorAll('{selector}').length === {number}")


@dataclass
class Watched:
    page: Any
    faults: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def shot(self, name: str) -> None:
        SHOTS.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=SHOTS / f"{name}.png")


@contextmanager
def watched_page(browser: Any, **options: Any) -> Iterator[Watched]:
    """Open a page. Any console message, error, dialog or second page fails the test."""
    context = browser.new_context(**{"viewport": {"width": 1440, "height": 900}, **options})
    page = context.new_page()
    page.set_default_timeout(WAIT)
    seen = Watched(page)
    page.on("console", lambda message: seen.faults.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: seen.faults.append(f"error: {error}"))
    page.on("dialog", lambda dialog: (seen.faults.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    page.on("request", lambda request: seen.requests.append(request.url))
    context.on("page", lambda other: seen.faults.append(f"another page: {other.url}") if other is not page else None)
    yield seen
    assert seen.faults == []
    context.close()
