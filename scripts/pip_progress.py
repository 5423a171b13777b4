"""Run `pip install` and show the current package on one line.

    .venv/bin/python scripts/pip_progress.py -r requirements/dev.txt

All arguments are passed to `pip install`. If pip fails, its whole output is printed. The exit code is pip's exit code.
"""

from __future__ import annotations

import re
import subprocess
import sys

STEP = re.compile(
    r"\s*(Collecting|Downloading|Preparing metadata|Building wheel for|Installing collected packages)\b(.*)"
)
WIDTH = 78


def main(arguments: list[str]) -> int:
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off"]
    pip = subprocess.Popen(
        [*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    assert pip.stdout is not None
    output, packages, terminal = [], 0, sys.stdout.isatty()
    for line in pip.stdout:
        output.append(line)
        if match := STEP.match(line):
            packages += match[1] == "Collecting"
            if match[1] == "Installing collected packages":
                print_step(f"  installing {packages} packages", terminal=terminal, final=False)
            elif match[1] == "Collecting" or terminal:
                print_step(f"  {packages} packages: {match[1].lower()}{match[2]}", terminal=terminal, final=False)
    if terminal:
        print_step("", terminal=True, final=True)
    if code := pip.wait():
        sys.stdout.writelines(output)
    return code


def print_step(text: str, *, terminal: bool, final: bool) -> None:
    """Update the progress line on a terminal; in a log, print a line only once per 50 packages."""
    if terminal:
        print(f"\r{text[:WIDTH]:<{WIDTH}}", end="\r" if final else "", flush=True)
    elif text.startswith("  installing") or re.match(r"  \d*[05]0 packages: collecting", text):
        print(text[:WIDTH], flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
