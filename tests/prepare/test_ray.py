from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from prepare_fixtures import JOBS, build, conversations, digests, job_of, left_beside, lines, write_corpus

from chatmill.errors import ChatmillError, RecordError
from chatmill.prepare import ray_engine
from chatmill.prepare.job import Filters, InputSource, Job
from chatmill.prepare.pipeline import prepare_dataset
from chatmill.prepare.ray_engine import RayEngine

ray = pytest.importorskip("ray")


@pytest.fixture(scope="module")
def cluster():
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> tuple[str, ...]:
    return write_corpus(tmp_path_factory.mktemp("corpus"), 300)


@pytest.mark.parametrize("name", ["plain", "blocks", "all at once"])
def test_a_cluster_writes_the_same_bytes_as_one_process(cluster, tmp_path, inputs, name):
    job = job_of(inputs, **JOBS[name])
    build(job, tmp_path / "one")
    prepare_dataset(job, tmp_path / "ray", engine=RayEngine(), unit_bytes=9_000)
    assert digests(tmp_path / "ray") == digests(tmp_path / "one")
    assert left_beside(tmp_path / "ray") == []


def test_a_cluster_writes_the_same_bytes_as_one_process_for_a_recipe(cluster, tmp_path, inputs):
    long = " ".join(f"word{number}" for number in range(60))
    texts = [f"{long} {number}" for number in range(30)] + ["zebra"]
    similar = [
        {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": text}]} for text in texts
    ]
    (tmp_path / "similar.jsonl").write_bytes(lines(similar))
    job = Job(
        tuple(
            InputSource((str(path),), name=f"source {number}", epochs=1.0 + number, max_samples=40)
            for number, path in enumerate([tmp_path / "similar.jsonl", *inputs[:2]])
        ),
        near_dedupe=0.7,
        filters=Filters(min_tokens=90, no_match="zebra"),
        precedence=("source 1",),
        pack=2000,
    )
    build(job, tmp_path / "one")
    prepare_dataset(job, tmp_path / "ray", engine=RayEngine(), unit_bytes=9_000)
    assert digests(tmp_path / "ray") == digests(tmp_path / "one")
    reasons = {json.loads(line)["reason"] for line in (tmp_path / "ray" / "removed.jsonl").read_text().splitlines()}
    assert reasons >= {"filter no_match", "filter min_tokens", "near_duplicate", "max_samples"}


ORIGINAL = ray_engine._run


def test_faults_on_workers_are_raised_unchanged_and_leave_no_files(cluster, tmp_path, monkeypatch):
    """File names in errors are relative to the working directory of the command, not to that of the workers."""
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_bytes(lines(conversations(60)) + b"{}\n" + lines(conversations(60)))
    with pytest.raises(RecordError) as error:
        prepare_dataset(job_of(("a.jsonl",)), Path("x"), engine=RayEngine(), unit_bytes=3_000)
    assert (error.value.file, error.value.line) == ("a.jsonl", 61)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl"]


def test_a_full_disk_on_a_worker_is_reported_in_one_line_and_the_units_are_kept(cluster, tmp_path, inputs, monkeypatch):
    def run(unit, shared):
        if unit.number == 3:
            raise OSError(28, "No space left on device", "unit")
        return ORIGINAL(unit, shared)

    job = job_of(inputs)
    monkeypatch.setattr(ray_engine, "_run", run)
    with pytest.raises(
        ChatmillError,
        match=r"^unit: No space left on device, so the dataset was not written; free disk space and continue",
    ):
        prepare_dataset(job, tmp_path / "x", engine=RayEngine(), unit_bytes=9_000)
    assert left_beside(tmp_path / "x") == [".x.building.units"]
    monkeypatch.undo()
    prepare_dataset(job, tmp_path / "x", engine=RayEngine(), unit_bytes=9_000, resume=True)
    build(job, tmp_path / "one")
    assert digests(tmp_path / "x") == digests(tmp_path / "one")


def test_the_command_starts_a_cluster_and_ends_it(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines(conversations(60)))
    command = [sys.executable, "-c", "from chatmill.cli.main import main; main()", "prepare", "a.jsonl", "--json"]
    command += ["--tokenizer", "bytes"]
    # Use token authentication, which is Ray's default; conftest.py disables it for the other tests.
    environment = {name: value for name, value in os.environ.items() if name != "RAY_AUTH_MODE"}
    hashes = []
    for flags in (["-o", "x", "--engine", "ray", "--workers", "2"], ["-o", "y"]):
        done = subprocess.run(
            [*command, *flags], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        # Ray prints a line about its token, and a slow build prints progress.
        others = [
            line for line in done.stderr.splitlines() if not line.startswith(("Token authentication", "render: "))
        ]
        assert (done.returncode, others) == (0, [])
        hashes.append(json.loads(done.stdout)["sha256"])
    assert hashes[0] == hashes[1]
