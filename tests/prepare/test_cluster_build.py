"""Test cluster builds with all tasks in this process.

`test_ray_nodes` runs the tasks on Ray nodes without a shared file system.
"""

from __future__ import annotations

import hashlib
from contextlib import contextmanager
from itertools import count

import pytest
from prepare_fixtures import JOBS, build, conversations, job_of, lines, write_corpus

from chatmill.errors import DataError, RecordError
from chatmill.prepare import ray_engine
from chatmill.prepare.pipeline import prepare_dataset
from chatmill.prepare.ray_engine import RayEngine
from chatmill.remote import objects
from chatmill.remote.objects import RemoteError
from chatmill.remote.urls import Url
from chatmill.store.layout import METADATA
from chatmill.store.metadata import listed_files

NUMBERS = count()


class TasksHere(RayEngine):
    @contextmanager
    def connected(self):
        yield None

    def num_cpus(self):
        return 1

    def _in_order(self, work, items, shared):
        for item in items:
            yield work(item, shared)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> tuple[str, ...]:
    return write_corpus(tmp_path_factory.mktemp("corpus"), 300)


@pytest.fixture
def target() -> Url:
    return Url(f"memory://bucket{next(NUMBERS)}/v1")


def names_below(target: Url) -> list[str]:
    return [url.name for url in objects.names_below(target / "staging")]


@pytest.mark.parametrize("name", ["plain", "windows", "blocks", "shuffle", "all at once", "unroll"])
def test_shards_written_by_tasks_equal_those_of_one_process(tmp_path, inputs, target, name):
    job = job_of(inputs, **JOBS[name])
    build(job, tmp_path / "one")
    metadata = prepare_dataset(job, target, engine=TasksHere(), unit_bytes=9_000)
    assert objects.read(target / METADATA) == (tmp_path / "one" / METADATA).read_bytes()
    for _, info in listed_files(metadata):
        assert hashlib.sha256(objects.read(target / "objects" / info.sha256)).hexdigest() == info.sha256
    assert names_below(target) == []


def test_a_resumed_build_uses_the_objects_of_finished_units(tmp_path, inputs, target, monkeypatch):
    job = job_of(inputs, **JOBS["all at once"])
    build(job, tmp_path / "one")
    run_unit, ran = ray_engine.run_unit, []

    def failing(unit, *args):
        if unit.number == 5:
            raise RemoteError("s3://bucket/x: cannot be read")
        ran.append(unit.number)
        return run_unit(unit, *args)

    monkeypatch.setattr(ray_engine, "run_unit", failing)
    options = {"engine": TasksHere(), "unit_bytes": 9_000}
    with pytest.raises(RemoteError):
        prepare_dataset(job, target, **options)
    assert ran == [0, 1, 2, 3, 4]
    assert len(names_below(target)) == 5
    assert objects.find(target / METADATA) is None
    monkeypatch.setattr(ray_engine, "run_unit", lambda unit, *args: (ran.append(unit.number), run_unit(unit, *args))[1])
    prepare_dataset(job, target, resume=True, **options)
    assert len(ran) > 6
    assert ran == [*range(len(ran))]
    assert objects.read(target / METADATA) == (tmp_path / "one" / METADATA).read_bytes()
    assert names_below(target) == []


def test_bad_input_leaves_no_staged_object(tmp_path, target):
    (tmp_path / "a.jsonl").write_bytes(lines(conversations(60)) + b"{}\n")
    with pytest.raises(RecordError, match=r"a\.jsonl:61"):
        prepare_dataset(job_of((str(tmp_path / "a.jsonl"),)), target, engine=TasksHere(), unit_bytes=3_000)
    assert objects.names_below(target) == []


def test_a_folder_missing_on_a_node_is_reported_in_one_line(tmp_path):
    with pytest.raises(DataError, match=r"gone: not accessible on the node .* \(No such file or directory\); use URLs"):
        ray_engine._enter(tmp_path / "gone")
