"""Test that a Ray cluster whose nodes share only an object store writes the same bytes as one process.

Each node has a separate working, temporary and home folder. An audit hook in every process of a node denies access to
the folder of the Ray driver.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from prepare_fixtures import WORDS, build, job_of, lines

from chatmill.prepare.cluster_build import ClusterBuild
from chatmill.prepare.pipeline import prepare_dataset
from chatmill.prepare.ray_engine import RayEngine
from chatmill.remote import objects
from chatmill.store.layout import METADATA
from chatmill.store.metadata import listed_files

ray = pytest.importorskip("ray")
Cluster = pytest.importorskip("ray.cluster_utils").Cluster

MARK = "CHATMILL_TEST_NODE"
REFUSE = """
import os, sys

def refuse(event, arguments):
    if event in ("open", "os.listdir", "os.scandir", "os.chdir", "os.mkdir") and arguments:
        try:
            path = os.path.abspath(os.fsdecode(arguments[0]))
        except TypeError:
            return
        if path == OTHERS or path.startswith(OTHERS + "/"):
            raise PermissionError(13, "a folder of another machine", path)

OTHERS = {others!r}
sys.addaudithook(refuse)
"""
QUICK = {
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_failure_threshold": "6",
    "RAY_usage_stats_enabled": "0",
}


class Nodes:
    """The nodes of a Ray cluster, by number. Node 0 is the head node, which runs no tasks."""

    def __init__(self, folder: Path, driver: Path) -> None:
        self._folder, self._driver = folder, driver
        # Ray's sockets are in this folder, and socket paths must be short.
        memory = "/dev/shm"
        self._sockets = tempfile.mkdtemp(prefix="ray", dir=memory if os.access(memory, os.W_OK) else "/tmp")
        self._cluster = Cluster(shutdown_at_exit=False)
        self.started: list[int] = []

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def start(self) -> None:
        number, folder = len(self.started), self._folder / f"node{len(self.started)}"
        self.started.append(number)
        for name in ("site", "tmp/ray", "home", "here"):
            (folder / name).mkdir(parents=True)
        (folder / "site" / "sitecustomize.py").write_text(REFUSE.format(others=str(self._driver)))
        of_head = {"include_dashboard": False, "temp_dir": self._sockets} if number == 0 else {}
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder / "here")
            patch.setenv("PYTHONPATH", os.pathsep.join([str(folder / "site"), *filter(None, sys.path)]))
            patch.setenv("TMPDIR", str(folder / "tmp"))
            patch.setenv("HOME", str(folder / "home"))
            patch.setenv(MARK, f"{os.getpid()}.{number}")
            for name, value in QUICK.items():
                patch.setenv(name, value)
            self._cluster.add_node(wait=number == 0, num_cpus=int(number > 0), **of_head)

    def wait(self) -> None:
        self._cluster.wait_for_nodes()

    def kill(self, number: int) -> int:
        own, parents, marked = f"{MARK}={os.getpid()}.{number}".encode(), {}, set()
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if own in (entry / "environ").read_bytes().split(b"\0"):
                    marked.add(int(entry.name))
        # Ray's agents set a process title, which overwrites the marker variable in their environment, so the agents are
        # found by their parent processes.
        while below := {pid for pid, parent in parents.items() if parent in marked} - marked:
            marked |= below
        for pid in marked:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return len(marked)

    def logs(self) -> str:
        files = sorted(Path(self._sockets).rglob("logs/gcs_server*"))
        return "\n".join(f"{file.name}: {file.read_text(errors='replace')[-3000:]}" for file in files)

    def end(self) -> None:
        ray.shutdown()
        for number in self.started:
            while self.kill(number):
                time.sleep(0.05)
        for node in filter(None, (self._cluster.head_node, *self._cluster.worker_nodes)):
            node.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)
        shutil.rmtree(self._sockets, ignore_errors=True)


@contextmanager
def cluster(folder: Path, driver: Path, workers: int) -> Iterator[Nodes]:
    nodes = started_head(folder, driver)
    try:
        for _ in range(workers):
            nodes.start()
        nodes.wait()
        yield nodes
    finally:
        nodes.end()


def started_head(folder: Path, driver: Path) -> Nodes:
    """Start the head node of a Ray cluster; retry if Ray times out on a busy machine."""
    for attempt in range(4):
        nodes = Nodes(folder / f"cluster{attempt}", driver)
        try:
            nodes.start()
            return nodes
        except Exception as error:
            logs = nodes.logs()
            nodes.end()
            if attempt == 3 or "Timed out" not in str(error):
                raise RuntimeError(logs) from error
    raise AssertionError


def long_conversations(count: int) -> list[dict]:
    rng = random.Random(3)
    texts = ["".join(rng.choices(WORDS, k=150)) for _ in range(20)]
    return [
        {"messages": [{"role": role, "content": rng.choice(texts)} for role in ("user", "assistant") * 2]}
        for _ in range(count)
    ]


def test_nodes_without_shared_files_write_the_same_bytes_as_one_process(s3, tmp_path, monkeypatch):
    driver, bucket = tmp_path / "driver", s3.bucket()
    driver.mkdir()
    monkeypatch.chdir(driver)
    records = long_conversations(240)
    for name, part in (("a.jsonl", records[:150]), ("b.jsonl", records[150:] + records[:20])):
        (driver / name).write_bytes(lines(part))
        objects.write(bucket / "chat" / name, lines(part))
    options = {"pack": 4000, "dedupe": True, "val_split": 0.1, "shard_tokens": 100_000}
    build(job_of(("a.jsonl", "b.jsonl"), **options), driver / "one")
    expected = (driver / "one" / METADATA).read_bytes()

    moved, killed = [], []
    read, write, staged = objects.read, objects.write, ClusterBuild.staged

    def counted_read(url, *args):
        data = read(url, *args)
        moved.extend([len(data)] * str(url).startswith(str(target)))
        return data

    def counted_heads(build, unit, done, *args):
        moved.extend(map(len, done.heads))
        return staged(build, unit, done, *args)

    monkeypatch.setattr(objects, "read", counted_read)
    monkeypatch.setattr(objects, "write", lambda url, data, **how: (moved.append(len(data)), write(url, data, **how)))
    monkeypatch.setattr(ClusterBuild, "staged", counted_heads)

    def kill_a_node(progress):
        if not killed and progress.step == "render" and progress.done > progress.total / 4:
            killed.append(nodes.kill(2))

    target = bucket / "v1"
    with cluster(tmp_path, driver, 2) as nodes:
        job = job_of((str(bucket / "chat" / "*.jsonl"),), **options)
        engine = RayEngine(address=nodes.address)
        metadata = prepare_dataset(job, str(target), engine=engine, unit_bytes=60_000, on_progress=kill_a_node)
    assert killed[0] > 1
    assert read(target / METADATA) == expected
    assert len(metadata.splits["train"].shards) > 4
    stored = {info.sha256: info.size for _, info in listed_files(metadata)}
    for sha256 in stored:
        assert hashlib.sha256(read(target / "objects" / sha256)).hexdigest() == sha256
    assert objects.names_below(target / "staging") == []
    # This process transfers only the metadata and, of each staged object, the part that precedes its tokens and spans.
    assert 0 < sum(moved) < 0.05 * sum(stored.values())
    assert sorted(path.name for path in driver.iterdir()) == ["a.jsonl", "b.jsonl", "one"]
