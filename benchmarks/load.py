"""Compare chatmill's batch loading with Hugging Face datasets and TRL's collator, and with a plain copy of the bytes.

    python benchmarks/load.py                           load from 50,000 conversations
    python benchmarks/load.py --conversations 2000      use fewer conversations
    python benchmarks/load.py --billion                 also load from a billion episodes, in sparse files

chatmill and the peer load shuffled batches of the same rows, without worker processes. The peer's rows are truncated,
packed (best-fit decreasing) and masked beforehand; chatmill truncates, packs and masks rows while it loads them.
chatmill's batches contain x, y, the loss mask, weights, positions, segments and episode ids. The peer's batches contain
ids and labels, and either the attention mask or, for varlen attention, positions and sequence lengths. The benchmark
first checks that chatmill and the peer produce the same tokens and labels. Memory is measured in separate processes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from corpus import DATA, Data, add_options, chosen
from measure import alone, interleaved, machine, report, versions

from chatmill.audit import Audit
from chatmill.load.loader import EpisodeLoader
from chatmill.prepare.engine import LocalEngine
from chatmill.prepare.job import InputSource, Job
from chatmill.prepare.pipeline import prepare_dataset
from chatmill.rows import offsets
from chatmill.store.read import open_dataset

BILLION = """
import json, random, sys, time
from pathlib import Path

def memory():
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024

import numpy
from chatmill.load.loader import EpisodeLoader
before = memory()
config = {"batch_sampling_mode": "feistel", "episode_min_tokens": 0, "pad_token_id": 0}
began = time.perf_counter()
loader = EpisodeLoader(sys.argv[1], config, tensors=False)
order, taken = loader.plan("train").order, []
for _ in range(1000):
    epoch, position = random.randrange(1000), random.randrange(10**9)
    started = time.perf_counter()
    order.at(epoch, [position])
    taken.append(time.perf_counter() - started)
for _ in range(50):
    loader.get_batch()
table, looked_up = numpy.random.RandomState(0).permutation(10**7), []
held = memory() - table.nbytes
for _ in range(1000):
    position = [random.randrange(10**7)]
    started = time.perf_counter()
    table[position]
    looked_up.append(time.perf_counter() - started)
middle = {"order_ms": 1e3 * sorted(taken)[500], "lookup_ms": 1e3 * sorted(looked_up)[500]}
print(json.dumps({**middle, "memory": held, "imports": before}))
"""


class Shape(NamedTuple):
    batch_size: int
    block_size: int
    packed: bool
    target: int
    """Target speedup over the peer."""
    batches: int
    """Number of batches per run."""

    @property
    def name(self) -> str:
        return f"({self.batch_size}, {self.block_size}) {'packed' if self.packed else 'padded'}"


SHAPES = [Shape(8, 512, False, 25, 400), Shape(16, 4096, True, 50, 40)]


def make_dataset(data: Data, folder: Path) -> Path:
    job = Job((InputSource((str(data.path),)),), tokenizer=str(data.tokenizer))
    prepare_dataset(job, folder / "dataset", engine=LocalEngine(2))
    return folder / "dataset"


def peer_rows(dataset: Path, shape: Shape) -> Any:
    """Return the conversations, truncated, masked and packed, as an Arrow table with TRL's columns."""
    import datasets
    import pyarrow as pa

    datasets.disable_progress_bars()
    episodes = open_dataset(dataset)["train"]
    rows = episodes.rows(np.arange(len(episodes)))
    ids, labels = rows.ids.astype(np.int32), np.where(rows.mask(), rows.ids, -100).astype(np.int32)
    kept = np.minimum(rows.lengths, shape.block_size)
    # Keep the last tokens of a row that is too long, as chatmill does.
    keep = np.arange(len(ids)) - np.repeat(rows.row_start[1:] - kept, rows.lengths) >= 0
    start = pa.array(offsets(kept), type=pa.int32())
    columns = {"input_ids": ids[keep], "labels": labels[keep]}
    table = datasets.Dataset(
        pa.table({name: pa.ListArray.from_arrays(start, pa.array(values)) for name, values in columns.items()})
    )
    if not shape.packed:
        return table
    from trl import pack_dataset

    return pack_dataset(table, shape.block_size, strategy="bfd", map_kwargs={"batch_size": None})


def peer_collator(shape: Shape, pad: int) -> Callable[[list[Any]], dict[str, Any]]:
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    collate: Callable[[list[Any]], dict[str, Any]] = DataCollatorForLanguageModeling(
        pad_token_id=pad, padding_free=shape.packed, pad_to_multiple_of=None if shape.packed else shape.block_size
    )
    return collate


def peer_batches(rows: Any, shape: Shape, pad: int) -> Callable[[], dict[str, Any]]:
    """Return a function that loads the peer's next batch with TRL's collator and a shuffling DataLoader, as in
    Trainer.
    """
    import torch

    collator = peer_collator(shape, pad)

    def endless() -> Iterator[dict[str, Any]]:
        while True:
            yield from torch.utils.data.DataLoader(
                rows, batch_size=shape.batch_size, shuffle=True, collate_fn=collator, drop_last=True
            )

    batches = endless()
    return lambda: next(batches)


