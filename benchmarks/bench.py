"""Run every benchmark, each in a separate process, and write the results page.

    make bench                        run all benchmarks; write benchmarks.md, its chart and flame graphs
    make bench ARGS=--quick           use small sizes; write the page to benchmarks/.results/quick
    make bench ARGS="--only load"     run one benchmark; write the page from its results and earlier ones
    make bench ARGS="--gpu"           also measure training on a GPU; `--gpu FILE ...` instead reads
                                      the results of `python benchmarks/train.py --results FILE`
    make bench ARGS="--input chat.jsonl --tokenizer tokenizer.json"

The results of each benchmark are kept as JSON under benchmarks/.results.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from chart import chart
from flame import flame_graph
from gpu import keep, kept
from lines import Results
from measure import processor
from page import page
from targets import missed

HERE = Path(__file__).resolve().parent
DOCS, RESULTS = HERE.parent / "docs" / "explanation", HERE / ".results"
BUSY = 0.5
"""Timings are not reliable if the load average of the last minute is above this limit."""


class Step(NamedTuple):
    name: str
    script: str
    takes_data: bool
    full: tuple[object, ...]
    quick: tuple[object, ...]


DATA = str(HERE / ".data")
STEPS = [
    Step("data", "corpus.py", True, (), ()),
    Step("render", "render.py", True, ("--runs", 7), ("--runs", 2, "--peer-rows", 100)),
    Step(
        "template",
        "render.py",
        True,
        ("--format", "template", "--runs", 5, "--peer-rows", 500),
        ("--format", "template", "--runs", 2, "--peer-rows", 100),
    ),
    Step("pack", "pack.py", False, ("--runs", 7), ("--runs", 2, "--rows", 50_000)),
    Step("prepare", "prepare.py", True, ("--runs", 4), ("--runs", 1)),
    Step(
        "prepare_template",
        "prepare.py",
        True,
        ("--format", "template", "--runs", 4),
        ("--format", "template", "--runs", 1),
    ),
    Step("cores", "cores.py", True, (), ("--times", 2, "--runs", 1)),
    Step("startup", "startup.py", True, (), ("--runs", 2)),
    Step("near", "near_dedupe.py", False, (), ("--records", 5_000, "--peer-records", 5_000)),
    Step("load", "load.py", True, ("--billion", "--runs", 31), ("--billion", "--runs", 2)),
    Step("mix", "mix.py", False, (), ("--rows", 20_000)),
    Step("certify", "templates.py", False, (), ("--first", 4)),
    Step("open", "open.py", False, ("--folder", DATA), ("--folder", DATA, "--episodes", 200_000)),
    Step(
        "remote",
        "remote.py",
        False,
        ("--folder", DATA, "--runs", 5),
        ("--folder", DATA, "--runs", 1, "--megabytes", 40),
    ),
    Step("rollout", "rollout.py", False, ("--runs", 5), ("--runs", 2, "--targets", 20)),
    Step("growth", "growth.py", True, (), ()),
    Step("view", "view.py", False, ("--folder", DATA), ("--folder", DATA, "--episodes", 20_000)),
    Step("profiles", "profiles.py", True, (), ()),
]
QUICK = ("--conversations", 2_000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="use small sizes and do not write to docs/")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=[step.name for step in STEPS],
        help="run only these benchmarks and keep the earlier results of the others",
    )
    parser.add_argument("--page", action="store_true", help="write the page from earlier results without measuring")
    parser.add_argument(
        "--gpu",
        nargs="*",
        type=Path,
        metavar="FILE",
        help="include training: measure it on this machine, or read results from FILE",
    )
    parser.add_argument("--input", type=Path, help="use your own conversations: JSON lines with plain-text messages")
    parser.add_argument("--tokenizer", type=Path, help="use your own tokenizer.json, which must have the ChatML tokens")
    args = parser.parse_args()
    for name in ("input", "tokenizer"):
        if (file := getattr(args, name)) and not file.is_file():
            parser.error(f"--{name} {file}: no such file")
    results = RESULTS / "quick" if args.quick else RESULTS
    results.mkdir(parents=True, exist_ok=True)
    Path(DATA).mkdir(exist_ok=True)
    if not args.page:
        own = [word for name in ("input", "tokenizer") if (file := getattr(args, name)) for word in (f"--{name}", file)]
        measure(args.only, own, results, quick=args.quick)
    if args.gpu is not None:
        training(args.gpu, results)
    found = read(results)
    whole = not (absent := [step.name for step in STEPS if step.name not in found])
    if not whole and not args.quick:
        print(f"the page is not written: run the missing benchmarks {', '.join(absent)}", file=sys.stderr)
    for path in write(found, results if args.quick else DOCS, whole=whole or args.quick):
        print(f"written: {os.path.relpath(path)}", file=sys.stderr)
    for what in missed(found):
        print(f"missed: {what}", file=sys.stderr)


def measure(only: list[str] | None, own: list[object], results: Path, *, quick: bool) -> None:
    began, waiting = time.monotonic(), os.getloadavg()[0]
    if waiting > BUSY:
        print(f"the machine is busy (load {waiting:.1f}): measured speeds will be too low", file=sys.stderr)
    for step in STEPS:
        if only and step.name not in only:
            continue
        words: list[object] = [*(step.quick if quick else step.full), *(own if step.takes_data else ())]
        if quick and step.takes_data:
            words = [*QUICK, *words]
        with announced(step.name):
            found = run(step.script, words)
        (results / f"{step.name}.json").write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    if not only:
        about = {**this_machine(), "load": waiting, "seconds": time.monotonic() - began, "quick": quick}
        (results / "machine.json").write_text(json.dumps(about, indent=1) + "\n", "utf-8")


def run(script: str, words: list[object]) -> Any:
    """Run a benchmark and return the JSON that it prints. A benchmark that misses a target exits with code 1."""
    command = [sys.executable, str(HERE / script), *map(str, words)]
    if script != "corpus.py":
        command.append("--json")
    # Without HF_HUB_OFFLINE, the peers look for files on the network.
    quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=os.environ | quiet, check=False)
    try:
        return json.loads(done.stdout.strip().rsplit("\n", 1)[-1])
    except ValueError:
        raise SystemExit(
            f"{' '.join(command)}: printed no results and exited with code {done.returncode}; run it to see the error"
        ) from None


@contextmanager
def announced(name: str) -> Iterator[None]:
    print(f"{name} …", file=sys.stderr, flush=True)
    began = time.monotonic()
    yield
    print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)


def training(files: list[Path], results: Path) -> None:
    """Store the GPU results that `files` contain. If `files` is empty, run the GPU benchmark first."""
    if not files:
        files = [results / "train.jsonl"]
        with announced("training"):
            # train.py exits with 1 if a target is missed, after it has written its results.
            command = [sys.executable, str(HERE / "train.py"), "--results", str(files[0]), "--warm"]
            subprocess.run(command, check=False)
    keep(files)


def read(results: Path) -> Results:
    found = {path.stem: json.loads(path.read_text("utf-8")) for path in sorted(results.glob("*.json"))}
    return {**found, "gpu": kept()}


def write(found: Results, out: Path, *, whole: bool) -> list[Path]:
    """Write the flame graphs. If `whole` is true, also write the results page and its chart."""
    earlier = out / "benchmarks.md"
    before = earlier.read_text("utf-8") if earlier.is_file() else ""
    texts = {"benchmarks.md": page(found, before), "benchmarks.svg": chart(found)} if whole else {}
    for part in found.get("profiles", {}).get("parts", []):
        texts[f"flame-{part['name']}.svg"] = flame_graph(part["title"], part["stacks"])
    for name, text in texts.items():
        (out / name).write_text(text, "utf-8")
    return [out / name for name in texts]


def this_machine() -> dict[str, Any]:
    memory = Path("/proc/meminfo").read_text().split("MemTotal:")[1].split()[0]
    return {
        "cores": len(os.sched_getaffinity(0)),
        "processor": processor(),
        "memory": int(memory) * 1024,
        "python": platform.python_version(),
        "day": datetime.now(UTC).date().isoformat(),
    }


if __name__ == "__main__":
    main()
