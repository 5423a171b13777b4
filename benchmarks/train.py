"""Measure training speed and memory on one GPU, compared with the fastest setup of the Hugging Face libraries.

    python benchmarks/train.py --results FILE            measure the configurations that FILE does not contain yet
    python benchmarks/train.py --results FILE --only 4b  measure only the 4B model; --list shows all configurations
    python benchmarks/train.py --results FILE --warm     compile all kernels first, several models at a time
    python benchmarks/train.py --results FILE --report   print the results without measuring

Conversation lengths are lognormal, with a mean of about 600 tokens and a maximum of 4096. The loss mask includes about
60 percent of the tokens. chatmill packs the conversations into rows of 4096 tokens and trains on them; the Hugging Face
libraries train on the same batches. Each configuration runs once, in its own process, and its result is appended to
FILE as a line of JSON. The script requires numpy, torch, safetensors and transformers. The comparison with the Hugging
Face libraries also requires liger_kernel, peft and bitsandbytes. `--small` runs the script with tiny models on any
machine. The script exits with 1 if a result misses its target.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

import train_ours  # noqa: E402
import train_peers  # noqa: E402
from train_data import Trial, operations, write_dataset  # noqa: E402
from train_lines import TRAIN_LINES, TrainLine, chosen  # noqa: E402
from train_report import measured, read_results, report  # noqa: E402

LAYERS = 2
"""Number of layers in models that are only compiled."""
PATIENCE = 3.0
"""A configuration times out after this multiple of its estimated time, plus two minutes."""
UNFINISHED = "not finished after"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, metavar="FILE", help="file of results; new results are appended")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="measure only configurations with these names or prefixes"
    )
    parser.add_argument(
        "--again", action="store_true", help="also measure configurations that already have a result in FILE"
    )
    parser.add_argument("--list", action="store_true", help="list the configurations and their estimated times")
    parser.add_argument(
        "--budget", type=float, metavar="SECONDS", help="skip configurations that would not finish within this budget"
    )
    parser.add_argument(
        "--warm", type=int, nargs="?", const=10, metavar="N", help="first compile the selected models, N at a time"
    )
    parser.add_argument("--report", action="store_true", help="print the results in FILE without measuring")
    parser.add_argument("--small", action="store_true", help="use tiny models, on the CPU if no GPU is available")
    parser.add_argument("--folder", type=Path, help="folder for temporary data and runs")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--layers", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return work(args)
    if args.only and (unknown := [name for name in args.only if not chosen([name])]):
        parser.error(f"--only {unknown[0]}: no configuration has this name or prefix; use --list to see all names")
    if args.list:
        for line in chosen(args.only):
            print(f"{line.name:<32}{line.estimate:>5.0f} s  {line.precision!s:<32}{line.what}")
        return 0
    if args.results is None:
        parser.error("pass --results FILE, the file that stores the results")
    if not args.report:
        if not torch.cuda.is_available() and not args.small:
            print("no GPU found; use --small to run tiny models on the CPU", file=sys.stderr)
            return 1
        with tempfile.TemporaryDirectory(dir=args.folder, prefix="train-bench-") as folder:
            measure(args, Path(folder))
    return report(read_results([args.results]))


def measure(args: argparse.Namespace, folder: Path) -> None:
    """Measure the selected configurations that have no result yet, until the time budget is used up."""
    ends = time.monotonic() + args.budget if args.budget else math.inf
    known = read_results([args.results])
    lines = [line for line in chosen(args.only) if args.again or line.name not in known]
    # All processes share one cache of compiled kernels.
    caches = folder.parent if args.folder is None else args.folder
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(caches / "train-bench-cache" / "inductor"))
    os.environ.setdefault("TRITON_CACHE_DIR", str(caches / "train-bench-cache" / "triton"))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    write_dataset(folder / "data", small=args.small)
    if args.warm:
        warm([line for line in fitting(lines, ends) if line.can_warm], args, folder, ends)
    waiting = deque(lines)
    ready: Worker | None = None
    while waiting:
        line = waiting.popleft()
        worker, ready = ready, None
        if time.monotonic() + line.estimate > ends:
            say(f"{line.name}: skipped, because it would take about {line.estimate:.0f} s")
            if worker is not None:
                worker.stop()
            continue
        worker = worker or Worker(line, args, folder)
        worker.go()
        if waiting:
            # Importing can take as long as measuring, so the next process imports while this one creates its model.
            ready = Worker(waiting[0], args, folder)
        patience, left = PATIENCE * line.estimate + 120, ends - time.monotonic() + 20
        found = worker.result(min(patience, left))
        if left < patience and found.get("error", "").startswith(UNFINISHED):
            say(f"{line.name}: stopped at the end of the budget; its results are discarded")
            continue
        with args.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")
        if "error" in found:
            with args.results.with_suffix(".log").open("a", encoding="utf-8") as file:
                file.write(f"--- {line.name}: {found['error']}\n{worker.said}\n")
        say(f"{line.name}: {found.get('error') or measured(found)}")


def fitting(lines: list[TrainLine], ends: float) -> list[TrainLine]:
    """Return the first configurations whose estimated time is at most three quarters of the remaining time budget. The
    last quarter is reserved for compiling.
    """
    sums = itertools.accumulate(line.estimate for line in lines)
    left = 0.75 * (ends - time.monotonic())
    return [line for line, seconds in zip(lines, sums, strict=True) if seconds <= left]


def warm(lines: list[TrainLine], args: argparse.Namespace, folder: Path, ends: float) -> None:
    """Compile the kernels of all models in advance, several models at a time. Two layers per model suffice, because all
    layers use the same kernels.
    """
    began = time.monotonic()
    waiting, running = deque(lines), deque[Worker]()
    while waiting or running:
        while waiting and len(running) < args.warm:
            running.append(Worker(waiting.popleft(), args, folder, layers=LAYERS))
            running[-1].go()
        worker = running.popleft()
        found = worker.result(min(300.0, ends - time.monotonic()))
        if "error" in found:
            say(worker.said[-2000:])
        say(f"warm {worker.line.name}: {found.get('error') or format(found['total_s'], '.0f') + ' s'}")
    say(f"warm: {time.monotonic() - began:.0f} s")


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


class Worker:
    """A process that measures one configuration. The process imports its libraries immediately, but uses the GPU only
    after `go`.
    """

    def __init__(self, line: TrainLine, args: argparse.Namespace, folder: Path, *, layers: int | None = None) -> None:
        self.line = line
        self.said = ""
        """Standard error of the process, available once the process has returned a result."""
        command = [sys.executable, "-W", "ignore", __file__, "--worker", line.name, "--folder", str(folder)]
        command += ["--small"] * args.small + (["--layers", str(layers)] if layers else [])
        self._errors = (folder / f"{line.name}-{layers or 'all'}.log").open("w+", encoding="utf-8")
        # Many processes compile at the same time, so each uses one compile thread.
        threads = {"TORCHINDUCTOR_COMPILE_THREADS": "1"} if layers else {}
        self._process = subprocess.Popen(
            command,
            env=os.environ | threads,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            process_group=0,
        )

    def go(self) -> None:
        assert self._process.stdin is not None
        # If the process has already ended, `result` reports the reason.
        with suppress(BrokenPipeError):
            self._process.stdin.write("go\n")
            self._process.stdin.flush()

    def result(self, timeout: float) -> dict[str, Any]:
        try:
            out, _ = self._process.communicate(timeout=max(1.0, timeout))
            return dict(json.loads(out.strip().rsplit("\n", 1)[-1]))
        except subprocess.TimeoutExpired:
            error = f"{UNFINISHED} {timeout:.0f} s"
        except ValueError:
            error = f"exit {self._process.returncode}: {(self._said().splitlines() or ['no output'])[-1][:300]}"
        finally:
            self.said = self._said()
            self.stop()
        return {"line": self.line.name, "error": error}

    def _said(self) -> str:
        self._errors.seek(0)
        return self._errors.read().strip()

    def stop(self) -> None:
        """Kill the process and all processes that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._errors.close()


