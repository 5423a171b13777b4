"""docs/benchmarks.md, made whole from the results of a run: what is equal, then what is faster, then why.

The prose stands in texts.toml.
"""

from __future__ import annotations

import re
import textwrap
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flame import hottest
from lines import LINES, Line, Results, digits, lines, megabytes, seconds
from targets import TARGETS, missed, target_table

TEXTS = tomllib.loads((Path(__file__).resolve().parent / "texts.toml").read_text("utf-8"))


def page(results: Results) -> str:
    """The page in Markdown. A part that was not measured has no section."""
    parts = [_head(results), _targets(results)]
    for names, title, text in SECTIONS:
        measured = [name for name in names if name in results]
        if measured:
            shown = [line for name in measured for line in LINES[name](results[name])]
            parts += [f"## {title}", _wrapped(*text(results)), table(shown)]
    parts += _growth(results) if "growth" in results else []
    parts += _training(results["gpu"])
    parts += _profiles(results) if "profiles" in results else []
    return "\n\n".join(parts) + "\n"


def table(shown: list[Line]) -> str:
    """Comparisons side by side; a column that no line fills is left out."""
    rows = [
        {
            "": line.what,
            "chatmill": line.ours,
            "floor": line.floor,
            "of the floor's speed": "" if line.share is None else f"{line.share:.2f}",
            "peer": ", ".join(part for part in (line.peer, line.theirs) if part),
            "times the peer": _times(line.times),
            "peak memory": megabytes(*line.memory),
        }
        for line in shown
    ]
    names = [name for name in rows[0] if not name or any(row[name] for row in rows)]
    right = {"chatmill", "of the floor's speed", "times the peer", "peak memory"}
    return _markdown(names, [[row[name] for name in names] for row in rows], right={*right})


def _markdown(names: list[str], rows: list[list[str]], *, right: set[str]) -> str:
    marks = ["---:" if name in right else "---" for name in names]
    out = ["| " + " | ".join(names) + " |", "|" + "|".join(marks) + "|"]
    return "\n".join(out + ["| " + " | ".join(row) + " |" for row in rows])


def _times(times: float | None) -> str:
    if times is None:
        return ""
    return digits(times) if times >= 1 else f"{times:.2f}: the peer is faster"


def _say(name: str, **values: Any) -> str:
    return " ".join(TEXTS[name].format(**values).split())


def _wrapped(*said: str) -> str:
    """A paragraph in lines; code and the words of a link stay on one."""
    kept = re.sub(r"`[^`]*`|\[[^]]*\]\(", lambda found: found[0].replace(" ", "\0"), " ".join(said))
    return textwrap.fill(kept, 120, break_long_words=False, break_on_hyphens=False).replace("\0", " ")


def _head(results: Results) -> str:
    where = "Its parts were measured at different times."
    if about := results.get("machine"):
        where = _say("where", gib=about["memory"] / 2**30, minutes=about["seconds"] / 60, **about)
        where += f" {TEXTS['quick']}" if about["quick"] else ""
    if data := results.get("data"):
        own = _say("data_own", what=" and ".join(data["own"])) if data["own"] else _say("data_made")
        where += " " + _say("data", conversations=data["conversations"], megabytes=data["bytes"] / 1e6, own=own)
    faster = [line.what for line in lines(results) if line.times is not None and line.times < 1]
    leaner = [line.what for line in lines(results) if len(line.memory) == 2 and line.memory[1] < line.memory[0]]
    how = [_say("how")]
    how += [_say(text, what="; ".join(what)) for text, what in (("slower", faster), ("larger", leaner)) if what]
    chart = "![How many times as fast as each peer](benchmarks.svg)"
    return "\n\n".join(["# Benchmarks", _wrapped(_say("head", where=where)), _wrapped(*how), chart])


def _targets(results: Results) -> str:
    known = sum(target.held(results) is not None for target in TARGETS)
    said = _say("targets", met=known - len(missed(results)), known=known)
    return "\n\n".join(["## Targets", _wrapped(said), target_table(results)])


# What is said above each table: what was compared, and whether both sides agree.


def _rendering(results: Results) -> list[str]:
    found = results["render"]
    return [_say("render", mtok=found["tokens"] / 1e6, **found, **found["differ"])]


