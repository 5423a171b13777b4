"""Write docs/reference/commands.md, the command reference, from the commands themselves.

python scripts/command_reference.py            print the page
python scripts/command_reference.py --write    write it to docs/reference/commands.md
python scripts/command_reference.py --check    exit with 1 if docs/reference/commands.md is out of date
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import typer.main

from chatmill.cli.app import app_of
from chatmill.config import keys_of
from chatmill.rollout.config import RolloutConfig

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "commands.md"
NAME = "chatmill"
HEAD = """\
# Commands

<!-- Made by scripts/command_reference.py --write from the help of the commands: change that, not this page. -->

The `--help` of every command, on one page. An error is one line; the exit code is 1 for bad data and 2 for bad usage.
`--json` prints the result as JSON.

"""
TRAIN = """\
For more about the keys, see [training](training.md), [loading](../explanation/loading.md),
[models](../explanation/models.md) and [many GPUs](../how-to/many-gpus.md).
"""
KEYS = "Keys of CONFIG, a JSON file that may inherit from another; `chatmill rollout keys` prints them:"


def page() -> str:
    """Return the whole page: commands in the order of `chatmill --help`, with the commands of each group together."""
    listed = list(commands(typer.main.get_command(app_of()), (NAME,)))
    lines = ["| command | what it does |", "|---|---|"]
    for path, command in listed:
        name = " ".join(path)
        lines.append(f"| [`{name}`](#{name.replace(' ', '-')}) | {cell(first_sentence(command))} |")
    parts = [HEAD + "\n".join(lines) + "\n"]
    parts += [section(path, command) for path, command in listed]
    return "\n".join(parts)


def commands(group: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every command that is not a group, with its path."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


def section(path: tuple[str, ...], command: Any) -> str:
    name = " ".join(path)
    text, examples = split_help(command)
    context = command.make_context(name, [], resilient_parsing=True)
    parts = [f"## {name}", text]
    if path == (NAME, "train"):
        parts.append(TRAIN.strip())
    usage = command.get_usage(context).removeprefix("Usage: ")
    parts.append(block([re.sub(r"\s+", " ", usage), "", *examples]))
    rows = [record for each in command.params if (record := each.get_help_record(context)) is not None]
    parts.append(table("argument or option", (split_default(*record) for record in rows)))
    if path == (NAME, "rollout", "train"):
        parts += [KEYS, keys_table(RolloutConfig)]
    return "\n\n".join(parts) + "\n"


def split_help(command: Any) -> tuple[str, list[str]]:
    """Split a help text into its paragraphs, one per line, and its examples."""
    text, _, below = inspect.cleandoc(command.help or "").partition("\b\nExample")
    paragraphs = [" ".join(part.split()) for part in re.split(r"\n\s*\n", text.replace("\b", "")) if part.strip()]
    return "\n\n".join(paragraphs), [line.removeprefix("  ") for line in below.splitlines()[1:]]


def first_sentence(command: Any) -> str:
    """Return the first paragraph of a help text."""
    return split_help(command)[0].split("\n\n")[0]


def split_default(flag: str, help: str) -> tuple[str, str, str]:
    """Return a flag, its help, and the default and limits, which are in brackets at the end of the help."""
    match = re.fullmatch(r"(.*?)(?:\s*\[([^\[\]]*)\])?", help, re.DOTALL)
    text, brackets = (match[1], match[2] or "") if match else (help, "")
    return f"`{flag}`", text, brackets.removeprefix("default: ")


def keys_table(config: Any) -> str:
    rows = ((f"`{each.name}`", each.help, f"`{json.dumps(each.default)}`") for each in keys_of(config).values())
    return table("key", rows)


def table(first: str, rows: Iterable[tuple[str, str, str]]) -> str:
    lines = [f"| {first} | | default; limits |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {' | '.join(map(cell, row))} |" for row in rows)])


def cell(text: str) -> str:
    """Escape text for a table cell; code in backticks is kept."""
    plain = re.sub(r"\s+", " ", text).strip().replace("|", "\\|")
    return "".join(
        part if number % 2 else part.replace("<", "&lt;").replace("*", "\\*")
        for number, part in enumerate(re.split(r"(`[^`]*`)", plain))
    )


def block(lines: Sequence[str]) -> str:
    return "\n".join(["```text", *lines, "```"])


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--write", action="store_true")
    options.add_argument("--check", action="store_true")
    args = options.parse_args()
    text = page()
    if args.write:
        PAGE.write_text(text, "utf-8")
        print(f"{PAGE.name}: {len(text.splitlines())} lines")
    elif args.check:
        if not PAGE.is_file() or PAGE.read_text("utf-8") != text:
            print(f"{PAGE.name}: is not what the commands say; run scripts/command_reference.py --write")
            return 1
    else:
        print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