def config(shape: Shape) -> dict[str, Any]:
    return {
        "batch_size": shape.batch_size,
        "block_size": shape.block_size,
        "packing": "bins" if shape.packed else "none",
        "use_loss_mask": True,
        "pad_token_id": 0,
    }


def check(loader: EpisodeLoader, dataset: Path, shape: Shape, batches: int = 20) -> None:
    """Exit if the tokens or labels in a batch differ from those of its episodes."""
    episodes = open_dataset(dataset)["train"]
    for _ in range(batches):
        batch = loader.get_batch()
        for row in range(shape.batch_size):
            for segment, number in enumerate(n for n in batch.episode_ids[row].tolist() if n >= 0):
                here = batch.segments[row].numpy() == segment
                ids, mask = episodes.tokens(number)[-shape.block_size - 1 :], episodes.mask(number)
                x, y = batch.x[row].numpy()[here], batch.y[row].numpy()[here]
                wanted = np.where(mask[-shape.block_size - 1 :], ids.astype(np.int64), -100)[1:]
                if not np.array_equal(x, ids[: len(x)]) or not np.array_equal(y[: len(wanted)], wanted[: len(y)]):
                    raise SystemExit(f"episode {number}: the loaded tokens or labels differ from the dataset")


def peer_differs(dataset: Path, rows: Any, shape: Shape, batches: int = 8) -> tuple[int, int]:
    """Return the number of conversations in the peer's first batches, and how many differ from the dataset."""
    episodes = open_dataset(dataset)["train"]

    def key(ids: Any, targets: Any) -> bytes:
        # The first token has no context and is never predicted, so its label is not compared.
        return np.concatenate([ids, targets[1:]]).astype(np.int64).tobytes()

    stored = set()
    for number in range(len(episodes)):
        ids, mask = episodes.tokens(number)[-shape.block_size :], episodes.mask(number)[-shape.block_size :]
        stored.add(hash(key(ids, np.where(mask, ids.astype(np.int64), -100))))
    collate, seen, differ = peer_collator(shape, 0), 0, 0
    for at in range(batches):
        drawn = [rows[(at * shape.batch_size + n) % len(rows)] for n in range(shape.batch_size)]
        batch = {name: np.asarray(values) for name, values in collate(drawn).items() if name in ("input_ids", "labels")}
        for number, row in enumerate(drawn):
            lengths = row["seq_lengths"] if shape.packed else [len(row["input_ids"])]
            # TRL collates packed rows into one long row.
            start = sum(sum(other["seq_lengths"]) for other in drawn[:number]) if shape.packed else 0
            for length in lengths:
                here = (0 if shape.packed else number, slice(start, start + length))
                seen, start = seen + 1, start + length
                differ += hash(key(batch["input_ids"][here], batch["labels"][here])) not in stored
    return seen, differ


