"""Start child processes that use torch, forked from a server process instead of the test process.

`os.fork()` copies the locks of torch's thread pools but not their threads. As a result, on aarch64, a child of a
process that has multiplied matrices hangs in its first `Linear.forward`. The server (Python's "forkserver") has one
thread; it only imports torch and chatmill and computes nothing. Children of the server start in milliseconds.
"""

from __future__ import annotations

import _thread
import faulthandler
import functools
import multiprocessing
import multiprocessing.forkserver
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import cloudpickle

IMPORTED_BY_THE_SERVER = [
    "torch",
    "torch._dynamo",
    "chatmill.cli.app",
    "chatmill.cli.main",
    "chatmill.cli.audit",
    "chatmill.cli.build",
    "chatmill.cli.prepare",
    "chatmill.cli.rollout",
    "chatmill.train.command",
    "transformers",
    "peft",
]
SURROUNDINGS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
"""Environment variables that limit libraries to one thread, and hide torch's warnings about host names."""
TIME_LIMIT = 400
"""Time limit in seconds, far more than any child needs on a busy machine."""
GRACE = 20
"""Seconds that the other children have to print their errors after one child has failed."""


def start_child(
    work: Callable[[], object],
    *,
    variables: Mapping[str, str] | None = None,
    output: Path | None = None,
    time_limit: float = TIME_LIMIT,
) -> BaseProcess:
    """Call `work` in a new process with the current working directory and environment.

    If `output` is set, stdout and stderr are written to the files "out" and "err" in the folder `output`. After
    `time_limit` seconds, the process prints the stacks of its threads and exits with 1.
    """
    environment = {**os.environ, **SURROUNDINGS, **(variables or {})}
    files = (
        [os.open(output / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND) for name in ("out", "err")] if output else []
    )
    try:
        return start_in(work, Path.cwd(), environment, dict(zip((1, 2), files, strict=False)), time_limit)
    finally:
        for file in files:
            os.close(file)


def start_in(
    work: Callable[[], object],
    folder: Path,
    environment: Mapping[str, str],
    streams: Mapping[int, int],
    time_limit: float = TIME_LIMIT,
) -> BaseProcess:
    """Call `work` in a new process. `streams` maps the child's descriptors 0, 1 and 2 to open file descriptors of this
    process.
    """
    # Only `Connection` objects can send descriptors to the server's children.
    sent = {number: Connection(os.dup(file)) for number, file in streams.items()}
    child = _server().Process(
        target=_run_child, args=(cloudpickle.dumps(work), environment, folder, sent, time_limit), daemon=True
    )
    child.start()
    for connection in sent.values():
        connection.close()
    return child


def end_children(children: Sequence[BaseProcess]) -> list[int]:
    """Wait for all processes and return their exit codes. If a process fails, kill the other processes after `GRACE`
    seconds.
    """
    try:
        while (running := [child for child in children if child.exitcode is None]) and not _failed(children):
            wait([child.sentinel for child in running])
        if _failed(children):
            for child in running:
                child.join(GRACE)
    finally:
        for child in children:
            child.kill()
            child.join()
    return [child.exitcode for child in children if child.exitcode is not None]


def _failed(children: Sequence[BaseProcess]) -> bool:
    return any(child.exitcode for child in children)


@functools.cache
def _server() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED_BY_THE_SERVER)
    with _environment({**os.environ, **SURROUNDINGS, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}):
        multiprocessing.forkserver.ensure_running()
    return context


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _run_child(
    work: bytes, environment: Mapping[str, str], folder: Path, streams: Mapping[int, Connection], limit: float
) -> None:
    import torch

    for number, connection in streams.items():
        os.dup2(connection.fileno(), number)
        connection.close()
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", 1 if 0 not in streams else -1, encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)
    faulthandler.dump_traceback_later(limit, exit=True, file=2)
    # `work` may start processes, which Python forbids in daemons. Forking stays safe: the new thread only waits in a
    # system call.
    multiprocessing.current_process()._config["daemon"] = False
    _thread.start_new_thread(_end_with_the_parent, ())
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    torch.set_num_threads(1)
    cloudpickle.loads(work)()


def _end_with_the_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def may_fork(request) -> bool:
    """Return True if this process has only one thread; otherwise, run the test in a new process and return False."""
    if threading.active_count() == 1:
        return True
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", request.node.nodeid]
    ran = subprocess.run(command, cwd=request.config.rootpath, capture_output=True, text=True, timeout=400)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return False
