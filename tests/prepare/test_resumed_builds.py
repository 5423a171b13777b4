from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from child_processes import end_children, start_child
from default_tokenizer import without_notes
from prepare_fixtures import HOLD, JOBS, build, conversations, digests, job_of, left_beside, lines, write_corpus

from chatmill.errors import DataError
from chatmill.prepare.engine import LocalEngine
from chatmill.prepare.pipeline import prepare_dataset
from chatmill.store.verify import verify_dataset

UNIT_BYTES = 9_000


class Counting(LocalEngine):
    def __init__(self) -> None:
        super().__init__(1)
        self.ran: list[int] = []

    def run(self, units, job, renderer, folder):
        self.ran += [unit.number for unit in units]
        yield from super().run(units, job, renderer, folder)


def in_a_child(work: Callable[[], object]) -> int:
    [code] = end_children([start_child(work)])
    return code


def killed_at(event: int, **options) -> Callable[[], object]:
    seen = 0

    def on_progress(progress) -> None:
        nonlocal seen
        seen += 1
        if seen == event:
            os.kill(os.getpid(), signal.SIGKILL)

    return lambda: prepare_dataset(**options, unit_bytes=UNIT_BYTES, on_progress=on_progress)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> tuple[str, ...]:
    return write_corpus(tmp_path_factory.mktemp("corpus"), 300)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("name", ["plain", "blocks", "all at once"])
def test_a_killed_build_resumes_and_gives_the_same_bytes(tmp_path, inputs, name, workers):
    job = job_of(inputs, **JOBS[name])
    build(job, tmp_path / "whole")
    target = tmp_path / "x"
    for event in (3, 7, 12):
        options = {"job": job, "target": target, "engine": LocalEngine(workers), "resume": True}
        assert in_a_child(killed_at(event, **options)) == -signal.SIGKILL
        assert not target.exists()
    build(job, target, workers=workers, unit_bytes=UNIT_BYTES, resume=True)
    assert digests(target) == digests(tmp_path / "whole")
    assert left_beside(target) == []


def test_units_that_are_finished_are_not_run_again(tmp_path, inputs):
    job, target = job_of(inputs), tmp_path / "x"
    whole = Counting()
    prepare_dataset(job, tmp_path / "whole", engine=whole, unit_bytes=UNIT_BYTES)
    assert in_a_child(killed_at(4, job=job, target=target, engine=LocalEngine(1))) == -signal.SIGKILL
    rest = Counting()
    prepare_dataset(job, target, engine=rest, unit_bytes=UNIT_BYTES, resume=True)
    assert rest.ran == whole.ran[4:]
    assert digests(target) == digests(tmp_path / "whole")


def test_a_build_killed_after_its_last_unit_renders_nothing_again(tmp_path, inputs):
    job, target = job_of(inputs), tmp_path / "x"
    whole = Counting()
    prepare_dataset(job, tmp_path / "whole", engine=whole, unit_bytes=UNIT_BYTES)
    options = {"job": job, "target": target, "engine": LocalEngine(1)}
    assert in_a_child(killed_at(len(whole.ran) + 1, **options)) == -signal.SIGKILL
    assert left_beside(target) == [".x.building", ".x.building.lock", ".x.building.units"]
    rest = Counting()
    prepare_dataset(job, target, engine=rest, unit_bytes=UNIT_BYTES, resume=True)
    assert rest.ran == []
    assert digests(target) == digests(tmp_path / "whole")


def test_units_with_rejects_are_run_again_so_that_all_rejects_are_reported(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"{}\n" + lines(conversations(120)) + b"{}\n")
    job = job_of((str(tmp_path / "a.jsonl"),), on_error="skip")
    target = tmp_path / "x"
    assert in_a_child(killed_at(2, job=job, target=target, engine=LocalEngine(1))) == -signal.SIGKILL
    rest, told = Counting(), []
    prepare_dataset(job, target, engine=rest, unit_bytes=UNIT_BYTES, resume=True, on_fault=told.append)
    assert rest.ran[0] == 0 and 1 not in rest.ran
    assert [fault.line for fault in told] == [1, 122]


@pytest.mark.parametrize("damage", ["cut", "flipped", "of nothing", "header", "another magic"])
def test_a_damaged_staged_unit_is_run_again(tmp_path, inputs, damage):
    job, target = job_of(inputs), tmp_path / "x"
    build(job, tmp_path / "whole")
    assert in_a_child(killed_at(6, job=job, target=target, engine=LocalEngine(1))) == -signal.SIGKILL
    staged = sorted((tmp_path / ".x.building.units").glob("unit_*"))
    data = staged[2].read_bytes()
    staged[2].write_bytes(
        {
            "cut": data[:-1],
            "flipped": data[:-9] + bytes([data[-9] ^ 4]) + data[-8:],
            "of nothing": b"",
            "header": data.replace(b'"records": ', b'"records": 1', 1),
            "another magic": b"x" + data[1:],
        }[damage]
    )
    rest = Counting()
    prepare_dataset(job, target, engine=rest, unit_bytes=UNIT_BYTES, resume=True)
    assert rest.ran[0] == 2 and rest.ran[1] == 6
    assert digests(target) == digests(tmp_path / "whole")


