"""Write docs/explanation/benchmarks.md from the results of a run and the prose in texts.toml."""

from __future__ import annotations

import re
import textwrap
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flame import hottest
from lines import LINES, SEARCHES, Line, Results, digits, lines, megabytes, seconds
from targets import left_lines, target_table
from train_lines import MODELS, TRAIN_LINES
from train_report import measured_on, pairs

TEXTS = tomllib.loads((Path(__file__).resolve().parent / "texts.toml").read_text("utf-8"))


def page(results: Results, before: str = "") -> str:
    """Return the benchmark page in Markdown. Sections without results are omitted. Targets without results keep their
    rows from the page `before`.
    """
    parts = [_head(results), _targets(results, before)]
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
    """Return a Markdown table of comparisons, without empty columns."""
    rows = [
        {
            "task": line.what,
            "chatmill": line.ours,
            "floor": line.floor,
            "speed relative to floor": "" if line.share is None else f"{line.share:.2f}",
            "peer": ", ".join(part for part in (line.peer, line.theirs) if part),
            "speedup over peer": _times(line.times),
            "peak memory": megabytes(*line.memory),
        }
        for line in shown
    ]
    names = [name for name in rows[0] if any(row[name] for row in rows)]
    right = {"chatmill", "speed relative to floor", "speedup over peer", "peak memory"}
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
    """Wrap a paragraph without breaking code or link texts across lines."""
    kept = re.sub(r"`[^`]*`|\[[^]]*\]\(", lambda found: found[0].replace(" ", "\0"), " ".join(said))
    return textwrap.fill(kept, 120, break_long_words=False, break_on_hyphens=False).replace("\0", " ")


def _head(results: Results) -> str:
    where = "The parts of this page were measured at different times."
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
    chart = "![Speedup of chatmill over each peer](benchmarks.svg)"
    return "\n\n".join(["# Benchmarks", _wrapped(_say("head", where=where)), _wrapped(*how), chart])


def _targets(results: Results, before: str = "") -> str:
    shown = target_table(results, before)
    met, missed = shown.count("| met |"), shown.count("| **missed** |")
    parts = ["## Targets", _wrapped(_say("targets", met=met, known=met + missed)), shown]
    if left := left_lines(shown):
        parts += [_say("left"), "\n".join(_wrapped(item).replace("\n", "\n  ") for item in left)]
    return "\n\n".join(parts)


# The text above each table says what is compared, and whether the results agree.


def _rendering(results: Results) -> list[str]:
    found = results["render"]
    return [_say("render", mtok=found["tokens"] / 1e6, **found, **found["differ"]), _agreement(found["differ"])]


def _agreement(differ: Any) -> str:
    """Say in how many of the compared conversations the token ids and the loss masks differ."""
    same_ids = differ["rows"] - differ["ids_differ"]
    masks = "all of them" if differ["masks_differ"] == same_ids else f"{differ['masks_differ']:,} of them"
    if differ["ids_differ"]:
        return _say("ids_differ", masks=masks, **differ)
    return _say("masks_differ" if differ["masks_differ"] else "agree", masks=masks, **differ)


def _template(results: Results) -> list[str]:
    differ = results["template"]["differ"]
    said = [_say("template", **differ), _agreement(differ)]
    for side, text in (("peer", "template_there"), ("chatmill", "template_here")):
        if tokens := differ["trained_by_one"][side]:
            names = {"Ċ": "\\n", "Ġ": " "}
            shown = ", ".join(f"`{names.get(token, token)}` ({count:,} times)" for token, count in tokens.items())
            said.append(_say(text, tokens=shown))
    if certify := results.get("certify"):
        names_of = ", ".join(f"`{name}`" for name in certify["refused"])
        said.append(_say("certify", **{**certify, "refused": f" (all except {names_of})" if names_of else ""}))
    return said


def _packing(results: Results) -> list[str]:
    found = results["pack"]
    plan, figures = found["plan"]["timings"], found["plan"]["figures"]
    assigns = "assigns" if figures["equal_to_naive"] else "does **not** assign"
    unlike = figures["rows_unlike_trl"]
    return [
        _say("pack", title=found["plan"]["title"], assigns=assigns),
        _say("pack_unlike" if unlike else "pack_same", bins=figures["bins"], trl_rows=plan[2]["rows"], unlike=unlike),
        _say("pack_batches", batch_rows=plan[4]["rows"], batch_fill=plan[4]["fill"], fill=plan[0]["fill"]),
        _say("pack_torchtune" if "order" in found else "pack_no_torchtune"),
        _say("pack_blocks"),
    ]


def _preparing(results: Results) -> list[str]:
    said = []
    if found := results.get("prepare"):
        bare = ", ".join(f"{name} {seconds(taken)}" for name, taken in found["bare"].items())
        start = seconds(found["start_up"])
        size = {"megabytes": found["bytes"] / 1e6, "mtok": found["tokens"] / 1e6}
        said.append(_say("prepare", bare=bare, at_once=seconds(found["bare_at_once"]), start_up=start, **size))
        said += _beside_trl(found, "prepare_trl")
        said += [_say("prepare_ways")] if "peers" in found else []
    if found := results.get("prepare_template"):
        said.append(_say("prepare_template", mtok=found["tokens"] / 1e6, **found))
        said += _beside_trl(found, "prepare_template_trl")
    return said


