"""Run the examples in Markdown pages: find the fenced code blocks, run them, and compare their output with the page.

    console   `$ command` lines, run by sh in one folder per page; the lines below a command are its output.
              `$ command  # exit 1` means that the command exits with status 1.
    python    Executed; the blocks of a page share one namespace, and share their folder with the console blocks.
    text      Directly after a python block, without a heading between them: the output of that block.
    sh        Shown, but not run: only for commands that set up a machine (see DISPLAY_ONLY).

In the output on a page, a line `…` matches any number of lines, and `…` or `...` inside a line matches any text.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from forked_commands import run_in_shell

DISPLAY_ONLY = ("make", "pip", "git", "cd", "source")


@dataclass(frozen=True)
class Block:
    language: str
    text: str
    line: int
    after_heading: bool
    """Whether a heading comes between this block and the previous one."""


def blocks(page: str) -> list[Block]:
    """Return the fenced code blocks of a Markdown page. Fences can be indented, for example in lists."""
    found: list[Block] = []
    fence, language, start, heading = "", "", 0, True
    lines: list[str] = []
    for number, line in enumerate(page.splitlines(), 1):
        opened = re.match(r"\s*(`{3,}|~{3,})\s*(\w*)", line)
        if fence:
            if line.strip() == fence:
                found.append(Block(language, textwrap.dedent("\n".join(lines)), start, heading))
                fence, heading = "", False
            else:
                lines.append(line)
        elif opened:
            fence, language, start, lines = opened[1], opened[2], number + 1, []
        elif line.startswith("#"):
            heading = True
    if fence:
        raise AssertionError(f"line {start - 1}: the fenced block is never closed")
    return found


def prose(page: str) -> str:
    lines = page.splitlines()
    for block in blocks(page):
        stop = block.line - 1 + len(block.text.splitlines())
        lines[block.line - 2 : stop + 1] = [""] * (stop + 3 - block.line)
    return "\n".join(lines)


def commands(block: Block) -> list[tuple[int, str, list[str]]]:
    r"""Return the commands in a console block, each with its line number on the page and the output shown below it. A
    command continues on the next line after a trailing `\`.
    """
    found: list[tuple[int, str, list[str]]] = []
    for number, line in enumerate(block.text.splitlines(), block.line):
        if line.startswith("$ "):
            found.append((number, line[2:], []))
        elif found and found[-1][1].endswith("\\") and not found[-1][2]:
            found[-1] = (found[-1][0], f"{found[-1][1]}\n{line}", [])
        elif found:
            found[-1][2].append(line)
        elif line.strip():
            raise AssertionError(f"line {number}: a console block must begin with `$ command`, not with {line!r}")
    return found


def matches(shown: str, printed: str) -> bool:
    pattern = ""
    for line in shown.strip("\n").splitlines():
        if line.strip() in ("…", "..."):
            pattern += r"(?:[^\n]*\n)*"
        else:
            parts = re.split(r"…|\.\.\.", line.rstrip())
            pattern += "[^\n]*".join(re.escape(part) for part in parts) + r"[ \t]*\n"
    return re.fullmatch(pattern, printed.strip("\n") + "\n") is not None


def display_faults(page: str) -> list[str]:
    """Return an error message for each code block that shows commands but is never run."""
    faults = []
    for block in blocks(page):
        if block.language in ("bash", "shell", "zsh", ""):
            faults.append(f"line {block.line}: a {block.language or 'nameless'} block; use console, sh or text")
        elif block.language == "sh":
            for number, line in enumerate(block.text.splitlines(), block.line):
                word = line.removeprefix("$ ").split(" ")[0]
                if word and word != "#" and word not in DISPLAY_ONLY:
                    what = f"line {number}: `{line}` is shown but never run"
                    faults.append(f"{what}; use console (sh is for {', '.join(DISPLAY_ONLY)})")
    return faults


# The tests of different pages run in parallel, so each process uses only one OpenMP thread. All processes of a page use
# the same number of threads, because the last bits of a loss depend on it.
@patch.dict(os.environ, {"OMP_NUM_THREADS": "1"})
def run(page: Path, folder: Path) -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    found = blocks(page.read_text("utf-8"))
    for index, block in enumerate(found):
        if block.language == "console":
            for line, command, shown in commands(block):
                run_command(f"{page.name}:{line}", command, "\n".join(shown), folder)
        elif block.language == "python":
            after = found[index + 1] if index + 1 < len(found) else None
            shown = after.text if after and after.language == "text" and not after.after_heading else None
            run_python(page, block, shown, namespace)


def run_command(place: str, command: str, shown: str, folder: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    plain = {"PATH": path, "COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb", "LC_ALL": "C.UTF-8", "PYTHONUTF8": "1"}
    # The command may end in a comment, so the closing brace is on its own line.
    code, printed, _ = run_in_shell(f"{{ {command}\n}} 2>&1", folder=folder, environment=os.environ | plain)
    said = re.search(r"# exit (\d+)$", command)
    expected = int(said[1]) if said else 0
    if code != expected:
        raise AssertionError(f"{place}: `{command}` exits with {code}, expected {expected}: {printed}")
    if shown.strip() and not matches(shown, printed):
        raise AssertionError(f"{place}: `{command}` prints\n{printed}\nwhere the page shows\n{shown}")


def run_python(page: Path, block: Block, shown: str | None, namespace: dict[str, Any]) -> None:
    # The leading empty lines make tracebacks show the line numbers of the page.
    code = compile("\n" * (block.line - 1) + block.text, str(page), "exec")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, namespace)  # noqa: S102 - the examples of our own pages
    if shown is not None and not matches(shown, printed.getvalue()):
        raise AssertionError(
            f"{page.name}:{block.line}: the block prints\n{printed.getvalue()}\nwhere the page shows\n{shown}"
        )
