"""Compare chatmill's time to prepare a dataset with TRL's, and with the time that decoding, encoding and writing take.

    python benchmarks/prepare.py                        prepare 50,000 conversations with two processes
    python benchmarks/prepare.py --conversations 5000   use fewer conversations
    python benchmarks/prepare.py --format template      use a published chat template, with a derived mask

chatmill and TRL start from a JSONL file and make packed rows of 4096 tokens with an assistant mask. chatmill writes,
syncs and publishes a dataset; TRL writes its Arrow cache. `prepare_peers.py` runs the other libraries: TRL's own
preparation, TRL's fastest documented variant, and datatrove's tokenization. Imports and loading the tokenizer are
excluded, and reported separately as start-up. The ids and mask of every conversation are compared with TRL's. For a
chat template, TRL uses its own version with generation tags, whose mask differs (see `benchmarks/render.py`), so only
the ids are compared.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from corpus import DATA, Data, add_options, chosen, options_of
from fastokens import Tokenizer as Fastokens
from measure import alone, machine, report, versions
from prepare_peers import PACK, PEERS, hashed
from render import template_file

from chatmill.prepare.engine import LocalEngine
from chatmill.prepare.job import InputSource, Job
from chatmill.prepare.pipeline import prepare_dataset
from chatmill.prepare.unit import job_renderer
from chatmill.store.metadata import Metadata
from chatmill.store.read import open_dataset

PROCESSES = 2
MORE_PROCESSES = 4


WAYS = {
    "trl": ("trl", PROCESSES),
    "batched": ("trl-batched", PROCESSES),
    "batched, more processes": ("trl-batched", MORE_PROCESSES),
    "datatrove": ("datatrove", PROCESSES),
}
"""The measured variants of the peers, with their number of processes."""
TITLES = {
    "trl": "TRL load_dataset + _prepare_dataset",
    "trl-batched": "TRL with rows tokenized by a batched datasets.map",
    "datatrove": "datatrove DocumentTokenizer: no mask, no packing",
}


class PlainRecord(msgspec.Struct):
    messages: list[dict[str, str]]


def job_of(data: Data, template: str | None) -> Job:
    """Return the settings of the build, with ChatML or with an unchanged published template from TRL's collection."""
    sources, tokenizer = (InputSource((str(data.path),)),), str(data.tokenizer)
    if template is None:
        return Job(sources, tokenizer=tokenizer, pack=PACK)
    return Job(sources, tokenizer=tokenizer, pack=PACK, format="template", chat_template=str(template_file(template)))


def ours(job: Job, folder: Path) -> tuple[Metadata, float]:
    """Remove the previous dataset and build it again with a new renderer; return the metadata, and the time of the
    build in seconds.
    """
    renderer, target = job_renderer(job), folder / "dataset"
    shutil.rmtree(target, ignore_errors=True)
    os.sync()
    gc.collect()
    started = time.perf_counter()
    made = prepare_dataset(job, target, engine=LocalEngine(PROCESSES), renderer=renderer)
    return made, time.perf_counter() - started


class Bare:
    """Measures the time that decoding, encoding and writing alone take, each separately.

    Every run uses a new forked process. The tokenizer starts with empty caches, as in the workers of a build.
    Each process prepares its own input before the timer starts, because the first access to a shared page causes a
    page fault.
    """

    def __init__(self, path: Path, tokenizer: Path, folder: Path, tokens: int) -> None:
        self.fast = Fastokens.from_file(str(tokenizer))
        self.decoder = msgspec.json.Decoder(PlainRecord)
        self.path, self.raw, self.tokens = path, folder / "raw.bin", tokens

    def lines(self) -> list[bytes]:
        return self.path.read_bytes().splitlines()

    def texts_of(self, lines: Sequence[bytes]) -> list[str]:
        return [message["content"] for line in lines for message in self.decoder.decode(line).messages]

    def decode(self) -> Callable[[], object]:
        lines = self.lines()

        def work() -> None:
            for line in lines:
                self.decoder.decode(line)

        return work

    def encode(self) -> Callable[[], object]:
        texts = self.texts_of(self.lines())
        return lambda: self.encode_all(texts)

    def encode_all(self, texts: Sequence[str]) -> None:
        for at in range(0, len(texts), 4096):
            self.fast.encode_batch_flat(texts[at : at + 4096], split_special_tokens=True)

    def write(self) -> Callable[[], object]:
        tokens = np.ones(self.tokens, dtype=np.uint32)

        def work() -> None:
            with self.raw.open("wb") as file:
                file.write(tokens.data)
                file.flush()
                os.fsync(file.fileno())

        return work

    def half(self, which: int) -> Callable[[], object]:
        """Return a function that decodes and encodes every second line, the minimum work of one of two workers."""
        lines = self.lines()[which::PROCESSES]
        return lambda: self.encode_all(self.texts_of(lines))

    def parts(self, runs: int) -> dict[str, float]:
        works = (self.decode, self.encode, self.write)
        return {work.__name__: statistics.median(forked(work) for _ in range(runs)) for work in works}

    def at_once(self, runs: int) -> float:
        """Return the median time, in seconds, that two parallel processes take to decode and encode all lines."""
        halves = [partial(self.half, number) for number in range(PROCESSES)]
        return statistics.median(forked(*halves) for _ in range(runs))


