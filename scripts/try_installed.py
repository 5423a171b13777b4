"""Use the installed chatmill as a new user would, in an empty folder.

    python scripts/try_installed.py [--compiled | --not-compiled]

Trains a tokenizer, prepares, verifies and shows a dataset, and writes a report; this needs no optional dependencies.
The last output line lists the versions, the installed C extensions, and the hash of the dataset. The hash of the
dataset is the same for every Python version and processor. Exits with 1 if a command fails, or if the C extensions do
not match the flag.
"""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "data" / "conversations.jsonl"
COMPILED = sorted(path.stem for path in (ROOT / "src" / "chatmill" / "_native").glob("*.c"))
COMMANDS = (
    "tokenizer train {records} --vocab-size 1000 -o tokenizer.json",
    "prepare {records} -o v1 --tokenizer tokenizer.json --max-tokens 128 --pack 256 --val-split 0.1 --json",
    "verify v1 --full",
    "show v1 0",
    "report v1",
)


def chatmill(folder: str, *words: str) -> str:
    """Return the output of a command; exit if it fails."""
    command = [sys.executable, "-m", "chatmill", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=600)
    if done.returncode or not done.stdout:
        sys.exit(f"chatmill {' '.join(words)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def loads(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError:
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description="Test the chatmill installation of this Python.")
    compiled = parser.add_mutually_exclusive_group()
    compiled.add_argument("--compiled", action="store_true", help="fail if a C extension is missing")
    compiled.add_argument("--not-compiled", action="store_true", help="fail if a C extension is installed")
    options = parser.parse_args()
    where = find_spec("chatmill")
    if where is None or where.origin is None or Path(where.origin).is_relative_to(ROOT / "src"):
        sys.exit("chatmill is not installed for this Python; install a wheel or the sdist, not the repository")
    parts = [name for name in COMPILED if loads(f"chatmill._native.{name}")]
    if (options.compiled and parts != COMPILED) or (options.not_compiled and parts):
        sys.exit(f"compiled parts: {parts or 'none'}; expected {COMPILED if options.compiled else 'none'}")
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        version = chatmill(folder, "--version").strip()
        for command in COMMANDS:
            words = [word.format(records=RECORDS) for word in command.split()]
            results[words[0]] = chatmill(folder, *words)
    digest = json.loads(results["prepare"])["sha256"]
    print(f"{version}, Python {platform.python_version()}, compiled: {' '.join(parts) or 'nothing'}, dataset {digest}")


if __name__ == "__main__":
    main()
