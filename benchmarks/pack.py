"""Compare packing in chatmill, TRL and torchtune, and measure how fast chatmill splits conversations into blocks.

    python benchmarks/pack.py [--json]

Most comparisons also report a floor: the time to sort the lengths once or to copy the tokens once. Memory is measured
in separate processes. The script exits with 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import io
import json
import os
import statistics
import sys
import time
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from heapq import heappop, heappush
from importlib.util import find_spec
from typing import Any

import numpy as np
from measure import alone, machine, versions
from numpy.typing import NDArray

from chatmill.fit import cut_blocks, pack, pack_lengths
from chatmill.format import open_renderer
from chatmill.records import Message, Record
from chatmill.rows import ORIGIN, OWN_ID, SPAN, Rows, offsets

CAPACITY = 4096


@dataclass(frozen=True)
class Timing:
    what: str
    seconds: float
    rows: int
    """Number of rows after packing."""
    fill: float
    """Share of the capacity that is filled with tokens."""


@dataclass(frozen=True)
class Promise:
    what: str
    measured: str
    kept: bool


@dataclass(frozen=True)
class Comparison:
    title: str
    timings: list[Timing]
    promises: list[Promise]
    figures: dict[str, Any]


def main() -> int:
    options = argparse.ArgumentParser(description="Compare packing in chatmill with packing in TRL and torchtune.")
    options.add_argument("--json", action="store_true", help="print JSON instead of tables")
    options.add_argument("--rows", type=int, default=1_000_000, help="number of conversation lengths to assign to rows")
    options.add_argument("--runs", type=int, default=7, help="number of chatmill runs; the median is reported")
    options.add_argument("--side", choices=tuple(SIDES), help="run only this function, once, without output")
    chosen = options.parse_args()
    if chosen.side:
        SIDES[chosen.side](chosen.rows)
        return 0
    packages = ["chatmill", "trl", "datasets", "numpy"]
    memory = {name: alone(__file__, "--side", name, "--rows", chosen.rows)[1] for name in SIDES}
    comparisons = {
        "plan": planning(chosen.rows, chosen.runs, memory["plan"]),
        "copy": copying(chosen.rows // 10, chosen.runs),
    }
    if find_spec("torchtune"):
        comparisons["order"] = in_order(chosen.rows // 50, chosen.runs)
        packages.append("torchtune")
    else:
        print("torchtune is not installed and is skipped; `make bench` installs it", file=sys.stderr)
    title = machine(*packages)
    comparisons["blocks"] = streaming(chosen.rows // 80, chosen.runs)
    if chosen.json:
        shown = {name: asdict(comparison) for name, comparison in comparisons.items()}
        print(json.dumps({"rows": chosen.rows, "memory": memory, "versions": versions(*packages), **shown}))
    else:
        print(title, *map(table, comparisons.values()), sep="\n\n")
        print("\npeak memory:", ", ".join(f"{name} {peak / 1e6:.0f} MB" for name, peak in memory.items()))
    return int(not all(promise.kept for comparison in comparisons.values() for promise in comparison.promises))


SIDES: dict[str, Callable[[int], object]] = {
    "plan": lambda rows: pack_lengths(real_shaped(rows), CAPACITY),
    "trl": lambda rows: trl_pack(trl_dataset(real_shaped(rows), np.int8), batch_size=None),
    "copy": lambda rows: pack(one_span_rows(real_shaped(rows // 10)), CAPACITY),
    "trl copy": lambda rows: trl_pack(trl_dataset(real_shaped(rows // 10), np.int32), batch_size=None),
    "blocks": lambda rows: cut_blocks(post_training_rows(rows // 80), 4096),
}
"""Functions whose memory is measured, each in a separate process."""


# Comparisons.


def planning(count: int, runs: int, peak: int) -> Comparison:
    """Measure the time to decide, from the lengths of conversations, which conversations share a row.

    TRL cannot make this decision without copying tokens, so TRL is timed with tokens of one byte and of zero bytes. TRL
    is also timed with its default of packing every 1000 conversations separately. chatmill is compared with the fastest
    variant of TRL.
    """
    lengths = real_shaped(count)
    seconds, bins = median_of(runs, lambda: pack_lengths(lengths, CAPACITY))
    bin_of = np.empty(count, dtype=np.int64)
    bin_of[bins.order] = np.repeat(np.arange(len(bins)), np.diff(bins.first))
    naive_seconds, naive_bin_of = timed(lambda: one_row_at_a_time(lengths, CAPACITY))
    naive_bins = max(naive_bin_of) + 1
    floor, _ = median_of(runs, lambda: np.sort(lengths))

    def timing(what: str, seconds: float, rows: int) -> Timing:
        return Timing(what, seconds, rows, float(lengths.sum()) / rows / CAPACITY)

    zeros, nothing = trl_dataset(lengths, np.int8), trl_dataset(lengths, None)
    whole_seconds, whole = trl_pack(zeros, batch_size=None)
    bare_seconds, bare = trl_pack(nothing, batch_size=None)
    batch_seconds, batches = trl_pack(zeros)
    of_trl = [
        timing(f"{trl_name()}, all rows at once, one-byte tokens", whole_seconds, len(whole)),
        timing(f"{trl_name()}, all rows at once, zero-byte tokens", bare_seconds, len(bare)),
        timing(f"{trl_name()}, 1000 rows at a time, one-byte tokens", batch_seconds, len(batches)),
    ]
    theirs = sorted(sorted(row) for row in whole["seq_lengths"])
    ours = sorted(sorted(row.tolist()) for row in np.split(lengths[bins.order], bins.first[1:-1]))
    unlike = len(ours) + len(theirs) - 2 * sum((Counter(map(tuple, ours)) & Counter(map(tuple, theirs))).values())
    fastest = min(peer.seconds for peer in of_trl)
    equal = bin_of.tolist() == naive_bin_of
    return Comparison(
        f"assign {count:,} conversations to rows of {CAPACITY} tokens, given only their lengths "
        f"(lognormal, mean {lengths.mean():.0f})",
        [
            timing("chatmill pack_lengths", seconds, len(bins)),
            timing("naive best-fit decreasing, one conversation at a time", naive_seconds, naive_bins),
            *of_trl,
        ],
        [
            Promise(
                "every conversation in the same row as with naive best-fit decreasing",
                f"{len(bins):,} rows, naive {naive_bins:,} rows",
                equal,
            ),
            Promise(
                "at least 100 times as fast as TRL",
                f"{fastest / seconds:.0f} times as fast as the fastest variant of TRL",
                fastest >= 100 * seconds,
            ),
            Promise("peak memory of the process under 500 MB", f"{peak / 1e6:.0f} MB", peak < 500e6),
        ],
        {
            "equal_to_naive": equal,
            "bins": len(bins),
            "rows_unlike_trl": unlike,
            "times_trl": fastest / seconds,
            "floor_s": floor,
            "floor": "sorting the lengths once",
        },
    )


def copying(count: int, runs: int) -> Comparison:
    """Measure the time of packing, including copying four-byte tokens into packed rows. The speedup has no target."""
    lengths = real_shaped(count)
    rows = one_span_rows(lengths)
    seconds, packed = median_of(runs, lambda: pack(rows, CAPACITY))
    floor, _ = median_of(runs, rows.ids.copy)
    trl_seconds, trl_rows = trl_pack(trl_dataset(lengths, np.int32), batch_size=None)
    fill = float(lengths.sum()) / CAPACITY
    return Comparison(
        f"pack {count:,} rows, {lengths.sum() / 1e6:.0f} million tokens, into rows of {CAPACITY} tokens",
        [
            Timing("chatmill pack, including the copy", seconds, len(packed), fill / len(packed)),
            Timing(f"{trl_name()}, all rows at once", trl_seconds, len(trl_rows), fill / len(trl_rows)),
        ],
        [],
        {
            "tokens": int(lengths.sum()),
            "times_trl": trl_seconds / seconds,
            "floor_s": floor,
            "floor": "copying the tokens once",
        },
    )


def in_order(count: int, runs: int) -> Comparison:
    """Compare packing with torchtune, which packs conversations in their original order."""
    lengths = real_shaped(count)
    rows = one_span_rows(lengths)
    samples = [{"tokens": [0] * length, "labels": [0] * length} for length in lengths.tolist()]
    seconds, packed = median_of(runs, lambda: pack(rows, CAPACITY))
    torchtune_pack(samples[:1])
    peer_seconds, peer = timed(lambda: torchtune_pack(samples))
    # Padding has the label -100.
    held = sum(int((row["labels"] != -100).sum()) for row in peer)
    if held != lengths.sum():
        raise SystemExit(f"torchtune: {held} tokens after packing, expected {lengths.sum()}")
    fill = float(lengths.sum()) / CAPACITY
    return Comparison(
        f"pack {count:,} rows, {lengths.sum() / 1e6:.0f} million tokens, into rows of {CAPACITY} tokens",
        [
            Timing("chatmill pack, including the copy", seconds, len(packed), fill / len(packed)),
            Timing(
                f"torchtune {importlib.metadata.version('torchtune')} PackedDataset",
                peer_seconds,
                len(peer),
                fill / len(peer),
            ),
        ],
        [],
        {"tokens": int(lengths.sum()), "times_torchtune": peer_seconds / seconds},
    )


def streaming(count: int, runs: int) -> Comparison:
    """Measure how fast conversations are split into blocks on one core, with injected tokens and masks. TRL and
    torchtune do not support this.
    """
    rows = post_training_rows(count)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    timings, promises, speeds = [], [], {}
    for size in (1024, 4096):
        seconds, packed = median_of(runs, lambda size=size: cut_blocks(rows[:], size))
        speeds[str(size)] = len(rows.ids) / seconds / 1e6
        timings.append(Timing(f"chatmill blocks of {size}", seconds, len(packed), 1.0))
        promises.append(
            Promise(f"blocks of {size}: at least 20 Mtok/s", f"{speeds[str(size)]:.0f} Mtok/s", speeds[str(size)] >= 20)
        )
    floor, _ = median_of(runs, rows.ids.copy)
    return Comparison(
        f"split {count:,} conversations, {len(rows.ids) / 1e6:.1f} million tokens, into stream blocks, one core",
        timings,
        promises,
        {"tokens": len(rows.ids), "mtok": speeds, "floor_s": floor, "floor": "copying the tokens once"},
    )


def post_training_rows(count: int) -> Rows:
    """Return conversations of about 700 tokens, rendered in the `post-training` format."""
    draw = np.random.default_rng(0)
    records = []
    for _ in range(count):
        messages = [Message("system", "s" * int(draw.integers(20, 60)))] if draw.random() < 0.6 else []
        for _ in range(int(draw.integers(1, 6))):
            messages.append(Message("user", "u" * int(draw.gamma(1.5, 40) + 1)))
            messages.append(Message("assistant", "a" * int(draw.gamma(2, 80) + 1)))
        records.append(Record(messages))
    return open_renderer("post-training", "bytes").render(records)


def real_shaped(count: int) -> NDArray[np.int64]:
    """Return lengths like those of chat data: many short lengths and a long tail, truncated to the capacity."""
    draw = np.random.default_rng(20).lognormal(np.log(600) - 0.5, 1.0, count)
    return np.clip(draw.astype(np.int64), 1, CAPACITY)


def one_span_rows(lengths: NDArray[np.int64]) -> Rows:
    spans = np.zeros(len(lengths), dtype=SPAN)
    spans["length"], spans["weight"], spans["target"] = lengths, 1, OWN_ID
    each = np.arange(len(lengths) + 1, dtype=np.int64)
    return Rows(np.zeros(lengths.sum(), dtype=np.uint32), spans, each, np.zeros(len(lengths), dtype=ORIGIN), each)


def one_row_at_a_time(lengths: NDArray[np.int64], capacity: int) -> list[int]:
    """Assign each row to a bin by best-fit decreasing, and return the bin of each row. If several bins fit equally
    well, the oldest bin is used.
    """
    bin_of = [0] * len(lengths)
    room: list[int] = []
    bins_with: list[list[int]] = [[] for _ in range(capacity + 1)]
    opened = 0
    for row in sorted(range(len(lengths)), key=(-lengths).tolist().__getitem__):
        length = int(lengths[row])
        at = bisect_left(room, length)
        if at < len(room):
            space = room[at]
            best = heappop(bins_with[space])
            if not bins_with[space]:
                del room[at]
        else:
            space, best = capacity, opened
            opened += 1
        bin_of[row] = best
        left = space - length
        if not bins_with[left]:
            insort(room, left)
        heappush(bins_with[left], best)
    return bin_of


def trl_name() -> str:
    return f"trl {importlib.metadata.version('trl')} pack_dataset bfd"


def trl_dataset(lengths: NDArray[np.int64], token: type | None) -> Any:
    # Peers are imported where they are used, so that they do not count towards chatmill's memory.
    import datasets
    import pyarrow as pa

    datasets.disable_progress_bars()
    count = int(lengths.sum())
    tokens = pa.array(np.zeros(count, dtype=token)) if token else pa.nulls(count)
    rows = pa.ListArray.from_arrays(pa.array(offsets(lengths), type=pa.int32()), tokens)
    return datasets.Dataset(pa.table({"input_ids": rows}))


def trl_pack(dataset: Any, **map_kwargs: Any) -> tuple[float, Any]:
    from trl import pack_dataset

    return timed(lambda: pack_dataset(dataset, CAPACITY, strategy="bfd", map_kwargs=map_kwargs))


def torchtune_pack(samples: list[dict[str, list[int]]]) -> Any:
    with contextlib.redirect_stderr(io.StringIO()):
        from torchtune.datasets import PackedDataset

        return PackedDataset(samples, max_seq_len=CAPACITY).packs


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def median_of(runs: int, call: Callable[[], Any]) -> tuple[float, Any]:
    seconds = []
    for _ in range(runs):
        took, result = timed(call)
        seconds.append(took)
    return statistics.median(seconds), result


def table(comparison: Comparison) -> str:
    lines = [comparison.title, f"  {'':<62}{'seconds':>9}{'rows':>10}{'fill':>9}"]
    lines += [f"  {t.what:<62}{t.seconds:>9.3f}{t.rows:>10,}{t.fill:>9.3%}" for t in comparison.timings]
    lines += [f"  {'met   ' if p.kept else 'MISSED'}  {p.what}: {p.measured}" for p in comparison.promises]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
