"""Preparing a dataset: chatmill beside TRL and beside the bare sum of the parts, in one run.

    python benchmarks/prepare.py                        50 000 conversations, two processes on both sides
    python benchmarks/prepare.py --conversations 5000   quicker
    python benchmarks/prepare.py --growth               also ten times the data, for memory

Both sides go from a JSONL file to packed rows of 4096 with an assistant mask. chatmill writes, syncs and publishes
a dataset; TRL keeps its Arrow cache. Start-up (imports, loading the tokenizer) is left out of both and shown.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
from corpus import DATA, chat_file, tokenizer_file
from fastokens import Tokenizer as Fastokens
from measure import interleaved, machine, report
from render import CHATML

from chatmill.prepare.engine import Local
from chatmill.prepare.job import Job, Source
from chatmill.prepare.pipeline import prepare
from chatmill.prepare.unit import Tools, make_tools
from chatmill.store.metadata import Metadata

PACK = 4096
PROCESSES = 2


class PlainRecord(msgspec.Struct):
    messages: list[dict[str, str]]


def ours(job: Job, tools: Tools, folder: Path) -> Metadata:
    target = folder / "dataset"
    shutil.rmtree(target, ignore_errors=True)
    return prepare(job, target, engine=Local(PROCESSES), tools=tools)


def bare_parts(path: Path, tokenizer: Path, folder: Path, runs: int) -> dict[str, float]:
    """Seconds of decoding, of encoding and of writing, each alone and as fast as its library does it."""
    fast = Fastokens.from_file(str(tokenizer))
    decoder = msgspec.json.Decoder(PlainRecord)
    lines = path.read_bytes().splitlines()
    texts = [message["content"] for line in lines for message in decoder.decode(line).messages]
    tokens = np.frombuffer(fast.encode_batch_flat(texts, split_special_tokens=True)[0], dtype=np.uint32)

    def decode() -> None:
        with path.open("rb") as file:
            for line in file:
                decoder.decode(line)

    def encode() -> None:
        for at in range(0, len(texts), 4096):
            fast.encode_batch_flat(texts[at : at + 4096], split_special_tokens=True)

    def write() -> None:
        with (folder / "raw.bin").open("wb") as file:
            file.write(tokens.data)
            file.flush()
            os.fsync(file.fileno())

    return interleaved(runs, decode=decode, encode=encode, write=write)


def trl_prepare(path: Path, tokenizer: Path, folder: Path) -> tuple[float, float, int]:
    """Seconds of TRL's own preparation from the JSONL on, of its start-up before, and how many tokens came out."""
    began = time.perf_counter()
    os.environ["HF_HOME"] = str(folder / "hf")
    import datasets
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    datasets.disable_progress_bars()
    peer = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer), eos_token="<|im_end|>", pad_token="<|im_end|>")
    peer.chat_template = CHATML
    config = SFTConfig(
        output_dir=str(folder / "trl"),
        max_length=PACK,
        packing=True,
        assistant_only_loss=True,
        dataset_num_proc=PROCESSES,
        use_cpu=True,
        bf16=False,
        report_to=[],
    )
    # The method that SFTTrainer calls on its dataset, with what it looks up on the trainer; no model is needed.
    trainer: Any = SimpleNamespace(chat_template=CHATML, completion_only_loss=False, _tokenizer=peer)
    started = time.perf_counter()
    loaded = datasets.load_dataset("json", data_files=str(path), split="train", cache_dir=str(folder / "cache"))
    packed = SFTTrainer._prepare_dataset(trainer, loaded, peer, config, True, None, "train")
    tokens = sum(len(row) for row in packed["input_ids"])
    return time.perf_counter() - started, started - began, tokens