def one_shape(dataset: Path, shape: Shape, runs: int, folder: Path) -> tuple[list[tuple[str, str]], dict[str, Any]]:
    number = SHAPES.index(shape)
    memory = {
        name: alone(__file__, "--side", name, "--shape", number, "--dataset", dataset)[1]
        for name in ("chatmill", "peer")
    }
    loader = EpisodeLoader(dataset, config(shape))
    logged = EpisodeLoader(dataset, config(shape), listener=Audit(folder / "logs"))
    check(loader, dataset, shape)
    rows = peer_rows(dataset, shape)
    seen, differ = peer_differs(dataset, rows, shape)
    theirs = peer_batches(rows, shape, 0)
    quick = peer_batches(rows.with_format("numpy"), shape, 0)
    batch = loader.get_batch()
    room = [np.empty_like(field.numpy()) for field in batch]
    size = sum(array.nbytes for array in room)

    def copy() -> None:
        for _ in range(shape.batches):
            for array, field in zip(room, batch, strict=True):
                np.copyto(array, field.numpy())

    peer_batches_a_run = max(1, shape.batches // 20)
    tokens = counted_tokens(rows, shape)

    def draw(next_batch: Callable[[], Any], count: int) -> Callable[[], None]:
        def work() -> None:
            for _ in range(count):
                next_batch()

        return work

    before = loader.counts()
    seconds = interleaved(
        runs,
        ours=draw(loader.get_batch, shape.batches),
        logged=draw(logged.get_batch, shape.batches),
        peer=draw(theirs, peer_batches_a_run),
        numpy=draw(quick, peer_batches_a_run),
        copy=copy,
    )
    after = loader.counts()
    mine = (after.tokens - before.tokens) / runs
    speed = {
        "ours": mine / seconds["ours"],
        "logged": mine / seconds["logged"],
        "peer": tokens * peer_batches_a_run / seconds["peer"],
        "numpy": tokens * peer_batches_a_run / seconds["numpy"],
    }
    times = speed["ours"] / speed["peer"]
    share = seconds["copy"] / seconds["ours"]
    shown = {name: f"{1e3 * seconds[name] / shape.batches:.3f} ms" for name in ("ours", "logged", "copy")}
    shown |= {name: f"{1e3 * seconds[name] / peer_batches_a_run:.2f} ms" for name in ("peer", "numpy")}
    loader.close()
    logged.close()
    return [
        (f"{shape.name}: number of the peer's {seen} conversations that differ from the dataset", f"{differ}"),
        ("  chatmill", f"{shown['ours']} per batch, {speed['ours'] / 1e6:.1f} Mtok/s"),
        ("  chatmill with an audit log", f"{shown['logged']} per batch, {speed['logged'] / 1e6:.1f} Mtok/s"),
        ("  datasets with TRL's collator", f"{shown['peer']} per batch, {speed['peer'] / 1e6:.3f} Mtok/s"),
        (
            "  datasets with numpy rows, which TRL does not use",
            f"{shown['numpy']} per batch, {speed['numpy'] / 1e6:.3f} Mtok/s",
        ),
        (f"  speedup over the peer (target {shape.target})", f"{times:.1f}"),
        (f"  speed relative to a plain copy of {size / 1e6:.2f} MB", f"{shown['copy']} per batch, {share:.2f}"),
        ("  peak memory of chatmill and of the peer", " and ".join(f"{peak / 1e6:.0f} MB" for peak in memory.values())),
    ], {
        "name": shape.name,
        "compared": {"conversations": seen, "differ": differ},
        "times": times,
        "times_numpy": speed["ours"] / speed["numpy"],
        "copy_share": share,
        "batch_bytes": size,
        "batch_ms": {
            name: 1e3 * taken / (peer_batches_a_run if name in ("peer", "numpy") else shape.batches)
            for name, taken in seconds.items()
        },
        "tokens_per_s": speed,
        "memory": memory,
    }


def counted_tokens(rows: Any, shape: Shape) -> float:
    import pyarrow.compute as pc

    return float(pc.mean(pc.list_value_length(rows.data.column("input_ids"))).as_py()) * shape.batch_size


def billion() -> tuple[list[tuple[str, str]], dict[str, Any]]:
    """Measure the time to look up a position, and the loader's memory, for a billion episodes in a separate process."""
    with tempfile.TemporaryDirectory(dir=DATA) as folder:
        shard = Path(folder) / "train" / "shard_00000"
        shard.mkdir(parents=True)
        sizes = {"episodes.idx": 16 * 10**9, "tokens.bin": 2000, "mask.bin": 1000}
        for name, size in sizes.items():
            with (shard / name).open("wb") as file:
                os.truncate(file.fileno(), size)
        with (shard / "episodes.idx").open("r+b") as file:
            # All episodes except the last are empty, so the file is sparse.
            file.seek(16 * (10**9 - 1))
            file.write(np.array([0, 1000], dtype="<u8").tobytes())
        found = json.loads(subprocess.check_output([sys.executable, "-c", BILLION, folder]))
    return [
        ("a billion episodes: look up one position (target 1 ms)", f"{found['order_ms']:.3f} ms"),
        (
            "  a billion episodes: memory after 50 batches (target 300 MB)",
            f"{found['memory'] / 1e6:.0f} MB, {found['imports'] / 1e6:.0f} MB of it for imports",
        ),
    ], found


def side(name: str, shape: Shape, dataset: Path) -> None:
    """Load batches with only chatmill or only the peer, to measure memory."""
    draw = EpisodeLoader(dataset, config(shape)).get_batch if name == "chatmill" else None
    draw = draw or peer_batches(peer_rows(dataset, shape), shape, 0)
    for _ in range(shape.batches // (1 if name == "chatmill" else 20)):
        draw()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--billion", action="store_true", help="also measure loading from a billion episodes")
    parser.add_argument(
        "--side", choices=("chatmill", "peer"), help="run only chatmill or the peer, once, with this --shape"
    )
    parser.add_argument("--shape", type=int, default=0)
    parser.add_argument("--dataset", type=Path)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.side:
        side(args.side, SHAPES[args.shape], args.dataset)
        return
    random.seed(0)
    data = chosen(args)
    lines: list[tuple[str, str]] = []
    figures: dict[str, Any] = {"conversations": data.conversations, "runs": args.runs, "shapes": []}
    if args.billion:
        lines, figures["billion"] = billion()
    with tempfile.TemporaryDirectory(dir=DATA) as temporary:
        dataset = make_dataset(data, Path(temporary))
        for shape in SHAPES:
            shown, found = one_shape(dataset, shape, args.runs, Path(temporary))
            lines += shown
            figures["shapes"].append(found)
    packages = ("chatmill", "numpy", "torch", "datasets", "trl")
    figures["versions"] = versions(*packages)
    report(
        f"loading from {data.conversations:,} conversations; {machine(*packages)}", lines, figures, as_json=args.json
    )


if __name__ == "__main__":
    main()