def _beside_trl(found: Any, text: str) -> list[str]:
    if not (peer := found.get("peers", {}).get("trl")):
        return []
    differ = peer["differ"]
    cut = differ["peer_alone"] and differ["peer_alone"] == differ["peer_alone_cut"]
    why = _say("prepare_cut") if cut else ""
    start = seconds(peer["start_up"])
    return [_say(text, start_up=start, why=why, alike=differ["alike"], differ=differ["peer_alone"])]


def _near_duplicates(results: Results) -> list[str]:
    found = results["near"]["beside"]
    return [_say("near", **found)]


def _loading(results: Results) -> list[str]:
    found = results["load"]
    compared = [shape["compared"] for shape in found["shapes"]]
    seen = " and ".join(f"{one['conversations']:,}" for one in compared)
    differ = " and ".join(f"{one['differ']:,}" for one in compared)
    agreement = "load_differ" if any(one["differ"] for one in compared) else "load_agree"
    return [
        _say(
            "load",
            conversations=found["conversations"],
            agreement=_say(agreement, seen=seen, differ=differ),
            numpy=" and ".join(digits(shape["times_numpy"]) for shape in found["shapes"]),
        )
    ]


def _opening(results: Results) -> list[str]:
    said = [_say("open")]
    if found := results.get("open"):
        speeds = " and ".join(f"{speed:.0f} Mtok/s with {bits} ids" for bits, speed in found["write_mtok"].items())
        said.append(_say("open_wrote", speeds=speeds))
    return said


def _bucket(results: Results) -> list[str]:
    found = results["remote"]
    return [_say("remote", **found)]


def _rollouts(results: Results) -> list[str]:
    return [_say("rollout", scans=digits(results["rollout"]["scans_per_second"]))]


def _viewing(results: Results) -> list[str]:
    found = results["view"]
    hits = [f"{seconds(taken)} for {SEARCHES[what]}" for what, taken in found["search_s"].items()]
    before, after = found["first_page_ms"]
    size = {"index_mb": found["index_bytes"] / 1e6, "scan": seconds(found["scan_s"])}
    return [_say("view", before=before, after=after, hits=f"{', '.join(hits[:-1])}, and {hits[-1]}", **size, **found)]


SECTIONS: list[tuple[tuple[str, ...], str, Callable[[Results], list[str]]]] = [
    (("render",), "Rendering", _rendering),
    (("template",), "Chat templates", _template),
    (("pack",), "Packing and blocks", _packing),
    (("prepare", "prepare_template"), "Preparing datasets", _preparing),
    (("near",), "Removing near-duplicates", _near_duplicates),
    (("load",), "Loading", _loading),
    (("open", "growth"), "Opening and verifying datasets", _opening),
    (("remote",), "Loading from a bucket", _bucket),
    (("rollout",), "Rollout targets", _rollouts),
    (("view",), "Viewer", _viewing),
]


def _growth(results: Results) -> list[str]:
    sizes = results["growth"]["sizes"]
    shown: list[tuple[str, Callable[[Any], str]]] = [
        ("tokens", lambda size: f"{size['tokens'] / 1e6:,.1f} million"),
        ("prepare: time", lambda size: seconds(size["prepare"]["seconds"])),
        ("prepare: million tokens per second", lambda size: digits(size["tokens"] / size["prepare"]["seconds"] / 1e6)),
        ("prepare: memory of all processes", lambda size: megabytes(size["prepare"]["memory"])),
        ("open and read one episode: time", lambda size: seconds(size["open"]["ms"] / 1e3)),
        ("open and read one episode: memory", lambda size: megabytes(size["open"]["memory"])),
        ("`chatmill verify`: time", lambda size: seconds(size["verify"]["quick_s"])),
        ("`chatmill verify --full`: time", lambda size: seconds(size["verify"]["full_s"])),
        ("`chatmill verify --full`: memory", lambda size: megabytes(size["verify"]["memory"])),
        ("load a batch of (16, 4096): time", lambda size: seconds(size["load"]["ms"] / 1e3)),
        ("load the first batch: time", lambda size: seconds(size["load"]["first_ms"] / 1e3)),
        ("load: memory", lambda size: megabytes(size["load"]["memory"])),
    ]
    names = [f"{size['conversations']:,}" for size in sizes]
    said = [_say("growth")]
    if peer := results.get("prepare", {}).get("peers", {}).get("trl"):
        memory = megabytes(peer["memory"])
        count = results["prepare"]["conversations"]
        said.append(_say("growth_trl", conversations=count, seconds=seconds(peer["seconds"]), memory=memory))
    rows = [[what, *(show(size) for size in sizes)] for what, show in shown]
    return [
        "## Time and memory by dataset size",
        _wrapped(*said),
        _markdown(["conversations", *names], rows, right={*names}),
    ]