def peak_memory(path: Path, tokenizer: Path, folder: Path) -> int:
    """The most memory, shared pages counted by share, of `chatmill prepare` and all of its processes."""
    target = folder / "memory"
    shutil.rmtree(target, ignore_errors=True)
    command = ["chatmill", "prepare", str(path), "-o", str(target)]
    command += ["--tokenizer", str(tokenizer), "--pack", str(PACK), "--workers", str(PROCESSES)]
    process = subprocess.Popen(
        [sys.executable, "-c", f"import sys; sys.argv = {command!r}; from chatmill.cli.main import main; main()"],
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    peak = 0
    while process.poll() is None:
        peak = max(peak, sum(_pss(pid) for pid in _session(process.pid)))
        time.sleep(0.05)
    if process.returncode:
        raise SystemExit(f"chatmill prepare failed with {process.returncode}")
    shutil.rmtree(target)
    return peak


def _session(leader: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if int(fields[3]) == leader:
                found.append(int(entry.name))
    return found


def _pss(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def ten_times(path: Path) -> Path:
    """The same conversations ten times over, in one file."""
    large = DATA / f"{path.stem}-x10.jsonl"
    if not large.exists():
        aside = large.with_suffix(".part")
        with aside.open("wb") as file:
            for _ in range(10):
                file.write(path.read_bytes())
        aside.replace(large)
    return large


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=50_000)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--no-trl", action="store_true", help="leave out the peer, which takes minutes")
    parser.add_argument("--growth", action="store_true", help="measure the memory for ten times the data, too")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    path, tokenizer = chat_file(args.conversations), tokenizer_file()
    job = Job((Source((str(path),)),), tokenizer=str(tokenizer), pack=PACK)
    with tempfile.TemporaryDirectory(dir=DATA) as temporary:
        folder = Path(temporary)
        memory = peak_memory(path, tokenizer, folder)
        grown = peak_memory(ten_times(path), tokenizer, folder) if args.growth else None
        started = time.perf_counter()
        tools = make_tools(job)
        start_up = time.perf_counter() - started
        metadata = ours(job, tools, folder)
        tokens = metadata.splits["train"].num_tokens
        seconds = interleaved(args.runs, ours=lambda: ours(job, tools, folder))["ours"]
        parts = bare_parts(path, tokenizer, folder, args.runs)
        peer = None if args.no_trl else trl_prepare(path, tokenizer, folder)
    speed, bare = tokens / seconds, sum(parts.values())
    lines = [
        ("chatmill prepare, start-up left out", f"{start_up:.1f} s"),
        ("chatmill prepare --pack 4096, two processes, synced", f"{seconds:.2f} s, {speed / 1e6:.1f} Mtok/s"),
        (
            "  bare msgspec decode + flat encode + raw write",
            " + ".join(f"{part:.2f}" for part in parts.values()) + " s",
        ),
        ("share of the speed of the bare parts (target 0.5)", f"{bare / seconds:.2f}"),
        ("memory of all processes, PSS (target 1.2 GB)", f"{memory / 1e9:.2f} GB"),
    ]
    figures = {"tokens": tokens, "seconds": seconds, "start_up": start_up, "bare": parts, "memory": memory}
    if grown is not None:
        lines.append(("memory for ten times the data (target at most 1.10 times)", f"{grown / memory:.2f} times"))
        figures["memory_x10"] = grown
    if peer is not None:
        peer_speed = peer[2] / peer[0]
        lines += [
            ("TRL, start-up left out", f"{peer[1]:.1f} s"),
            ("TRL load_dataset + _prepare_dataset, two processes", f"{peer[0]:.1f} s, {peer_speed / 1e6:.3f} Mtok/s"),
            ("times TRL (target 50)", f"{speed / peer_speed:.1f}"),
        ]
        figures |= {"trl_seconds": peer[0], "trl_tokens": peer[2], "times_trl": speed / peer_speed}
    packages = ("chatmill", "fastokens", "msgspec", "trl", "transformers", "datasets")
    title = f"prepare: {args.conversations:,} conversations, {tokens / 1e6:.1f} M tokens; {machine(*packages)}"
    report(title, lines, figures, as_json=args.json)


if __name__ == "__main__":
    main()