def _template(results: Results) -> list[str]:
    differ = results["template"]["differ"]
    said = [_say("template", **differ)]
    for side, text in (("peer", "template_there"), ("chatmill", "template_here")):
        if tokens := differ["trained_by_one"][side]:
            names = {"Ċ": "\\n", "Ġ": " "}
            shown = ", ".join(f"`{names.get(token, token)}` ({count:,} times)" for token, count in tokens.items())
            said.append(_say(text, tokens=shown))
    if certify := results.get("certify"):
        names_of = ", ".join(f"`{name}`" for name in certify["refused"])
        said.append(_say("certify", **{**certify, "refused": f" (not {names_of})" if names_of else ""}))
    return said


def _packing(results: Results) -> list[str]:
    found = results["pack"]
    plan, figures = found["plan"]["timings"], found["plan"]["figures"]
    said = _say(
        "pack",
        title=found["plan"]["title"],
        where="in the row where" if figures["equal_to_naive"] else "**not** in the row where",
        trl_rows=plan[2]["rows"],
        bins=figures["bins"],
        unlike=figures["rows_unlike_trl"],
        batch_rows=plan[4]["rows"],
        batch_fill=plan[4]["fill"],
        fill=plan[0]["fill"],
    )
    return [said, _say("pack_torchtune" if "order" in found else "pack_no_torchtune"), _say("pack_blocks")]


def _preparing(results: Results) -> list[str]:
    said = []
    if found := results.get("prepare"):
        bare = ", ".join(f"{name} {seconds(taken)}" for name, taken in found["bare"].items())
        start = seconds(found["start_up"])
        size = {"megabytes": found["bytes"] / 1e6, "mtok": found["tokens"] / 1e6}
        said.append(_say("prepare", bare=bare, at_once=seconds(found["bare_at_once"]), start_up=start, **size))
        said += _beside_trl(found, "prepare_trl")
    if found := results.get("prepare_template"):
        said.append(_say("prepare_template", mtok=found["tokens"] / 1e6, **found))
        said += _beside_trl(found, "prepare_template_trl")
    return said


def _beside_trl(found: Any, text: str) -> list[str]:
    if not (peer := found.get("trl")):
        return []
    differ = found["differ"]
    cut = differ["peer_alone"] and differ["peer_alone"] == differ["peer_alone_cut"]
    why = _say("prepare_cut") if cut else ""
    start = seconds(peer["start_up"])
    return [_say(text, start_up=start, why=why, alike=differ["alike"], differ=differ["peer_alone"])]


def _loading(results: Results) -> list[str]:
    found = results["load"]
    compared = [shape["compared"] for shape in found["shapes"]]
    return [
        _say(
            "load",
            conversations=found["conversations"],
            seen=" and ".join(f"{one['conversations']:,}" for one in compared),
            differ=" and ".join(str(one["differ"]) for one in compared),
            numpy=" and ".join(digits(shape["times_numpy"]) for shape in found["shapes"]),
        )
    ]


def _opening(results: Results) -> list[str]:
    said = [_say("open")]
    if found := results.get("open"):
        speeds = " and ".join(f"{speed:.0f} Mtok/s as {bits}" for bits, speed in found["write_mtok"].items())
        said.append(_say("open_wrote", speeds=speeds))
    return said


def _rollouts(results: Results) -> list[str]:
    return [_say("rollout", scans=digits(results["rollout"]["scans_per_second"]))]


def _viewing(results: Results) -> list[str]:
    found = results["view"]
    hits = "; ".join(f"{what} {seconds(taken)}" for what, taken in found["search_s"].items())
    before, after = found["first_page_ms"]
    size = {"index_mb": found["index_bytes"] / 1e6, "scan": seconds(found["scan_s"])}
    return [_say("view", before=before, after=after, hits=hits, **size, **found)]


SECTIONS: list[tuple[tuple[str, ...], str, Callable[[Results], list[str]]]] = [
    (("render",), "Rendering", _rendering),
    (("template",), "Chat templates", _template),
    (("pack",), "Packing and blocks", _packing),
    (("prepare", "prepare_template"), "Preparing", _preparing),
    (("load",), "Loading", _loading),
    (("open", "growth"), "Opening and verifying", _opening),
    (("rollout",), "Rollout targets", _rollouts),
    (("view",), "Viewing", _viewing),
]


