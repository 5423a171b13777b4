"""A shell for tests, in which the commands `chatmill` and `python FILE.py` are forked from the server in
`child_processes`.

A real shell runs the command line, with replacement scripts for `chatmill` and `python` first in PATH. The replacement
scripts pass their arguments, folder, environment and streams to the server, and exit with the exit code of the forked
process. Forking saves the seconds that importing torch and transformers takes.
"""

from __future__ import annotations

import json
import os
import runpy
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from child_processes import start_in

SOCKET = "CHATMILL_TEST_COMMANDS"
HAND_OVER = f"""
import json, os, signal, socket, sys

_, program, *words = sys.argv
if program == "python" and not (words and words[0].endswith(".py")):
    os.execv({sys.executable!r}, [program, *words])
end, tell = os.pipe()
message = json.dumps([program, words, os.getcwd(), dict(os.environ)]).encode()
with socket.socket(fileno=int(os.environ["{SOCKET}"])) as server:
    socket.send_fds(server, [message], [0, 1, 2, tell])
os.close(tell)
code = int(os.read(end, 16) or b"1")
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


def run_in_shell(command: str, *, folder: Path, environment: Mapping[str, str]) -> tuple[int, str, str]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, tempfile.TemporaryDirectory() as programs, tempfile.TemporaryDirectory() as files:
        (Path(programs) / "hand_over.py").write_text(HAND_OVER, "utf-8")
        for name in ("chatmill", "python"):
            hand_over = shlex.join([sys.executable, "-IS", f"{programs}/hand_over.py", name])
            (Path(programs) / name).write_text(f'#!/bin/sh\nexec {hand_over} "$@"\n', "utf-8")
            (Path(programs) / name).chmod(0o755)
        path = f"{programs}{os.pathsep}{environment['PATH']}"
        out, err = Path(files, "out"), Path(files, "err")
        with out.open("wb") as output, err.open("wb") as errors:
            shell = subprocess.Popen(
                ["sh", "-c", command],
                cwd=folder,
                env={**environment, "PATH": path, SOCKET: str(theirs.fileno())},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
            )
        theirs.close()
        children: dict[int, tuple[BaseProcess, int]] = {}
        try:
            _serve(ours, children)
            shell.wait()
        finally:
            shell.kill()
            for child, tell in children.values():
                child.kill()
                os.close(tell)
        return shell.wait(), out.read_text("utf-8"), err.read_text("utf-8")


def _serve(ours: socket.socket, children: dict[int, tuple[BaseProcess, int]]) -> None:
    """Start the requested commands and report their exit codes, until the shell and its children have closed the
    socket.
    """
    asked = True
    while asked or children:
        for ready in wait([*children, *([ours.fileno()] if asked else [])]):
            if ready in children:
                child, tell = children.pop(ready)
                child.join()
                with suppress(BrokenPipeError):
                    # The shell may end a command whose output is no longer read.
                    os.write(tell, str(child.exitcode).encode())
                os.close(tell)
                continue
            message, streams, _, _ = socket.recv_fds(ours, 1 << 20, 4)
            asked = bool(message)
            if asked:
                *standard, tell = streams
                program, words, folder, environment = json.loads(message)
                work = partial(run_program, program, words)
                child = start_in(work, Path(folder), environment, dict(enumerate(standard)))
                children[child.sentinel] = child, tell
                for stream in standard:
                    os.close(stream)


def run_program(program: str, words: list[str]) -> None:
    del os.environ[SOCKET]
    if program == "chatmill":
        from chatmill.cli.main import main

        sys.argv = [program, *words]
        main()
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).parent))
        runpy.run_path(words[0], run_name="__main__")
