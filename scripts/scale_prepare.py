"""Measure the parallel and serial parts of `prepare`, for the table under "Preparing" in docs/explanation/scale.md.

    python scripts/scale_prepare.py [--conversations 50000] [--tokenizer FILE] [--ray] [--json]

Each input conversation is made by joining several from data/conversations.jsonl. With `--ray`, the dataset is also
built on a local Ray cluster of `--workers` CPUs, and written to a local S3 server (moto). All times are in seconds: the
elapsed time, and the CPU time of the main process.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from chatmill.prepare import assemble, cluster_build, pipeline
from chatmill.prepare.engine import Engine, LocalEngine
from chatmill.prepare.job import InputSource, Job
from chatmill.prepare.ray_engine import RayEngine
from chatmill.remote import objects
from chatmill.remote.urls import Url

ROOT = Path(__file__).resolve().parents[1]
SERVER = """
import logging, sys
from moto.server import ThreadedMotoServer
logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""
Times = dict[str, list[float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=50_000)
    parser.add_argument("--tokenizer", default="bytes", help="a tokenizer file (default: bytes)")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--pack", type=int, help="pack rows")
    parser.add_argument("--unit-bytes", type=int, default=pipeline.UNIT_BYTES, help="number of input bytes per unit")
    parser.add_argument("--ray", action="store_true", help="also measure on Ray, with an object store")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_corpus(folder / "chat.jsonl", args.conversations)
        os.chdir(folder)
        found = {"local": build(args, "chat.jsonl", folder / "local", LocalEngine(args.workers))}
        if args.ray:
            with bucket() as url:
                objects.upload(url / "chat.jsonl", folder / "chat.jsonl")
                found["ray"] = build(args, str(url / "chat.jsonl"), url / "v1", RayEngine(args.workers))
    if args.json:
        print(json.dumps(found))
        return
    print(f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, {args.conversations:,} conversations")
    for name, measured in found.items():
        read = measured["bytes read in this process"]
        print(f"\n{name}: {measured['tokens']:,} tokens, {read:,} bytes read from the object store by this process")
        for part, (passed, cpu) in measured["seconds"].items():
            print(f"  {part:<28}{passed:>9.2f} s{cpu:>9.2f} s CPU")


def write_corpus(path: Path, count: int) -> None:
    rng = random.Random(0)
    known = [json.loads(line)["messages"] for line in (ROOT / "data" / "conversations.jsonl").open()]
    with path.open("w") as file:
        for number in range(count):
            messages = [
                dict(message) for some in rng.choices(known, k=12) for message in some if message["role"] != "system"
            ]
            messages[0]["content"] = f"{number}: {messages[0]['content']}"
            file.write(json.dumps({"messages": messages}) + "\n")


@contextmanager
def bucket() -> Iterator[Url]:
    """Start an S3 server, and yield the URL of a new bucket, which child processes can also use."""
    import urllib.request

    with subprocess.Popen([sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        endpoint = f"http://127.0.0.1:{int(server.stdout.readline())}"
        names = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1"}
        os.environ.update({"AWS_ENDPOINT_URL": endpoint, **names})
        urllib.request.urlopen(urllib.request.Request(f"{endpoint}/scale", method="PUT")).close()
        try:
            yield Url("s3://scale")
        finally:
            server.kill()


def build(args: argparse.Namespace, name: str, target: Path | Url, engine: Engine) -> dict[str, Any]:
    job = Job(
        (InputSource((name,), "messages"),),
        tokenizer=args.tokenizer,
        format="chatml",
        add_tokens=True,
        pack=args.pack,
        dedupe=True,
        val_split=0.05,
    )
    times: Times = {}
    read: list[int] = []
    original = objects.read

    def counted(url: Url, *where: Any) -> bytes:
        data = original(url, *where)
        read.append(len(data))
        return data

    parts: dict[str, tuple[Any, str]] = {
        "plan units": (pipeline, "units_of"),
        "render (parallel)": (pipeline, "_render"),
    }
    on_ray = isinstance(engine, RayEngine)
    parts |= {"dedupe and split": (pipeline, "choose"), "plan shards": (assemble, "plan_shards")}
    if on_ray:
        parts |= {
            "plan and write shards": (engine, "write_shards"),
            "metadata": (pipeline, "publish_remote"),
            "remove staged objects": (cluster_build.ClusterBuild, "remove_units"),
        }
    else:
        parts |= {
            "plan and write shards": (pipeline, "assemble_by_shard"),
            "gather, hash and write rows": (pipeline, "assemble"),
            "sync and rename": (pipeline, "publish"),
        }
    kept = [(owner, attribute, getattr(owner, attribute)) for owner, attribute in parts.values()]
    for part, (owner, attribute) in parts.items():
        setattr(owner, attribute, timed(times.setdefault(part, [0.0, 0.0]), getattr(owner, attribute)))
    objects.read = counted
    began = now()
    try:
        metadata = pipeline.prepare_dataset(job, target, engine=engine, unit_bytes=args.unit_bytes)
    finally:
        objects.read = original
        for owner, attribute, work in kept:
            setattr(owner, attribute, work)
    times["all"] = [after - before for before, after in zip(began, now(), strict=True)]
    tokens = sum(split.num_tokens for split in metadata.splits.values())
    return {"tokens": tokens, "bytes read in this process": sum(read), "seconds": times, "sha256": metadata.sha256}


def now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def timed(into: list[float], work: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function or generator to add its elapsed and CPU seconds to `into`."""

    def add(began: tuple[float, float]) -> None:
        for at, (before, after) in enumerate(zip(began, now(), strict=True)):
            into[at] += after - before

    def steps(generator: Any) -> Any:
        try:
            while True:
                began = now()
                try:
                    value = next(generator)
                except StopIteration:
                    return
                finally:
                    add(began)
                yield value
        finally:
            generator.close()

    def run(*args: Any, **options: Any) -> Any:
        began = now()
        result = work(*args, **options)
        add(began)
        return steps(result) if hasattr(result, "__next__") else result

    return run


if __name__ == "__main__":
    main()
