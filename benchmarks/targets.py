"""The numbers that chatmill set out to reach, each held against a run: met or missed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lines import Results


@dataclass(frozen=True)
class Target:
    """At least (or at most) so much of one figure."""

    what: str
    wanted: float
    figure: Callable[[Results], float]
    unit: str = ""
    digits: int = 2
    most: bool = False
    """The figure is to stay at or below it."""

    def held(self, results: Results) -> float | None:
        """The figure of a run, or None if it was not measured."""
        try:
            return float(self.figure(results))
        except (KeyError, IndexError, TypeError):
            return None

    def met(self, value: float) -> bool:
        return value <= self.wanted if self.most else value >= self.wanted


def target_table(results: Results) -> str:
    """Markdown: what was wanted, what was measured, met or missed."""
    rows = ["| target | wanted | measured | |", "|---|---:|---:|---|"]
    for target in TARGETS:
        value = target.held(results)
        wanted = f"{'at most' if target.most else 'at least'} {target.wanted:,g}{target.unit}"
        measured = "" if value is None else f"{value:,.{target.digits}f}{target.unit}"
        verdict = "not measured" if value is None else "met" if target.met(value) else "**missed**"
        rows.append(f"| {target.what} | {wanted} | {measured} | {verdict} |")
    return "\n".join(rows)


def missed(results: Results) -> list[str]:
    """What was measured and is not met."""
    values = [(target, target.held(results)) for target in TARGETS]
    return [target.what for target, value in values if value is not None and not target.met(value)]


def _shape(results: Results, number: int) -> Any:
    return results["load"]["shapes"][number]


def _gpu(results: Results, work: str, key: str, end: int) -> float:
    return float(results["gpu"]["figures"][work][key][end])


TARGETS = [
    Target("rendering: speed of bare encoding", 0.6, lambda r: r["render"]["share_of_encoding"]),
    Target("rendering: as fast as transformers", 30, lambda r: r["render"]["times_transformers"], " times", 1),
    Target("chat templates: as fast as transformers", 10, lambda r: r["template"]["times_transformers"], " times", 1),
    Target("chat templates of TRL's 41 that certify", 37, lambda r: r["certify"]["certified"], "", 0),
    Target(
        "chat templates: share that two derivations prove",
        0.5,
        lambda r: r["certify"]["both_derivations"] / r["certify"]["templates"],
    ),
    Target(
        "packing: rows in other bins than best fit decreasing puts them",
        0,
        lambda r: 0 if r["pack"]["plan"]["figures"]["equal_to_naive"] else 1,
        "",
        0,
        most=True,
    ),
    Target("packing: as fast as TRL", 100, lambda r: r["pack"]["plan"]["figures"]["times_trl"], " times", 1),
    Target("packing: memory", 500, lambda r: r["pack"]["memory"]["plan"] / 1e6, " MB", 0, most=True),
    Target("blocks of 1024, one core", 20, lambda r: r["pack"]["blocks"]["figures"]["mtok"]["1024"], " Mtok/s", 0),
    Target("blocks of 4096, one core", 20, lambda r: r["pack"]["blocks"]["figures"]["mtok"]["4096"], " Mtok/s", 0),
    Target("preparing: as fast as TRL", 50, lambda r: r["prepare"]["times_trl"], " times", 1),
    Target(
        "preparing by a chat template: as fast as TRL", 10, lambda r: r["prepare_template"]["times_trl"], " times", 1
    ),
    Target("preparing: speed of the bare parts", 0.5, lambda r: r["prepare"]["share_of_bare"]),
    Target(
        "preparing: memory of all processes",
        1200,
        lambda r: r["prepare"]["memory"]["chatmill"] / 1e6,
        " MB",
        0,
        most=True,
    ),
    Target(
        "preparing: memory for ten times the data",
        1.10,
        lambda r: r["growth"]["sizes"][2]["prepare"]["memory"] / r["growth"]["sizes"][1]["prepare"]["memory"],
        " times",
        2,
        most=True,
    ),
    Target("20 million episodes: opened", 200, lambda r: r["open"]["open_ms"], " ms", most=True),
    Target(
        "20 million episodes: a random one read, warm",
        50,
        lambda r: r["open"]["read_us"]["tokens and mask"][0],
        " µs",
        0,
        most=True,
    ),
    Target(
        "20 million episodes: a whole row with its spans read, warm",
        50,
        lambda r: r["open"]["read_us"]["rows with spans and origins"][0],
        " µs",
        0,
        most=True,
    ),
    Target("batches of (8, 512): as fast as datasets and TRL", 25, lambda r: _shape(r, 0)["times"], " times", 1),
    Target("batches of (16, 4096): as fast as datasets and TRL", 30, lambda r: _shape(r, 1)["times"], " times", 1),
    Target("the same, further", 50, lambda r: _shape(r, 1)["times"], " times", 1),
    Target("order of a position among 10^9", 1, lambda r: r["load"]["billion"]["order_ms"], " ms", most=True),
    Target(
        "loader over 10^9 episodes: memory", 300, lambda r: r["load"]["billion"]["memory"] / 1e6, " MB", 0, most=True
    ),
    Target(
        "mixing: rows from its share after any of 100,000", 1, lambda r: r["mix"]["farthest_rows"], "", 2, most=True
    ),
    Target(
        "mixing by trained tokens: off its share", 0.5, lambda r: 100 * r["mix"]["trained_error"], " %", 2, most=True
    ),
    Target("training 0.6 B: real tokens", 90_000, lambda r: _gpu(r, "chatmill", "tokens_per_s", 0), " /s", 0),
    Target("the same, further", 110_000, lambda r: _gpu(r, "chatmill", "tokens_per_s", 0), " /s", 0),
    Target("training 0.6 B: GPU memory", 60, lambda r: _gpu(r, "chatmill", "gib", 1), " GiB", 1, most=True),
    Target(
        "training 0.6 B: time that waits for data",
        1,
        lambda r: 100 * _gpu(r, "chatmill", "wait", 1),
        " %",
        2,
        most=True,
    ),
    Target(
        "training 150 M: of the best matrix product",
        45,
        lambda r: 100 * _gpu(r, "chatmill-150M", "tflops", 0) / r["gpu"]["best_tflops"][1],
        " %",
        0,
    ),
    Target("rollout targets, one core", 200, lambda r: r["rollout"]["targets_per_second"], " /s", 0),
    Target(
        "viewer, a million episodes: first page", 300, lambda r: max(r["view"]["first_page_ms"]), " ms", 0, most=True
    ),
    Target(
        "viewer, a million episodes: first hit",
        2,
        lambda r: r["view"]["search_s"]["a text of the last episodes alone"] if r["view"]["found"] else float("inf"),
        " s",
        2,
        most=True,
    ),
]
