from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import typer.main

from chatmill.cli.app import app_of
from chatmill.cli.commands import COMMANDS, help_text

IMPORTED = """
import sys
from chatmill.cli.main import main
try:
    main()
except SystemExit as ended:
    assert not ended.code
print(*{name.partition(".")[0] for name in sys.modules}, file=sys.stderr)
"""


def imported(*words: str) -> set[str]:
    command = [sys.executable, "-c", IMPORTED, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return set(done.stderr.splitlines()[-1].split())


def test_the_help_lists_every_command_and_option_of_the_application():
    application = typer.main.get_command(app_of())
    _, options, commands = help_text().split("\n\n", 2)[-1].partition("Options:\n")
    options, _, commands = commands.partition("\nCommands:\n")
    assert {line.split("  ")[1] for line in options.splitlines()} == {"--version", "-h, --help"}
    assert {option for each in application.params for option in each.opts} == {"--version"}
    listed = {line.split()[0]: line[2:].partition(" ")[2].strip() for line in commands.splitlines()}
    assert listed.keys() == application.commands.keys() and [*listed] == [*COMMANDS]
    assert all(summary.endswith(".") for summary in listed.values())
    assert max(map(len, help_text().splitlines())) < 80


def test_help_imports_no_library():
    assert not imported("--help") & {"typer", "click", "rich", "numpy", "msgspec", "tokenizers", "pydantic"}


def test_without_arguments_the_help_goes_to_stderr(run):
    assert run() == (2, "", help_text())
    assert run("-h") == run("--help") == (0, help_text(), "")


def test_preparing_with_a_preset_imports_only_what_it_uses(tmp_path):
    chat = '{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}\n'
    (tmp_path / "chat.jsonl").write_text(chat)
    packages = imported("prepare", str(tmp_path / "chat.jsonl"), "-o", str(tmp_path / "v1"))
    assert {"numpy", "msgspec"} <= packages
    others = {"torch", "transformers", "datasets", "pyarrow", "ray", "fsspec", "tiktoken", "sentencepiece", "yaml"}
    assert not packages & others
    assert Path(tmp_path / "v1").is_dir()