def _growth(results: Results) -> list[str]:
    sizes = results["growth"]["sizes"]
    shown: list[tuple[str, Callable[[Any], str]]] = [
        ("tokens", lambda size: f"{size['tokens'] / 1e6:,.1f} M"),
        ("prepare", lambda size: seconds(size["prepare"]["seconds"])),
        ("prepare, M tokens a second", lambda size: digits(size["tokens"] / size["prepare"]["seconds"] / 1e6)),
        ("prepare, memory of all processes", lambda size: megabytes(size["prepare"]["memory"])),
        ("open and read one", lambda size: seconds(size["open"]["ms"] / 1e3)),
        ("open, memory", lambda size: megabytes(size["open"]["memory"])),
        ("verify", lambda size: seconds(size["verify"]["quick_s"])),
        ("verify --full", lambda size: seconds(size["verify"]["full_s"])),
        ("verify --full, memory", lambda size: megabytes(size["verify"]["memory"])),
        ("a batch of (16, 4096)", lambda size: seconds(size["load"]["ms"] / 1e3)),
        ("the first batch", lambda size: seconds(size["load"]["first_ms"] / 1e3)),
        ("load, memory", lambda size: megabytes(size["load"]["memory"])),
    ]
    names = [f"{size['conversations']:,}" for size in sizes]
    said = [_say("growth")]
    if peer := results.get("prepare", {}).get("trl"):
        memory = megabytes(results["prepare"]["memory"]["trl"])
        count = results["prepare"]["conversations"]
        said.append(_say("growth_trl", conversations=count, seconds=seconds(peer["seconds"]), memory=memory))
    rows = [[what, *(show(size) for size in sizes)] for what, show in shown]
    return ["## Growth", _wrapped(*said), _markdown(["conversations", *names], rows, right={*names})]


def _range(ends: list[float] | None, show: str) -> str:
    if ends is None:
        return ""
    low, high = (show.format(end) for end in ends)
    return low if low == high else f"{low} to {high}"


def _training(found: Any) -> list[str]:
    best = found["best_tflops"]
    names = ["", "real tokens/s", "GiB", "ms a step", "wait for data", "TFLOP/s", "of the best product"]
    rows = []
    for one in found["figures"].values():
        wait = None if one["wait"] is None else [100 * end for end in one["wait"]]
        share = None if one["tflops"] is None else [100 * one["tflops"][0] / best[1], 100 * one["tflops"][1] / best[0]]
        rows.append(
            [
                one["name"],
                _range(one["tokens_per_s"], "{:,.0f}"),
                _range(one["gib"], "{:.1f}"),
                _range(one["step_ms"], "{:.0f}"),
                _range(wait, "{:.2f} %"),
                _range(one["tflops"], "{:.0f}"),
                _range(share, "{:.0f} %"),
            ]
        )
    said = _say("train", title=found["title"].removeprefix("training; "), best=_range(best, "{:.0f}"))
    return ["## Training", _wrapped(said), _markdown(names, rows, right={*names[1:]})]


# Where the time goes. What was done is history; the figures are of the run.

SHARES: dict[str, Callable[[Results], float]] = {
    "prepare": lambda results: results["prepare"]["share_of_bare"],
    "load": lambda results: (
        results["load"]["shapes"][1]["batch_ms"]["copy"] / results["load"]["shapes"][1]["batch_ms"]["logged"]
    ),
    "template": lambda results: results["template"]["share_of_encoding"],
}
"""How near each part is to its floor."""


def _profiles(results: Results) -> list[str]:
    parts = ["## Where the time goes", _wrapped(_say("profiles"))]
    for part in results["profiles"]["parts"]:
        name, title = part["name"], part["title"]
        said = [_say(f"profiles_{name}", samples=part["samples"])]
        if name in results:
            said.append(_say(f"remains_{name}", share=SHARES[name](results)))
        rows = [[f"`{frame}`", f"{own:.0%}", f"{whole:.0%}"] for frame, own, whole in hottest(part["stacks"])]
        names = ["function", "in itself", "with what it calls"]
        parts += [
            f"### {title[0].upper()}{title[1:]}",
            f"![{title}](flame-{name}.svg)",
            _wrapped(*said),
            _markdown(names, rows, right={*names[1:]}),
        ]
    return parts