def forked(*works: Callable[[], Callable[[], object]]) -> float:
    """Run the functions in parallel in forked processes; return the elapsed seconds, without the preparation."""
    gc.collect()
    gc.freeze()
    ready, (waits, go) = os.pipe(), os.pipe()
    children = []
    for work in works:
        if (child := os.fork()) == 0:
            gc.disable()
            run = work()
            os.write(ready[1], b"r")
            os.read(waits, 1)
            run()
            os._exit(0)
        children.append(child)
    os.close(ready[1])
    if not all(os.read(ready[0], 1) for _ in works):
        raise SystemExit("a process that measures the floor failed")
    started = time.perf_counter()
    os.write(go, b"g" * len(works))
    for child in children:
        if os.waitpid(child, 0)[1]:
            raise SystemExit("a process that measures the floor failed")
    taken = time.perf_counter() - started
    for end in (ready[0], waits, go):
        os.close(end)
    return taken


def our_side(data: Data, template: str | None, folder: Path) -> dict[str, Any]:
    """Build the dataset once; return the time of the build and of the start-up, and the number of tokens and rows."""
    started = time.perf_counter()
    job = job_of(data, template)
    job_renderer(job)
    start_up = time.perf_counter() - started
    made, taken = ours(job, folder)
    split = made.splits["train"]
    return {"seconds": taken, "start_up": start_up, "tokens": split.num_tokens, "rows": split.num_episodes}


def our_conversations(dataset: Path) -> Iterator[tuple[Any, Any]]:
    """Yield the ids and mask of every conversation of a packed dataset."""
    episodes = open_dataset(dataset)["train"]
    for at in range(0, len(episodes), 1024):
        rows = episodes.rows(np.arange(at, min(at + 1024, len(episodes))))
        mask = rows.mask()
        for start, stop in pairwise(rows.segment_start.tolist()):
            yield rows.ids[start:stop], mask[start:stop]