def _training(found: dict[str, Any]) -> list[str]:
    """Return a table of all measured configurations, and a comparison of chatmill with peers at equal precision."""
    good = {name: one for name, one in found.items() if "error" not in one}
    best = sorted({f"{one['best_tflops']:.0f}" for one in good.values()}, key=float)
    said = [_say("train", title=measured_on(good), best=" to ".join(dict.fromkeys([best[0], best[-1]])))]
    failed = [f"{TRAIN_LINES[name].what} ({one['error']})" for name, one in found.items() if "error" in one]
    said += [_say("train_failed", what="; ".join(failed))] if failed else []
    names = ["model", "setup", "frozen weights", "trained weights", "gradients", "optimizer state", "matrix products"]
    right = [
        "real tokens/s",
        "peak memory (GiB)",
        "reserved memory (GiB)",
        "ms per step",
        "share of time waiting for data",
        "speed relative to the fastest matrix product",
    ]
    rows = []
    for model, name, one in ((TRAIN_LINES[name].model, name, one) for name, one in sorted(good.items(), key=_rank)):
        of = TRAIN_LINES[name].precision
        figures = [
            f"{one['tokens_per_s']:,.0f}",
            f"{one['gib']:.1f}",
            f"{one['reserved_gib']:.1f}" if one.get("reserved_gib") else "",
            f"{one['step_ms']:.0f}",
            "" if one["wait"] is None else f"{one['wait']:.2%}",
            "" if one["tflops"] is None else f"{one['tflops'] / one['best_tflops']:.0%}",
        ]
        flash = TRAIN_LINES[name].side == "chatmill" and "flash-attn-4" in one.get("versions", {})
        what = TRAIN_LINES[name].what + (", FlashAttention 4" if flash else "")
        rows.append([_model(model), what, of.base, of.weights, of.gradients, of.state, of.compute, *figures])
    parts = ["## Training", _wrapped(*said), _markdown([*names, *right], rows, right={*right})]
    compared = [
        [
            _model(line.model),
            line.what.removeprefix("chatmill, "),
            peer.what,
            str(line.precision),
            _times(good[line.name]["tokens_per_s"] / good[peer.name]["tokens_per_s"]),
            f"{good[line.name]['gib'] / good[peer.name]['gib']:.2f}",
        ]
        for line, peer in pairs(dict(sorted(good.items(), key=_rank)))
    ]
    if compared:
        names = ["model", "chatmill", "peer", "precision", "speed relative to peer", "memory relative to peer"]
        parts += [_wrapped(_say("train_equal")), _markdown(names, compared, right={*names[4:]})]
    return parts


def _rank(named: tuple[str, Any]) -> tuple[int, int]:
    return list(MODELS).index(TRAIN_LINES[named[0]].model), list(TRAIN_LINES).index(named[0])


def _model(name: str) -> str:
    return name.upper()


def with_training(text: str, gpu: dict[str, Any]) -> str:
    """Update the training section and the training targets of a page; leave all other sections unchanged."""
    sections = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    for number, section in enumerate(sections):
        end = "\n\n" if number < len(sections) - 1 else "\n"
        if section.startswith("## Training\n"):
            sections[number] = "\n\n".join(_training(gpu)) + end
        elif section.startswith("## Targets\n"):
            sections[number] = _targets({"gpu": gpu}, before=section) + end
    return "".join(sections)


# The profiling section: descriptions of earlier optimizations are fixed texts, and the figures come from the results.

SHARES: dict[str, Callable[[Results], float]] = {
    "prepare": lambda results: results["prepare"]["share_of_bare"],
    "prepare_template": lambda results: (
        results["prepare_template"]["with_chatml"] / results["prepare_template"]["seconds"]
    ),
    "load": lambda results: (
        results["load"]["shapes"][1]["batch_ms"]["copy"] / results["load"]["shapes"][1]["batch_ms"]["logged"]
    ),
    "template": lambda results: results["template"]["share_of_encoding"],
}
"""Speed of each profiled part relative to its floor."""


def _profiles(results: Results) -> list[str]:
    parts = ["## Where the time goes", _wrapped(_say("profiles"))]
    for part in results["profiles"]["parts"]:
        name, title = part["name"], part["title"]
        said = [_say(f"profiles_{name}", samples=part["samples"])]
        if name in results:
            said.append(_say(f"remains_{name}", share=SHARES[name](results)))
        rows = [[f"`{frame}`", f"{own:.0%}", f"{whole:.0%}"] for frame, own, whole in hottest(part["stacks"])]
        names = ["function", "samples in the function itself", "samples including callees"]
        parts += [
            f"### {title[0].upper()}{title[1:]}",
            f"![{title}](flame-{name}.svg)",
            _wrapped(*said),
            _markdown(names, rows, right={*names[1:]}),
        ]
    return parts