def work(args: argparse.Namespace) -> int:
    line = TRAIN_LINES[args.worker]
    if not line.own:
        import transformers.models.qwen3.modeling_qwen3  # noqa: F401
    if line.precision.base:
        import peft  # noqa: F401
    if sys.stdin.readline() != "go\n":
        return 1
    began = time.perf_counter()
    out, sys.stdout = sys.stdout, sys.stderr
    trial = Trial(line, args.folder / "data", small=args.small, layers=args.layers)
    found: dict[str, Any] = {"line": line.name, "what": line.what, "precision": vars(line.precision), **versions()}
    try:
        with tempfile.TemporaryDirectory(dir=args.folder) as runs:
            found |= figures(trial, Path(runs))
    except Exception as error:
        # After an error, the remaining configurations are still measured.
        import traceback

        traceback.print_exc()
        text = str(error).strip().splitlines() or [""]
        found["error"] = f"{type(error).__name__}: {text[0][:300]}"
    found["total_s"] = time.perf_counter() - began
    out.write(json.dumps(found) + "\n")
    out.flush()
    # Skip destructors, which can crash after an error.
    os._exit(0)


def figures(trial: Trial, folder: Path) -> dict[str, Any]:
    gpu = trial.device == "cuda"
    start: dict[str, float] = {}

    def measured_from() -> None:
        gc.collect()
        start["at"] = time.perf_counter()
        if gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    if trial.line.side == "chatmill":
        found = train_ours.run(trial, folder, measured_from)
    else:
        found = train_peers.run(trial, measured_from)
    if not all(loss is None or math.isfinite(loss) for loss in found["losses"]):
        raise RuntimeError(f"a loss is not finite: {found['losses']}")
    seconds, steps = found.pop("seconds"), found.pop("steps")
    figures = {
        "tokens_per_s": found.pop("tokens") / seconds,
        "trained_per_s": found.pop("trained") / seconds,
        "step_ms": 1e3 * seconds / steps,
        "gib": torch.cuda.max_memory_allocated() / 2**30 if gpu else 0.0,
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30 if gpu else 0.0,
        "wait": found.pop("wait"),
        "tflops": operations(trial) / seconds / 1e12 if trial.line.side == "chatmill" else None,
        "first_loss": found["losses"][0],
        "last_loss": found["losses"][-1],
        "timed_steps": steps,
    }
    counters = torch._dynamo.utils.counters["inductor"]
    figures["cache"] = {name: counters[name] for name in ("fxgraph_cache_hit", "fxgraph_cache_miss")}
    if gpu and not trial.layers:
        gc.collect()
        torch.cuda.empty_cache()
        figures["best_tflops"] = best_product()
    return figures


def versions() -> dict[str, Any]:
    names = ("transformers", "peft", "liger_kernel", "bitsandbytes", "torchao", "flash-attn-4")
    known = {}
    for name in names:
        with suppress(PackageNotFoundError):
            known[name] = version(name)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {"device": device, "versions": {"torch": torch.__version__, **known}}


def best_product() -> float:
    """Measure the speed of large bf16 matrix multiplications; return the highest TFLOP/s."""
    best = 0.0
    for size in (4096, 8192, 16384):
        a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in "ab")
        for _ in range(3):
            a @ b
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(11)]
        marks[0].record()
        for mark in marks[1:]:
            a @ b
            mark.record()
        torch.cuda.synchronize()
        taken = np.median([before.elapsed_time(after) for before, after in itertools.pairwise(marks)])
        best = max(best, 2 * size**3 / float(taken) / 1e9)
    return best


if __name__ == "__main__":
    sys.exit(main())
