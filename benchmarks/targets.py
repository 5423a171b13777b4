"""The performance targets of chatmill."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lines import Results
from train_report import FULL_GIB, LORA_GIB, OFFLOAD_GIB, QLORA_GIB, SHARE, SPEED, TOKENS, WAIT


@dataclass(frozen=True)
class Target:
    """A performance target: a lower or upper limit for one measured value."""

    what: str
    wanted: float
    figure: Callable[[Results], float]
    unit: str = ""
    digits: int = 2
    most: bool = False
    """Whether the limit is an upper limit."""
    left: str = ""
    """Why the target may be missed, shown on the page if it is missed."""

    def held(self, results: Results) -> float | None:
        """Return the measured value from the results of a benchmark run, or None if it was not measured."""
        try:
            return float(self.figure(results))
        except (KeyError, IndexError, TypeError):
            return None

    def met(self, value: float) -> bool:
        return value <= self.wanted if self.most else value >= self.wanted


def target_table(results: Results, before: str = "") -> str:
    """Return a Markdown table of targets, with the required value, the measured value, and whether the target is met.

    A target without a result keeps its row from the table `before`.
    """
    kept = {row.split(" | ")[0]: row for row in before.splitlines()}
    rows = ["| target | required | measured | result |", "|---|---:|---:|---|"]
    for target in TARGETS:
        value = target.held(results)
        wanted = f"{'at most' if target.most else 'at least'} {target.wanted:,g}{target.unit}"
        measured = "" if value is None else f"{value:,.{target.digits}f}{target.unit}"
        verdict = "not measured" if value is None else "met" if target.met(value) else "**missed**"
        row = f"| {target.what} | {wanted} | {measured} | {verdict} |"
        rows.append(row if value is not None else kept.get(f"| {target.what}", row))
    return "\n".join(rows)


def left_lines(table: str) -> list[str]:
    """Return a Markdown list item for each missed target in a table, with the explanation in `Target.left`."""
    gone = {row.split(" | ")[0] for row in table.splitlines() if row.endswith("| **missed** |")}
    return [f"- *{target.what}*: {target.left}" for target in TARGETS if target.left and f"| {target.what}" in gone]


def missed(results: Results) -> list[str]:
    values = [(target, target.held(results)) for target in TARGETS]
    return [target.what for target, value in values if value is not None and not target.met(value)]


def _shape(results: Results, number: int) -> Any:
    return results["load"]["shapes"][number]


def _gpu(results: Results, line: str, key: str = "gib") -> float:
    return float(results["gpu"][line][key])


def _speed_kept(results: Results) -> float:
    """Return the speed of the fastest 4B configuration within the memory limit, relative to the 4B configuration with
    float32 master weights.
    """
    small = [name for name in ("4b-own-adamw_bf16", "4b-own-adamw8bit") if _gpu(results, name) <= FULL_GIB]
    best = max((_gpu(results, name, "tokens_per_s") for name in small), default=0.0)
    return best / _gpu(results, "4b-own-adamw", "tokens_per_s")


TARGETS = [
    Target(
        "rendering on all cores: speed relative to tokenization alone", 0.75, lambda r: r["render"]["share_of_encoding"]
    ),
    Target("rendering: speedup over transformers", 30, lambda r: r["render"]["times_transformers"], " times", 1),
    Target(
        "rendering a list of records on all cores: speedup over one thread",
        1.5,
        lambda r: r["render"]["times_threads"],
        " times",
    ),
    Target("chat templates: speedup over transformers", 10, lambda r: r["template"]["times_transformers"], " times", 1),
    Target(
        "chat templates: number of TRL's 41 templates that pass `chatmill certify`",
        37,
        lambda r: r["certify"]["certified"],
        "",
        0,
    ),
    Target(
        "chat templates: share of templates for which two independent methods find the assistant's answers",
        0.5,
        lambda r: r["certify"]["both_derivations"] / r["certify"]["templates"],
    ),
    Target(
        "packing: rows that differ from best-fit decreasing",
        0,
        lambda r: 0 if r["pack"]["plan"]["figures"]["equal_to_naive"] else 1,
        "",
        0,
        most=True,
    ),
    Target("packing: speedup over TRL", 100, lambda r: r["pack"]["plan"]["figures"]["times_trl"], " times", 1),
    Target("packing: peak memory", 500, lambda r: r["pack"]["memory"]["plan"] / 1e6, " MB", 0, most=True),
    Target(
        "splitting into stream blocks of 1024 tokens, one core",
        20,
        lambda r: r["pack"]["blocks"]["figures"]["mtok"]["1024"],
        " Mtok/s",
        0,
    ),
    Target(
        "splitting into stream blocks of 4096 tokens, one core",
        20,
        lambda r: r["pack"]["blocks"]["figures"]["mtok"]["4096"],
        " Mtok/s",
        0,
    ),
    Target(
        "preparing: speedup over TRL",
        60,
        lambda r: r["prepare"]["peers"]["trl"]["times"],
        " times",
        1,
        left="Runs on two cores of Intel Xeons were 57 to 79 times as fast as TRL. With SHA-256 instructions, "
        "tokenization takes 31% of the processor time, reading and hashing the records 9%, hashing the files of the "
        "shards 5%, and NumPy 10%. Without these instructions, hashing the files of the shards takes 24%. For 60 ms "
        "between rendering and writing, one process plans the shards while the other core is idle.",
    ),
    Target(
        "preparing with a chat template: speedup over TRL",
        60,
        lambda r: r["prepare_template"]["peers"]["trl"]["times"],
        " times",
        1,
        left="Two runs here took 2.5 s and 3.0 s (65 and 54 times as fast as TRL), because the speed of the machine "
        "varies; ChatML took 1.9 s and 2.3 s. Before the workers start, the template is run for every "
        "structure of conversations (24 structures), while nothing else can be done: 0.28 s of the 2.5 s. For 50,000 "
        "conversations, one process then takes 0.18 s to check the rows, 0.08 s to find the layouts, and 0.05 s to "
        "compute token positions.",
    ),
    Target(
        "preparing with a chat template: time relative to ChatML",
        1.3,
        lambda r: r["prepare_template"]["seconds"] / r["prepare_template"]["with_chatml"],
        " times",
        most=True,
        left="Before the workers start, the template is run for every structure of conversations (24 structures): "
        "0.28 s of the 2.5 s. Each worker then takes 0.13 s to compare cached traces with the template. For 50,000 "
        "conversations, one process takes 0.18 s to check the rows, 0.08 s to find the layouts, and 0.05 s to "
        "compute token positions. Runs took 1.22 to 1.37 times as long as with ChatML.",
    ),
    Target("preparing: speed relative to the floor", 0.5, lambda r: r["prepare"]["share_of_bare"]),
    Target(
        "preparing: peak memory of all processes",
        1200,
        lambda r: r["prepare"]["memory"]["chatmill"] / 1e6,
        " MB",
        0,
        most=True,
    ),
    Target(
        "preparing ten times the data: peak memory relative to the original data",
        1.10,
        lambda r: r["growth"]["sizes"][2]["prepare"]["memory"] / r["growth"]["sizes"][1]["prepare"]["memory"],
        " times",
        2,
        most=True,
        left="All processes together grow from 300 MB to 394 MB, while the workers' caches of tokenized words fill.",
    ),
    Target(
        "preparing on 16 cores: speedup over two cores",
        5,
        lambda r: r["cores"]["times"]["16"],
        " times",
        1,
        left="Measured on another machine, an Intel Xeon with 16 cores: on a file system in memory (`--folder "
        "/dev/shm`), 500,000 conversations take 2.44 s on 16 cores and 10.2 s on two (4.2 times), on disk 2.41 s and "
        "8.92 s (3.7 times). Rendering takes 1.24 s instead of 6.44 s: 16 processes together need a third more "
        "processor time than two for the same units. Writing takes 1.2 s instead of 3.8 s: 21 shards need two "
        "rounds, and a shard takes half as long again as with two processes. The work of the main process is serial: "
        "it takes 0.77 s of processor time, 2.7% of the total, and during 0.2 s of it, while it plans the shards and "
        "starts the writers, the other processes wait.",
    ),
    Target("start-up: `chatmill --help`", 0.15, lambda r: r["startup"]["help_s"], " s", most=True),
    Target(
        "start-up: `chatmill prepare` for 100 records with a vocabulary of 128,000 tokens",
        1,
        lambda r: r["startup"]["prepare_s"],
        " s",
        most=True,
        left="Runs on two other Intel Xeons took 0.53 s and 0.73 s. Python's imports take two thirds of the time: "
        "typer and rich a quarter of that, numpy a seventh.",
    ),
    Target(
        "dataset of 20 million episodes: time to open it and read one episode",
        200,
        lambda r: r["open"]["open_ms"],
        " ms",
        most=True,
    ),
    Target(
        "dataset of 20 million episodes: time to read a random episode, cached",
        50,
        lambda r: r["open"]["read_us"]["tokens and mask"][0],
        " µs",
        0,
        most=True,
    ),
    Target(
        "dataset of 20 million episodes: time to read a whole row with its spans, cached",
        50,
        lambda r: r["open"]["read_us"]["rows with spans and origins"][0],
        " µs",
        0,
        most=True,
        left="Reading the tokens and the mask takes 18 µs of the 192 µs (on another Intel Xeon, 14 µs of 75 µs); "
        "building the spans and the origin of the row takes the rest.",
    ),
    Target(
        "loading padded batches of (8, 512): speedup over datasets and TRL",
        25,
        lambda r: _shape(r, 0)["times"],
        " times",
        1,
    ),
    Target(
        "loading packed batches of (16, 4096): speedup over datasets and TRL",
        50,
        lambda r: _shape(r, 1)["times"],
        " times",
        1,
    ),
    Target(
        "loading packed batches of (16, 4096): speedup over datasets with numpy rows",
        8,
        lambda r: _shape(r, 1)["times_numpy"],
        " times",
        1,
        left="Runs on the same processor were 6.9 to 8.2 times as fast. A plain copy of the arrays of a batch (1.9 "
        "MB) takes 0.20 ms of the 0.54 ms; computing labels, weights, positions and segments takes the rest.",
    ),
    Target(
        "loading packed batches of (16, 4096): slowdown with an audit log",
        1.3,
        lambda r: _shape(r, 1)["batch_ms"]["logged"] / _shape(r, 1)["batch_ms"]["ours"],
        " times",
        most=True,
        left="Building the rows of a batch takes 0.66 ms, and hashing their 272 KB with SHA-256 takes another 0.31 ms "
        "on a processor without SHA-256 instructions. With them, on another Intel Xeon, it is 0.38 ms and 0.16 ms "
        "(1.18 to 1.45 times).",
    ),
    Target(
        "shuffled order of 10^9 episodes: time to look up one position",
        1,
        lambda r: r["load"]["billion"]["order_ms"],
        " ms",
        most=True,
    ),
    Target(
        "loading from 10^9 episodes: memory", 300, lambda r: r["load"]["billion"]["memory"] / 1e6, " MB", 0, most=True
    ),
    Target(
        "mixing sources: largest deviation from a source's expected number of rows, over 100,000 rows",
        1,
        lambda r: r["mix"]["farthest_rows"],
        "",
        2,
        most=True,
    ),
    Target(
        "mixing sources by trained tokens: largest deviation from a source's requested share",
        0.5,
        lambda r: 100 * r["mix"]["trained_error"],
        "%",
        2,
        most=True,
    ),
    Target(
        "loading from a bucket, cold cache: share of the bandwidth (100 MB/s) used until the first batch",
        0.8,
        lambda r: r["remote"]["cold_first"],
    ),
    Target(
        "loading from a bucket, cold cache: share of the bandwidth (100 MB/s) used over a shuffled epoch",
        0.8,
        lambda r: r["remote"]["cold_epoch"],
        left="A shuffled epoch needs nearly all files for its first batch, so downloading and loading do not overlap.",
    ),
    Target(
        "loading from a bucket, warm cache: speed relative to loading a local dataset",
        0.95,
        lambda r: r["remote"]["warm"],
    ),
    Target(
        "training a 0.6B model: tokens per second (padding not counted)",
        110_000,
        lambda r: _gpu(r, "0.6b-own-adamw", "tokens_per_s"),
        "",
        0,
    ),
    Target(
        "training a 0.6B model: tokens per second (padding not counted), stretch goal",
        TOKENS,
        lambda r: _gpu(r, "0.6b-own-adamw", "tokens_per_s"),
        "",
        0,
    ),
    Target("training a 0.6B model: GPU memory", 60, lambda r: _gpu(r, "0.6b-own-adamw"), " GiB", 1, most=True),
    Target(
        "training a 0.6B model: share of time spent waiting for data",
        100 * WAIT,
        lambda r: 100 * _gpu(r, "0.6b-own-adamw", "wait"),
        "%",
        2,
        most=True,
    ),
    Target(
        "training a 150M model: speed relative to the fastest matrix product",
        100 * SHARE,
        lambda r: 100 * _gpu(r, "150m-own-adamw", "tflops") / _gpu(r, "150m-own-adamw", "best_tflops"),
        "%",
        0,
    ),
    Target(
        f"training a 4B model in {FULL_GIB:.0f} GiB: speed relative to training with float32 master weights",
        SPEED,
        _speed_kept,
    ),
    Target(
        "training an 8B model with LoRA: GPU memory", LORA_GIB, lambda r: _gpu(r, "8b-hf-lora"), " GiB", 1, most=True
    ),
    Target(
        "training an 8B model with QLoRA: GPU memory", QLORA_GIB, lambda r: _gpu(r, "8b-hf-qlora"), " GiB", 1, most=True
    ),
    Target(
        "training an 8B model with QLoRA and activation offloading: GPU memory",
        OFFLOAD_GIB,
        lambda r: _gpu(r, "8b-hf-qlora-offload"),
        " GiB",
        1,
        most=True,
    ),
    Target(
        "building rollout targets: number per second on one core",
        1000,
        lambda r: r["rollout"]["targets_per_second"],
        "",
        0,
        left="A target takes 2.3 ms (on another Intel Xeon, 1.4 ms), two thirds of it for encoding the missed "
        "objects. The floor (decoding an answer, parsing it and encoding the true objects) takes 9.8 ms.",
    ),
    Target(
        "viewer with a million episodes: time to load the first page",
        300,
        lambda r: max(r["view"]["first_page_ms"]),
        " ms",
        0,
        most=True,
    ),
    Target(
        "viewer with a million episodes: time to find the first match",
        2,
        lambda r: r["view"]["search_s"]["a text in one episode"] if r["view"]["found"] else float("inf"),
        " s",
        2,
        most=True,
    ),
]
