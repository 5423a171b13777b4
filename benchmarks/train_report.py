"""Report the results of benchmarks/train.py: a table of all configurations, and whether each target is met."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from train_lines import TRAIN_LINES, TrainLine

Found = dict[str, Any]
"""Result of one configuration: the measured figures, or an `error`."""

TOKENS, SHARE, WAIT = 135_000, 0.45, 0.01
LORA_GIB, FULL_GIB, QLORA_GIB, OFFLOAD_GIB = 34.0, 36.0, 24.0, 16.0
SPEED = 0.9
"""Minimum speed of full fine-tuning without float32 master weights, relative to the speed with them."""


def read_results(files: list[Path]) -> dict[str, Found]:
    """Return the last result of each configuration, in the order of `TRAIN_LINES`."""
    found: dict[str, Found] = {}
    for file in files:
        if file.exists():
            records = [json.loads(text) for text in file.read_text("utf-8").splitlines() if text.strip()]
            found |= {record["line"]: record for record in records}
    return {name: found[name] for name in TRAIN_LINES if name in found}


def report(found: dict[str, Found]) -> int:
    """Print the results of all configurations, and all targets; return 1 if a target is missed."""
    if any("error" not in one for one in found.values()):
        print(measured_on(found))
    heads = f"{'tok/s':>9}{'GiB':>7}{'reserved':>10}{'ms':>8}{'wait':>8}{'matmul TFLOP/s':>16}"
    print(f"{'':<31}{'weights/grads/state/compute':<28}{heads}")
    for name, one in found.items():
        print(f"{name:<31}{TRAIN_LINES[name].precision!s:<28}{one.get('error') or columns(one)}")
    met = dict(targets(found))
    for target, is_met in met.items():
        print(f"{'met   ' if is_met else 'MISSED'}  {target}")
    return 0 if all(met.values()) else 1


def columns(one: Found) -> str:
    wait = "" if one["wait"] is None else f"{100 * one['wait']:.2f}%"
    best = f"{one['best_tflops']:.0f}" if one.get("best_tflops") else ""
    figures = f"{one['tokens_per_s']:>9,.0f}{one['gib']:>7.1f}{one['reserved_gib']:>10.1f}{one['step_ms']:>8.1f}"
    return f"{figures}{wait:>8}{best:>16}"


def measured(one: Found) -> str:
    """Return the speed, memory use and loss of a configuration as one line of text."""
    return (
        f"{one['tokens_per_s']:,.0f} tok/s, {one['gib']:.1f} GiB ({one['reserved_gib']:.1f} reserved), "
        f"{one['step_ms']:.0f} ms per step, loss {one['first_loss']:.2f} to {one['last_loss']:.2f}, "
        f"{one['total_s']:.0f} s in total, cache {one['cache']}"
    )


def measured_on(found: dict[str, Found]) -> str:
    """Return the GPU and the library versions with which the results were measured."""
    devices = {one["device"]: None for one in found.values() if "device" in one}
    versions: dict[str, dict[str, None]] = {}
    for one in found.values():
        for name, number in one.get("versions", {}).items():
            versions.setdefault(name, {})[number] = None
    named = [f"{name} {' and '.join(numbers)}" for name, numbers in versions.items()]
    return ", ".join([" and ".join(devices), *named])


def targets(found: dict[str, Found]) -> Iterator[tuple[str, bool]]:
    """Yield the performance targets for configurations that were measured on a GPU, and whether each target is met."""
    good = {name: one for name, one in found.items() if "error" not in one and one.get("best_tflops")}
    if one := good.get("0.6b-own-adamw"):
        yield (
            f"0.6B model, float32 master weights: at least {TOKENS:,} tokens/s (padding not counted)",
            one["tokens_per_s"] >= TOKENS,
        )
        yield f"0.6B model: less than {WAIT:.0%} of the time spent waiting for data", one["wait"] < WAIT
    if one := good.get("150m-own-adamw"):
        yield (
            f"150M model: at least {SHARE:.0%} of the speed of the fastest matrix product",
            one["tflops"] >= SHARE * one["best_tflops"],
        )
    for name, most in (("8b-hf-lora", LORA_GIB), ("8b-hf-qlora", QLORA_GIB), ("8b-hf-qlora-offload", OFFLOAD_GIB)):
        if one := good.get(name):
            yield f"{name}: at most {most:.0f} GiB", one["gib"] <= most
    masters = good.get("4b-own-adamw")
    small = [one for name, one in good.items() if name in ("4b-own-adamw_bf16", "4b-own-adamw8bit")]
    if masters and small:
        least = SPEED * masters["tokens_per_s"]
        held = any(one["gib"] <= FULL_GIB and one["tokens_per_s"] >= least for one in small)
        yield (
            f"4B model, full fine-tuning: at most {FULL_GIB:.0f} GiB, "
            f"and at least {SPEED} times the speed with float32 master weights",
            held,
        )
    for line, peer in pairs(good):
        ours, theirs = good[line.name], good[peer.name]
        yield f"{line.name}: no slower than {peer.name}", ours["tokens_per_s"] >= theirs["tokens_per_s"]
        yield f"{line.name}: uses no more memory than {peer.name}", ours["gib"] <= theirs["gib"]


def pairs(found: dict[str, Found]) -> Iterator[tuple[TrainLine, TrainLine]]:
    """Yield pairs of a chatmill configuration and a peer configuration with the same model and precision."""
    lines = [TRAIN_LINES[name] for name in found]
    for line in lines:
        for peer in lines:
            same = (line.model, line.precision) == (peer.model, peer.precision)
            if same and line.side == "chatmill" and peer.side == "peer" and not line.offload:
                yield line, peer