def compared(ours: list[str], theirs: list[str]) -> dict[str, int]:
    """Count the encoded conversations that are identical in both outputs, and those that occur only in chatmill's
    output or only in the other library's.
    """
    mine, other = Counter(ours), Counter(theirs)
    alone_here, alone_there = mine - other, other - mine
    full = sum(count for name, count in alone_there.items() if name.startswith(f"{PACK} "))
    return {
        "alike": (mine & other).total(),
        "chatmill_alone": alone_here.total(),
        "peer_alone": alone_there.total(),
        "peer_alone_cut": full,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument(
        "--runs", type=int, default=5, help="number of chatmill runs before the first peer and after each peer"
    )
    parser.add_argument("--format", choices=("chatml", "template"), default="chatml")
    parser.add_argument(
        "--template",
        default="qwen2_5",
        help="TRL template for --format template; TRL must have it with and without generation tags",
    )
    parser.add_argument("--no-trl", action="store_true", help="do not run the peers, which take minutes")
    parser.add_argument(
        "--side", choices=("chatmill", *PEERS), help="run only chatmill or this peer, once, to measure its memory"
    )
    parser.add_argument("--processes", type=int, default=PROCESSES, help="number of processes for the peer in --side")
    parser.add_argument("--folder", type=Path, help="output folder for --side")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    data = chosen(args)
    template = args.template if args.format == "template" else None
    if args.side:
        if args.side == "chatmill":
            print(json.dumps(our_side(data, template, args.folder)))
        else:
            print(json.dumps(PEERS[args.side](data, template, args.folder, args.processes)))
        return
    with tempfile.TemporaryDirectory(dir=DATA) as temporary:
        folder = Path(temporary)
        same = [*options_of(data), "--format", args.format, "--template", args.template]
        one, memory = alone(__file__, "--side", "chatmill", *same, "--folder", folder)
        # Builds with ChatML and with the template alternate, so that a temporary slowdown affects both. The last build
        # is compared with the peers.
        jobs = [job_of(data, named) for named in dict.fromkeys([None, template])]

        def builds() -> list[list[float]]:
            return [[ours(job, folder)[1] for job in jobs] for _ in range(args.runs)]

        # chatmill runs before, between and after the peers, so that a temporary slowdown cannot affect all of its runs.
        taken = builds()
        peers: dict[str, Any] = {}
        if not args.no_trl:
            conversations = list(our_conversations(folder / "dataset"))
            mine = {masks: hashed(conversations, masks=masks)[0] for masks in {False, template is None}}
            del conversations
            ways = {name: way for name, way in WAYS.items() if name != "datatrove" or template is None}
            for name, (side, processes) in ways.items():
                with tempfile.TemporaryDirectory(dir=folder) as own:
                    # Sample memory rarely: frequent sampling would slow down the long run of the peer.
                    options = [*same, "--folder", own, "--processes", processes]
                    found, peak = alone(__file__, "--side", side, *options, every=0.5)
                    theirs = (Path(own) / f"{side}.hashes").read_text().split("\n")
                    differ = compared(mine[template is None and side != "datatrove"], theirs)
                peers[name] = found | {"side": side, "processes": processes, "memory": peak, "differ": differ}
                taken += builds()
        with_chatml, seconds = (statistics.median(run[at] for run in taken) for at in (0, -1))
        bare = Bare(data.path, data.tokenizer, folder, one["tokens"])
        parts, at_once = bare.parts(args.runs), bare.at_once(args.runs)
    tokens = one["tokens"]
    speed = tokens / seconds
    figures: dict[str, Any] = {
        "conversations": data.conversations,
        "template": template or "chatml",
        "bytes": data.path.stat().st_size,
        "tokens": tokens,
        "rows": one["rows"],
        "runs": args.runs,
        "seconds": seconds,
        "with_chatml": with_chatml,
        "start_up": one["start_up"],
        "bare": parts,
        "bare_at_once": at_once,
        "share_of_bare": sum(parts.values()) / seconds,
        "memory": {"chatmill": memory},
    }
    lines = [
        ("chatmill prepare, start-up (excluded below)", f"{one['start_up']:.1f} s"),
        ("chatmill prepare --pack 4096, two processes, with fsync", f"{seconds:.2f} s, {speed / 1e6:.1f} Mtok/s"),
        *([] if template is None else [("  time relative to ChatML (target 1.3)", f"{seconds / with_chatml:.2f}")]),
        (
            "  floor: msgspec decode + fastokens encode + write with fsync",
            " + ".join(f"{part:.2f}" for part in parts.values()) + " s",
        ),
        (
            "speed relative to the floor" + ("" if template else " (target 0.5)"),
            f"{figures['share_of_bare']:.2f}",
        ),
        ("  only decoding and encoding, two parallel processes", f"{at_once:.2f} s"),
        ("peak memory of all processes, PSS (target 1.2 GB)", f"{memory / 1e9:.2f} GB"),
    ]
    for name, peer in peers.items():
        peer["times"] = speed * peer["seconds"] / peer["tokens"]
        lines += [
            (f"{TITLES[peer['side']]}, {peer['processes']} processes", f"{peer['seconds']:.1f} s"),
            ("  start-up (excluded above), peak memory", f"{peer['start_up']:.1f} s, {peer['memory'] / 1e9:.2f} GB"),
            ("  conversations: equal, only in chatmill, only in the peer", str(peer["differ"])),
            ("  speedup of chatmill" + (" (target 60)" if name == "trl" else ""), f"{peer['times']:.1f}"),
        ]
    figures["peers"] = peers
    packages = ("chatmill", "fastokens", "msgspec", "trl", "transformers", "datasets", "datatrove")
    figures["versions"] = versions(*packages)
    what = f"prepare {figures['template']}: {data.conversations:,} conversations, {tokens / 1e6:.1f} million tokens"
    title = f"{what}; {machine(*packages)}"
    report(title, lines, figures, as_json=args.json)


if __name__ == "__main__":
    main()
