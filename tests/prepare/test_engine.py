from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from child_processes import may_fork
from prepare_fixtures import Faults, build, conversations, digests, job_of, left_beside, lines, write_corpus

from chatmill.errors import ChatmillError, DataError, RecordError
from chatmill.prepare import engine, pipeline
from chatmill.prepare.fresh_process import run_in_fresh_process
from chatmill.prepare.pipeline import units_of
from chatmill.records import InputFiles

UNIT_BYTES = 9_000


@pytest.fixture
def threads(monkeypatch):
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    with monkeypatch.context() as patched:
        patched.setattr(os, "fork", lambda: pytest.fail("forked while another thread runs"))
        yield
    end.set()
    thread.join()


def test_a_process_with_threads_gives_the_same_bytes_and_faults(tmp_path, threads):
    inputs = write_corpus(tmp_path, 300)
    with Path(inputs[0]).open("ab") as file:
        file.write(b"{}\n")
    job = job_of(inputs, on_error="skip", pack=300)
    right, faults = Faults(), Faults()
    build(job, tmp_path / "one", on_fault=right)
    build(job, tmp_path / "two", workers=2, unit_bytes=UNIT_BYTES, on_fault=faults)
    assert digests(tmp_path / "two") == digests(tmp_path / "one")
    assert faults == right and len(faults) == 1


def test_a_process_with_threads_raises_the_first_fault_with_its_line(tmp_path, threads):
    (tmp_path / "a.jsonl").write_bytes(lines(conversations(120)) + b"{}\n" + lines(conversations(120)) + b"{}\n")
    with pytest.raises(RecordError, match=r"a.jsonl:121"):
        build(job_of((str(tmp_path / "a.jsonl"),)), tmp_path / "x", workers=2, unit_bytes=UNIT_BYTES)
    assert left_beside(tmp_path / "x") == []


def test_a_tokenizer_that_changed_since_it_was_opened_is_refused(tmp_path):
    inputs = write_corpus(tmp_path, 9)
    units = units_of(job := job_of(inputs), InputFiles([inputs]), UNIT_BYTES)
    tokenizer = SimpleNamespace(sha256="of the file that was there before", control_ids={})
    opened = SimpleNamespace(tokenizer=tokenizer, to_json=dict)
    with pytest.raises(DataError, match="bytes: the tokenizer changed during the build"):
        list(run_in_fresh_process(units, job, opened, tmp_path, workers=2))


HELD = """
import sys, threading
from chatmill.prepare import fresh_process
from prepare_fixtures import HOLD, build, job_of

fresh_process.SERVE = HOLD + fresh_process.SERVE
threading.Thread(target=threading.Event().wait, daemon=True).start()
build(job_of(("a.jsonl", "b.jsonl", "c.jsonl")), "x", workers=2)
"""


@pytest.fixture
def held(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines(conversations(20)))
    for name in ("b.jsonl", "c.jsonl"):
        (tmp_path / name).write_bytes(lines(conversations(1)))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    program = subprocess.Popen(
        [sys.executable, "-c", HELD], cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True
    )
    while len(processes := descendants(program.pid)) < 3 or not list(tmp_path.glob(".x.building.units/unit_*")):
        time.sleep(0.02)
    yield program, processes
    program.kill()
    program.wait()


def descendants(pid: int) -> list[int]:
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return children + [below for child in children for below in descendants(child)]


def wait_for_end(pids: list[int]) -> None:
    """Wait until the processes end. They are polled, because they are not children of this process."""
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        time.sleep(0.02)


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
def test_all_workers_of_a_program_with_threads_exit_with_it(held, sent):
    program, processes = held
    program.send_signal(sent)
    _, err = program.communicate()
    assert program.returncode == -sent
    assert ("KeyboardInterrupt" in err) == (sent == signal.SIGINT)
    wait_for_end(processes)


def test_a_killed_fork_server_is_reported_in_one_line(held):
    program, [first, *workers] = held
    os.kill(first, signal.SIGKILL)
    _, err = program.communicate()
    assert err.splitlines()[-1].endswith(
        "the process that runs the workers was killed, perhaps because memory ran out; continue with --resume"
    )
    wait_for_end(workers)


def end_this_process(plan, folder, *, vocab_size):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_killed_while_writing_a_shard_is_reported_in_one_line(tmp_path, monkeypatch, request):
    if not may_fork(request):
        return
    job = job_of(write_corpus(tmp_path, 300), shard_tokens=2_000, pack=300)
    build(job, tmp_path / "one")
    monkeypatch.setattr(pipeline, "FORKED_TOKENS", 0)
    with monkeypatch.context() as patched:
        patched.setattr(engine, "write_shard", end_this_process)
        with pytest.raises(ChatmillError, match=r"a worker process was killed, .*; continue with --resume"):
            build(job, tmp_path / "two", workers=2)
    assert not (tmp_path / "two").exists()
    build(job, tmp_path / "two", workers=2, resume=True)
    assert digests(tmp_path / "two") == digests(tmp_path / "one")


def test_a_process_killed_before_all_work_is_submitted_is_reported_in_one_line(request):
    if not may_fork(request):
        return

    def items():
        yield 1
        while multiprocessing.active_children():
            time.sleep(0.01)
        yield 2

    work = engine.LocalEngine(2).in_order(lambda item: os.kill(os.getpid(), signal.SIGKILL), items(), processes=2)
    with pytest.raises(ChatmillError, match=r"a worker process was killed, .*; continue with --resume"):
        list(work)


def test_a_shard_that_cannot_be_written_is_an_error_with_its_file(tmp_path, monkeypatch, request):
    if not may_fork(request):
        return
    # Use only the first file: the others cannot be split into small units.
    job = job_of(write_corpus(tmp_path, 2_000)[:1], shard_tokens=20_000)
    build(job, tmp_path / "one")
    monkeypatch.setattr(pipeline, "FORKED_TOKENS", 0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # The limit is larger than a staged file and smaller than the token file of a shard.
    resource.setrlimit(resource.RLIMIT_FSIZE, (38_000, hard))
    try:
        with pytest.raises(OSError, match=r"File too large.*shard_0000"):
            build(job, tmp_path / "two", workers=3, unit_bytes=1_500)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not (tmp_path / "two").exists()
    build(job, tmp_path / "two", workers=3, unit_bytes=1_500, resume=True)
    assert digests(tmp_path / "two") == digests(tmp_path / "one")
