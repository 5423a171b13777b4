"""Compare the time to prepare a dataset on two cores and on all cores, with one process per core.

    python benchmarks/cores.py                   use two cores and all cores; prepare 500,000 conversations
    python benchmarks/cores.py --cores 2 4 8     use these numbers of cores

The input is 50,000 conversations, repeated `--times` times and packed into rows of 4096 tokens. Start-up time is
excluded. All builds must write the same bytes. *Serial* is the CPU time of the main process,
which plans the shards, collects the results of units and removes the staged files.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from corpus import add_options, chosen, grown
from measure import machine, report, versions

from chatmill.format import Renderer
from chatmill.prepare.engine import LocalEngine
from chatmill.prepare.job import InputSource, Job
from chatmill.prepare.pipeline import prepare_dataset
from chatmill.prepare.progress import BuildProgress
from chatmill.prepare.unit import job_renderer

PACK = 4096
FEW, TIMES = 2, 5.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    everything = sorted(os.sched_getaffinity(0))
    parser.add_argument("--cores", type=int, nargs="+", default=[FEW, len(everything)])
    parser.add_argument("--times", type=int, default=10, help="number of times the conversations are repeated")
    parser.add_argument("--runs", type=int, default=2, help="number of runs; the fastest run is reported")
    parser.add_argument("--folder", type=Path, help="folder for the input and the dataset, such as /dev/shm")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    data = chosen(args)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        path = grown(data.path, Path(folder), lines=data.conversations, times=args.times)
        job = Job((InputSource((str(path),)),), tokenizer=str(data.tokenizer), pack=PACK)
        renderer = job_renderer(job)
        found = {}
        for count in sorted({*args.cores}):
            os.sched_setaffinity(0, everything[:count])
            found[str(count)] = min(
                (build(job, renderer, Path(folder), count) for _ in range(args.runs)), key=lambda run: run["seconds"]
            )
        os.sched_setaffinity(0, everything)
    if len(hashes := {run["sha256"] for run in found.values()}) > 1:
        raise SystemExit(f"the datasets differ: {hashes}")
    slowest = found[min(found, key=int)]
    figures = {
        "conversations": args.times * data.conversations,
        "tokens": slowest["tokens"],
        "runs": found,
        "times": {count: slowest["seconds"] / run["seconds"] for count, run in found.items()},
        "versions": versions("tokenizers", "numpy"),
    }
    lines = [
        (
            f"{count} cores",
            f"{run['seconds']:.2f} s, {run['tokens'] / run['seconds'] / 1e6:.1f} Mtok/s, "
            f"speedup {figures['times'][count]:.2f}; rendering {run['render_s']:.2f} s; "
            f"serial {run['serial_s']:.2f} s, {run['serial_share']:.1%} of all CPU time",
        )
        for count, run in found.items()
    ]
    title = f"preparing {figures['conversations']:,} conversations; {machine('tokenizers', 'numpy')}"
    report(title, lines, figures, as_json=args.json)
    return 0 if max(map(int, found)) < 16 or figures["times"][max(found, key=int)] >= TIMES else 1


def build(job: Job, renderer: Renderer, folder: Path, workers: int) -> dict[str, Any]:
    shutil.rmtree(folder / "dataset", ignore_errors=True)
    os.sync()
    rendered = 0.0

    def on_progress(progress: BuildProgress) -> None:
        nonlocal rendered
        if progress.step == "render":
            rendered = time.perf_counter()

    before, began = times(), time.perf_counter()
    metadata = prepare_dataset(
        job, folder / "dataset", engine=LocalEngine(workers), renderer=renderer, on_progress=on_progress
    )
    seconds = time.perf_counter() - began
    own, others = (after - start for after, start in zip(times(), before, strict=True))
    return {
        "seconds": seconds,
        "render_s": rendered - began,
        "serial_s": own,
        "serial_share": own / (own + others),
        "tokens": sum(split.num_tokens for split in metadata.splits.values()),
        "sha256": metadata.sha256,
    }


def times() -> tuple[float, float]:
    """Return the CPU time of this process, and of its child processes that have ended."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    own, others = (each.ru_utime + each.ru_stime for each in used)
    return own, others


if __name__ == "__main__":
    sys.exit(main())