@pytest.mark.parametrize("change", ["another job", "more input"])
def test_resuming_another_job_or_input_is_refused_and_keeps_the_units(tmp_path, change):
    inputs = write_corpus(tmp_path, 60)
    job, target = job_of(inputs), tmp_path / "x"
    assert in_a_child(killed_at(4, job=job, target=target, engine=LocalEngine(1))) == -signal.SIGKILL
    before = sorted((tmp_path / ".x.building.units").iterdir())
    other = job_of(inputs, max_tokens=50) if change == "another job" else job
    if change == "more input":
        with Path(inputs[0]).open("ab") as file:
            file.write(lines(conversations(1)))
    with pytest.raises(DataError, match="had a different job or input; build without --resume"):
        prepare_dataset(other, target, engine=LocalEngine(1), unit_bytes=UNIT_BYTES, resume=True)
    assert sorted((tmp_path / ".x.building.units").iterdir()) == before
    prepare_dataset(other, target, engine=LocalEngine(1), unit_bytes=UNIT_BYTES)
    assert verify_dataset(target, full=True).faults == ()
    assert left_beside(target) == []


def test_a_changed_format_file_is_refused_too(tmp_path):
    from chatmill.format import load_format

    preset = Path(sys.modules[load_format.__module__].__file__).parent / "presets/chatml.toml"
    (tmp_path / "mine.toml").write_text(preset.read_text())
    inputs = write_corpus(tmp_path, 60)
    job, target = job_of(inputs, format=str(tmp_path / "mine.toml")), tmp_path / "x"
    assert in_a_child(killed_at(4, job=job, target=target, engine=LocalEngine(1))) == -signal.SIGKILL
    (tmp_path / "mine.toml").write_text(preset.read_text().replace("user\\n", "person\\n"))
    with pytest.raises(DataError, match="had a different job or input"):
        prepare_dataset(job, target, engine=LocalEngine(1), unit_bytes=UNIT_BYTES, resume=True)


def test_resume_without_an_interrupted_build_starts_a_new_one(tmp_path, inputs):
    build(job_of(inputs), tmp_path / "x", resume=True)
    assert verify_dataset(tmp_path / "x", full=True).faults == ()


# Processes.


@pytest.fixture
def held(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_bytes(lines(conversations(20)))
    for name in ("b.jsonl", "c.jsonl"):
        (tmp_path / name).write_bytes(lines(conversations(1)))
    program = f"{HOLD}from chatmill.cli.main import main; main()"
    command = [sys.executable, "-c", program, "prepare", "a.jsonl", "b.jsonl", "c.jsonl", "-o", "x", "--workers", "2"]
    started = []

    def start() -> subprocess.Popen[str]:
        started.append(subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def workers_of(build: subprocess.Popen[str]) -> list[int]:
    for _ in until():
        children = Path(f"/proc/{build.pid}/task/{build.pid}/children").read_text().split()
        if len(children) == 2 and len(list(Path(".x.building.units").glob("unit_*"))) == 1:
            return [int(child) for child in children]
    raise AssertionError


def until():
    """Yield forever, with a short pause after each iteration. If the caller does not leave the loop, the time limit of
    the test ends it.
    """
    while True:
        yield
        time.sleep(0.02)


def wait_for_end(pids: list[int]) -> None:
    for _ in until():
        if not any(is_alive(pid) for pid in pids):
            return


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_the_workers_of_a_killed_build_exit(held, sent):
    build = held()
    workers = workers_of(build)
    build.send_signal(sent)
    assert build.wait() == -sent
    wait_for_end(workers)
    assert ".x.building.units" in left_beside(Path("x"))


def test_ctrl_c_ends_at_once_with_one_line_and_keeps_the_units(held):
    build = held()
    workers = workers_of(build)
    build.send_signal(signal.SIGINT)
    out, err = build.communicate()
    assert (out, without_notes(err)) == ("", "chatmill: stopped; continue with --resume\n")
    assert build.returncode == 130
    wait_for_end(workers)
    assert left_beside(Path("x")) == [".x.building.units"]
    kept = sorted(path.name for path in Path(".x.building.units").iterdir())
    assert kept == ["job.json", "unit_000000_0000.rows"]


def test_a_killed_worker_is_reported_in_one_line_and_the_units_are_kept(held):
    build = held()
    workers = workers_of(build)
    os.kill(workers[0], signal.SIGKILL)
    out, err = build.communicate()
    assert (out, build.returncode) == ("", 1)
    assert without_notes(err) == (
        "chatmill: a worker process was killed, perhaps because memory ran out; "
        "continue with --resume and fewer --workers\n"
    )
    wait_for_end(workers)
    assert left_beside(Path("x")) == [".x.building.units"]


def test_a_second_build_of_the_same_target_is_refused_in_one_line(held):
    first = held()
    workers_of(first)
    before = sorted(Path(".x.building.units").iterdir())
    for _ in range(2):
        second = held()
        assert second.communicate() == (
            "",
            "chatmill: x: another process is building this dataset; wait until it has finished\n",
        )
        assert second.returncode == 1
    assert sorted(Path(".x.building.units").iterdir()) == before
    assert ".x.building.lock" in left_beside(Path("x"))


def test_a_fault_does_not_wait_for_later_units(held):
    Path("a.jsonl").write_bytes(lines(conversations(3)) + b"{}\n")
    build = held()
    out, err = build.communicate()
    assert (out, build.returncode, err.count("\n")) == ("", 1, 1)
    assert err.startswith("chatmill: a.jsonl:4: ")
    assert left_beside(Path("x")) == []
