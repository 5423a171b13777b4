"""Summarize benchmark results. Each comparison is one line with chatmill's result, the floor, the result of another
library, and the peak memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

Results = dict[str, Any]


@dataclass(frozen=True)
class Line:
    """One line of the summary. The floor is the time that the essential work alone takes on this machine."""

    what: str
    ours: str
    floor: str = ""
    share: float | None = None
    """Speed relative to the floor."""
    peer: str = ""
    """Name and version of the peer."""
    theirs: str = ""
    times: float | None = None
    """Speed relative to the peer; below 1, the peer is faster."""
    memory: tuple[float, ...] = ()
    """Peak memory in bytes: chatmill's, then the peer's if one was measured."""


def lines(results: Results) -> list[Line]:
    """Return the summary lines of all benchmarks that have results, in pipeline order."""
    return [line for name, made in LINES.items() if name in results for line in made(results[name])]


def seconds(value: float) -> str:
    """Format a time in s, ms or µs, with about three digits."""
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if value * scale >= 1 or unit == "µs":
            return f"{digits(value * scale)} {unit}"
    raise AssertionError


def digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def megabytes(*peaks: float) -> str:
    return " / ".join(f"{peak / 1e6:,.0f} MB" for peak in peaks)


def rate(tokens_per_s: float) -> str:
    return f"{digits(tokens_per_s / 1e6)} Mtok/s"


def _render(found: Any) -> list[Line]:
    chat_format = "ChatML" if found["template"] == "chatml" else f"`{found['template']}`"
    task = f"render {found['conversations']:,} conversations with {chat_format}"
    cores = max(found["list_s"], key=int)
    return [
        Line(
            f"{task} on {cores} cores",
            rate(found["tokens"] / found["list_s"][cores]),
            f"fastokens {found['versions']['fastokens']} on the same texts and cores, "
            + rate(found["tokens"] / found["encode_s"]),
            found["share_of_encoding"],
        ),
        Line(
            f"{task} on one core",
            rate(found["tokens"] / found["render_s"]),
            "",
            None,
            f"transformers {found['versions']['transformers']} `apply_chat_template`",
            rate(found["peer_tokens_per_s"]),
            found["times_transformers"],
            (found["memory"]["chatmill"], found["memory"]["peer"]),
        ),
    ]


def _prepare(found: Any) -> list[Line]:
    peers = found.get("peers", {})
    with_template = "" if found["template"] == "chatml" else f" with `{found['template']}`"
    first = Line(
        f"prepare and pack {found['conversations']:,} conversations{with_template}",
        seconds(found["seconds"]),
        f"only decoding, encoding and writing, {seconds(sum(found['bare'].values()))}",
        found["share_of_bare"],
        memory=(found["memory"]["chatmill"],),
    )
    if not peers:
        return [first]
    trl = f"TRL {found['versions']['trl']}"
    fastest = min((name for name in peers if name != "datatrove"), key=lambda name: float(peers[name]["seconds"]))
    batched = "" if fastest == "trl" else ", rows tokenized by a batched `datasets.map`"
    compared = [
        _compared(first, "", trl, peers["trl"]),
        _compared(
            first,
            " (TRL's fastest variant)",
            f"{trl}{batched}, {peers[fastest]['processes']} processes",
            peers[fastest],
        ),
    ]
    if "datatrove" in peers:
        named = f"datatrove {found['versions']['datatrove']} `DocumentTokenizer`"
        compared.append(_compared(first, " (the peer only tokenizes)", named, peers["datatrove"]))
    return compared


def _compared(line: Line, how: str, peer: str, found: Any) -> Line:
    """Return a copy of a summary line with the results of the given peer."""
    theirs, times = seconds(found["seconds"]), found["times"]
    return replace(
        line, what=line.what + how, peer=peer, theirs=theirs, times=times, memory=(*line.memory, found["memory"])
    )


def _cores(found: Any) -> list[Line]:
    few, most = min(found["runs"], key=int), max(found["runs"], key=int)
    times = found["times"][most]
    return [
        Line(
            f"prepare {found['conversations']:,} conversations on {most} cores",
            seconds(found["runs"][most]["seconds"]),
            f"{few} cores, {seconds(found['runs'][few]['seconds'])}; {digits(times)} times as fast",
            times * int(few) / int(most),
        )
    ]


def _startup(found: Any) -> list[Line]:
    return [
        Line(
            "`chatmill --help`",
            seconds(found["help_s"]),
            f"`python -c ''`, {seconds(found['python_s'])}",
            found["python_s"] / found["help_s"],
        ),
        Line(
            f"`chatmill prepare`, {found['records']} records, vocabulary of {found['vocabulary']:,} tokens",
            f"{seconds(found['prepare_s'])}; {seconds(found['cold_s'])} in the first run",
        ),
    ]


def _near(found: Any) -> list[Line]:
    beside = found["beside"]
    return [
        Line(
            f"prepare {beside['records']:,} short conversations and remove near-duplicates",
            seconds(beside["seconds"]),
            peer=f"datatrove {found['versions']['datatrove']} MinHash, four stages",
            theirs=seconds(beside["peer_seconds"]),
            times=beside["times"],
            memory=(beside["memory"], beside["peer_memory"]),
        ),
        *(
            Line(
                f"prepare {size['records']:,} short conversations and remove near-duplicates",
                seconds(size["seconds"]),
                memory=(size["memory"],),
            )
            for size in found["sizes"]
        ),
    ]


def _pack(found: Any) -> list[Line]:
    plan, copy, blocks, memory = found["plan"], found["copy"], found["blocks"], found["memory"]
    trl = f"TRL {found['versions']['trl']}"
    fastest = plan["timings"][0]["seconds"] * plan["figures"]["times_trl"]
    made = [
        Line(
            f"assign {found['rows']:,} conversations to rows of 4096 tokens",
            seconds(plan["timings"][0]["seconds"]),
            f"{plan['figures']['floor']}, {seconds(plan['figures']['floor_s'])}",
            plan["figures"]["floor_s"] / plan["timings"][0]["seconds"],
            f"{trl} `pack_dataset`, the fastest variant",
            seconds(fastest),
            plan["figures"]["times_trl"],
            (memory["plan"], memory["trl"]),
        ),
        Line(
            f"pack {copy['figures']['tokens'] / 1e6:,.0f} million tokens and copy them into rows",
            seconds(copy["timings"][0]["seconds"]),
            f"{copy['figures']['floor']}, {seconds(copy['figures']['floor_s'])}",
            copy["figures"]["floor_s"] / copy["timings"][0]["seconds"],
            f"{trl} `pack_dataset`",
            seconds(copy["timings"][1]["seconds"]),
            copy["figures"]["times_trl"],
            (memory["copy"], memory["trl copy"]),
        ),
    ]
    if order := found.get("order"):
        made.append(
            Line(
                f"pack {order['figures']['tokens'] / 1e6:,.1f} million tokens",
                seconds(order["timings"][0]["seconds"]),
                peer=f"torchtune {found['versions']['torchtune']} `PackedDataset`",
                theirs=f"{seconds(order['timings'][1]['seconds'])}, rows {order['timings'][1]['fill']:.1%} full",
                times=order["figures"]["times_torchtune"],
            )
        )
    for timing, (size, speed) in zip(blocks["timings"], blocks["figures"]["mtok"].items(), strict=True):
        made.append(
            Line(
                f"split conversations into stream blocks of {size} tokens, one core",
                f"{digits(speed)} Mtok/s",
                f"{blocks['figures']['floor']}, {rate(blocks['figures']['tokens'] / blocks['figures']['floor_s'])}",
                blocks["figures"]["floor_s"] / timing["seconds"],
                memory=(memory["blocks"],),
            )
        )
    return made


def _load(found: Any) -> list[Line]:
    made = []
    for shape in found["shapes"]:
        ms, copy = shape["batch_ms"], seconds(shape["batch_ms"]["copy"] / 1e3)
        size, kind = shape["name"].rsplit(" ", 1)
        task = f"load a {kind} batch of {size}"
        made += [
            Line(
                task,
                seconds(ms["ours"] / 1e3),
                f"a plain copy of the same {shape['batch_bytes'] / 1e6:.2f} MB, {copy}",
                shape["copy_share"],
                f"datasets {found['versions']['datasets']} with TRL {found['versions']['trl']}'s collator",
                seconds(ms["peer"] / 1e3),
                shape["times"],
                (shape["memory"]["chatmill"], shape["memory"]["peer"]),
            ),
            Line(
                f"{task}, with an audit log",
                seconds(ms["logged"] / 1e3),
                f"the same copy, {copy}",
                ms["copy"] / ms["logged"],
            ),
        ]
    if big := found.get("billion"):
        made.append(
            Line(
                "look up one position in a shuffled order of 10^9 episodes",
                seconds(big["order_ms"] / 1e3),
                f"a lookup in an in-memory table of 10^7 entries, {seconds(big['lookup_ms'] / 1e3)}",
                big["lookup_ms"] / big["order_ms"],
                memory=(big["memory"],),
            )
        )
    return made


def _open(found: Any) -> list[Line]:
    (middle, _), (whole, _) = found["read_us"]["tokens and mask"], found["read_us"]["rows with spans and origins"]
    mapped = f"reading the same number of bytes from a memory map, {seconds(found['floor_us'] / 1e6)}"
    return [
        Line(
            f"open a dataset of {found['episodes']:,} episodes and read one",
            seconds(found["open_ms"] / 1e3),
            f"parsing the metadata and memory-mapping five files, {seconds(found['floor_ms'] / 1e3)}",
            found["floor_ms"] / found["open_ms"],
            memory=(found["memory"],),
        ),
        Line("read the tokens and mask of a random episode", seconds(middle / 1e6), mapped, found["floor_us"] / middle),
        Line(
            "read the whole row of a random episode, with spans",
            seconds(whole / 1e6),
            mapped,
            found["floor_us"] / whole,
        ),
    ]


def _remote(found: Any) -> list[Line]:
    size, link = f"{found['bytes'] / 1e6:,.0f} MB", found["bytes"] / found["link"] / 1e6
    task = f"{size} from a bucket at {found['link']:g} MB/s"
    alone = f"the download alone, {seconds(link)}"
    local, warm = (found["positions"] / found[f"{name}_batches_s"] for name in ("local", "warm"))
    return [
        Line(
            f"load the first batch of a shuffled epoch: {task}, cold cache",
            seconds(found["cold_first_s"]),
            alone,
            found["cold_first"],
        ),
        Line(f"load the whole epoch: {task}, cold cache", seconds(found["cold_s"]), alone, found["cold_epoch"]),
        Line(
            f"load the batches of the epoch: {task}, warm cache",
            rate(warm),
            f"loading the local dataset, {rate(local)}",
            found["warm"],
        ),
    ]


def _growth(found: Any) -> list[Line]:
    size = found["sizes"][1]
    check = size["verify"]
    return [
        Line(
            f"verify every byte of a dataset of {size['bytes'] / 1e6:,.0f} MB",
            seconds(check["full_s"]),
            f"only hashing the files with SHA-256, {seconds(check['hash_s'])}",
            check["hash_s"] / check["full_s"],
            memory=(check["memory"],),
        )
    ]


def _rollout(found: Any) -> list[Line]:
    return [
        Line(
            f"build rollout targets for answers of {found['tokens']:.0f} tokens, {found['objects']} objects, one core",
            f"{digits(found['targets_per_second'])} per second",
            f"decoding the answers, parsing them as JSON and encoding the true objects, "
            f"{digits(found['floor_per_second'])} per second",
            found["targets_per_second"] / found["floor_per_second"],
            memory=(found["memory"],),
        )
    ]


SEARCHES = {
    "a text in one episode": "text that occurs in one episode",
    "a text in every episode": "text that occurs in every episode",
    "two frequent consecutive words": "two frequent consecutive words",
    "a text in no episode": "text that does not occur",
}
"""Names of the viewer's searches in the results, and how to print them."""


def _view(found: Any) -> list[Line]:
    first, hit = max(found["first_page_ms"]), found["search_s"]["a text in one episode"]
    return [
        Line(
            f"load the viewer's first page for {found['episodes']:,} episodes",
            seconds(first / 1e3),
            f"the same number of requests for a small file, {seconds(found['floor_ms'] / 1e3)}",
            found["floor_ms"] / first,
            memory=(found["memory"],),
        ),
        Line(
            "search in the viewer for text that occurs in one episode",
            seconds(hit),
            f"a request for a small file, {seconds(found['request_ms'] / 1e3)}",
            found["request_ms"] / 1e3 / hit,
        ),
    ]


LINES: dict[str, Callable[[Any], list[Line]]] = {
    "render": _render,
    "template": _render,
    "pack": _pack,
    "prepare": _prepare,
    "prepare_template": _prepare,
    "cores": _cores,
    "startup": _startup,
    "near": _near,
    "load": _load,
    "open": _open,
    "growth": _growth,
    "remote": _remote,
    "rollout": _rollout,
    "view": _view,
}
