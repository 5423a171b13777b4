"""Run the fault-injection trials in parallel, each in a separate process, and print a table of results.

    python tests/fault_injection/run.py                       run all trials and update docs/explanation/reliability.md
    python tests/fault_injection/run.py --short               run the same trials at small sizes
    python tests/fault_injection/run.py --only kill --seed 7  run the trials whose name contains a word
    python tests/fault_injection/run.py --planted             plant bugs in chatmill; a trial must detect each of them

The exit code is 1 if data was lost or silently wrong, or if a trial did not detect a planted bug.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import select
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
if __name__ == "__main__":
    from fault_injection.failing_calls import start_again_with_shim

    start_again_with_shim()
# Only a process with one thread can fork safely, so limit the threads before numpy and torch are imported.
os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"), "1")

from fault_injection import TESTS
from fault_injection.planted import PLANTED
from fault_injection.processes import Child, Ended, begin, load_torch
from fault_injection.trial import Tally, Trial
from fault_injection.trials import TRIALS

PAGE = TESTS.parent / "docs" / "explanation" / "reliability.md"
BEGIN, END = "<!-- gauntlet: begin -->", "<!-- gauntlet: end -->"
AT_ONCE = max(2, os.cpu_count() or 1)
TRIAL_CPU_SECONDS = 3600.0
"""CPU time limit of a trial, including all its child processes."""

Work = tuple[int, Callable[[], Any]]
"""Number of CPU cores that a task needs, and the function that runs the task."""


def run_at_once(works: Sequence[Work]) -> Iterator[tuple[int, Ended, float]]:
    waiting = sorted(range(len(works)), key=lambda number: works[number][0])
    running: dict[int, tuple[int, Child, float]] = {}
    while waiting or running:
        while waiting and sum(works[each[0]][0] for each in running.values()) + works[waiting[0]][0] <= AT_ONCE:
            number = waiting.pop(0)
            child = begin(works[number][1])
            running[child.result] = number, child, time.perf_counter()
        ready, _, _ = select.select(list(running), [], [], 1.0)
        stuck = [fd for fd, (_, child, _) in running.items() if child.why_stuck(TRIAL_CPU_SECONDS)]
        for fd in {*ready, *stuck}:
            number, child, began = running.pop(fd)
            yield number, child.end(TRIAL_CPU_SECONDS), time.perf_counter() - began


def tallies(trials: Sequence[Trial], *, short: bool, seed: int, say: Callable[[str], None]) -> list[Tally]:
    works: list[Work] = [
        (trial.cores, lambda trial=trial: trial.run(trial.short if short else trial.full, seed).to_json())
        for trial in trials
    ]
    if len(trials) > 1:
        load_torch()
    results: dict[int, Tally] = {}
    for number, ended, seconds in run_at_once(works):
        if ended.value is not None:
            ended.value.pop("tried")
            tally = Tally(**ended.value)
        else:
            tally = Tally(trials[number].name, broke=ended.broke or ended.refused or "killed", seconds=seconds)
        results[number] = tally
        say(f"{tally.seconds:7.1f} s  {tally.name}: {in_words(tally)}")
    return [results[number] for number in range(len(trials))]


def in_words(tally: Tally) -> str:
    if tally.broke and not tally.tried:
        return f"BROKE: {tally.broke}"
    if tally.skipped:
        return f"skipped: {tally.skipped}"
    bad = f", {tally.lost:,} LOST, {tally.wrong:,} SILENTLY WRONG" if tally.is_red else ""
    notes = "".join(f", {count:,} {name}" for name, count in tally.notes.items())
    broke = f"; BROKE: {tally.broke}" if tally.broke else ""
    return f"{tally.tried:,} tried, {tally.survived:,} survived, {tally.found:,} found{bad}{notes}{broke}"


HEAD = ("trial", "tried", "survived", "found", "lost", "silently wrong", "seconds")


def rows_of(results: Sequence[Tally]) -> list[list[str]]:
    numbers = [[each.tried, each.survived, each.found, each.lost, each.wrong] for each in results]
    total = [sum(column) for column in zip(*numbers, strict=True)]
    named = [*zip((each.name for each in results), numbers, (each.seconds for each in results), strict=True)]
    named.append(("all", total, sum(each.seconds for each in results)))
    return [[name, *(f"{number:,}" for number in counts), f"{seconds:.0f}"] for name, counts, seconds in named]


def plain_table(results: Sequence[Tally]) -> str:
    rows = [list(HEAD), *rows_of(results)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    return "\n".join(
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    )


def page_part(trials: Sequence[Trial], results: Sequence[Tally], *, seed: int, seconds: float) -> str:
    lines = [
        f"`make gauntlet` (seed {seed}, {platform.machine()}, {os.cpu_count()} cores, {seconds / 60:.0f} minutes):",
        "",
        f"| {' | '.join(HEAD)} |",
        f"|---|{'---:|' * (len(HEAD) - 1)}",
        *(f"| {' | '.join(row)} |" for row in rows_of(results)),
        "",
        "What each trial does, and what must be true afterwards:",
        "",
    ]
    for trial, tally in zip(trials, results, strict=True):
        skipped = f" Skipped: {tally.skipped}." if tally.skipped else ""
        line = f"- **{trial.name}**: {trial.does}.{skipped}"
        lines += wrap(line, 118, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines)


def write_page(part: str) -> None:
    text = PAGE.read_text()
    before, after = text.split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{part}\n\n{END}{after.split(END)[1]}")


def try_planted(words: Sequence[str], seed: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    chosen = [fault for fault in PLANTED if _named(fault.name, words) or _named(fault.trial.name, words)]

    def one(fault: Any) -> dict[str, Any]:
        fault.plant()
        return fault.trial.run(fault.size, seed).to_json()

    if len(chosen) > 1:
        load_torch()
    results: dict[int, dict[str, Any]] = {}
    for number, ended, seconds in run_at_once([(1, lambda fault=fault: one(fault)) for fault in chosen]):
        fault = chosen[number]
        tally = ended.value or {"lost": 0, "wrong": 0, "examples": [f"broke: {ended.broke or ended.refused}"]}
        red = bool(tally["lost"] or tally["wrong"])
        results[number] = {
            "fault": fault.name,
            "trial": fault.trial.name,
            "noticed": red,
            "examples": tally["examples"],
        }
        example = tally["examples"][0] if tally["examples"] else "no attempt was lost or wrong"
        say(f"{seconds:7.1f} s  {'noticed' if red else 'NOT NOTICED'}: {fault.name} ({fault.trial.name}): {example}")
    return [results[number] for number in range(len(chosen))]


def _named(name: str, words: Sequence[str]) -> bool:
    return not words or any(word.lower() in name.lower() for word in words)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="use small sizes, for a run of about two minutes")
    parser.add_argument(
        "--only", action="append", default=[], metavar="WORD", help="run only trials whose name contains this word"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--planted",
        action="store_true",
        help="test the trials: plant bugs in chatmill and check that the trials notice them",
    )
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    args = parser.parse_args(argv)
    out = sys.stdout
    if args.json:
        # Standard output must contain only JSON, so all other output goes to standard error.
        out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def say(line: str) -> None:
        print(line, file=sys.stderr if args.json else sys.stdout, flush=True)

    began = time.perf_counter()
    if args.planted:
        noticed = try_planted(args.only, args.seed, say)
        if args.json:
            print(json.dumps(noticed, indent=1), file=out, flush=True)
        else:
            print(f"{sum(each['noticed'] for each in noticed)} of {len(noticed)} planted faults noticed")
        return 0 if noticed and all(each["noticed"] for each in noticed) else 1
    trials = [trial for trial in TRIALS if _named(trial.name, args.only)]
    if not trials:
        parser.error(f"no trial has a matching name; choose from: {', '.join(trial.name for trial in TRIALS)}")
    results = tallies(trials, short=args.short, seed=args.seed, say=say)
    seconds = time.perf_counter() - began
    if args.json:
        all_of_it = [each.to_json() for each in results]
        report = {"seed": args.seed, "short": args.short, "seconds": seconds, "trials": all_of_it}
        print(json.dumps(report, indent=1), file=out, flush=True)
    else:
        print(f"\n{plain_table(results)}\n\n{seconds / 60:.1f} minutes")
        for each in results:
            for line in [each.broke] if each.broke else each.examples:
                print(f"{each.name}: {line}")
    if not args.short and not args.only:
        write_page(page_part(trials, results, seed=args.seed, seconds=seconds))
        say(f"written: {PAGE.relative_to(TESTS.parent)}")
    return 1 if any(each.is_red for each in results) else 0


if __name__ == "__main__":
    sys.exit(main())
