from __future__ import annotations

import json
import os
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chatmill.cli.app import app_of
from chatmill.cli.main import main
from chatmill.prepare import Job, LocalEngine, prepare_dataset
from chatmill.prepare.job import InputSource
from fault_injection.processes import apart
from fault_injection.trial import Tally, Trial

ACTING = ["\x1b[2J", "\x1b]0;title\x07", "\n", "\r", "\t", "\x00", "\x7f", "\x9b31m", "\u202e", "\u2066", "\u2028",
          "\ufeff", "\udcff", "\u200d", "\u00ad", "\U000e0041", "\x08\x08", "\x0c"]  # fmt: skip
PLAIN = ["a", " ", "ä", "名", "🍀", "[bold]", "%s", "{x}", "\\x1b", "'", '"', "-", "…"]
SINKS = ("pipe", "closed pipe", "full", "closed")


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str


def name_from(rng: random.Random, *, path: bool = True) -> str:
    parts = [rng.choice(ACTING) for _ in range(rng.randrange(1, 4))] + rng.choices(PLAIN, k=3)
    rng.shuffle(parts)
    name = "x" + "".join(parts)
    # Arguments and file names cannot contain NUL; file names may be arbitrary bytes.
    return name.replace("\x00", "\x01") if path else name.replace("\udcff", "")


def run(argv: list[str], sink: str, folder: Path) -> dict[str, Any]:
    """Run a command in this process and return its exit code and output. stdout and stderr of the process cannot be
    used afterwards.
    """
    streams = {number: os.open(folder / str(number), os.O_CREAT | os.O_TRUNC | os.O_RDWR, 0o600) for number in (1, 2)}
    os.dup2(streams[2], 2)
    if sink == "pipe":
        os.dup2(streams[1], 1)
    elif sink == "closed pipe":
        reading, writing = os.pipe()
        os.close(reading)
        os.dup2(writing, 1)
    elif sink == "full":
        os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
    else:
        os.close(1)
    sys.stdout = None if sink == "closed" else os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
    sys.argv = ["chatmill", *argv]
    os.chdir(folder)
    code: Any = "no end"
    try:
        main()
    except SystemExit as ended:
        code = ended.code
    sys.stderr.flush()
    written = {number: (folder / str(number)).read_bytes().decode("utf-8", "replace") for number in (1, 2)}
    return {"code": code, "out": written[1], "err": written[2]}


def commands(rng: random.Random, folder: Path) -> tuple[list[str], bool]:
    name = name_from(rng)
    good, renamed = folder / "data", folder / f"set {name}"
    if not renamed.exists():
        renamed.symlink_to(good, target_is_directory=True)
    records = folder / f"{name}.jsonl"
    inside = name_from(rng, path=False)
    turns = [{"role": "user", "content": inside}, {"role": "assistant", "content": inside}]
    fine = rng.random() < 0.3
    record: dict[str, Any] = {"messages": turns, "id": inside}
    record = rng.choice([
        record,
        {**record, inside: 1},
        {**record, "messages": [{**turns[0], inside: inside}, turns[1]]},
    ] if fine else [
        {**record, "messages": [{**turns[0], "role": inside}]},
        {**record, "messages": inside},
        {**record, "tools": inside},
        {inside: inside},
    ])  # fmt: skip
    records.write_text(f"{json.dumps(record)}\n", "utf-8")
    return rng.choice([
        ([rng.choice(["check", "render"]), str(records)], fine),
        (["render", str(records), "--json"], fine),
        (["check", f"{name} is not here"], False),
        ([rng.choice(["verify", "show", "stats", "order"]), str(renamed)], True),
        (["show", str(renamed), "3", rng.choice(["--decode", "--json"])], True),
        (["diff", str(renamed), str(good)], True),
        ([rng.choice(["verify", "show", "stats", "order", "report", "view"]), f"{name} is not here"], False),
        (["show", str(good), "--split", name], False),
        (["explain", str(good), name], False),
        (["formats", name], False),
        (["render", str(folder / "chat.jsonl"), rng.choice(["--format", "--tokenizer", "--shape"]), name], False),
        (["audit", "verify", str(records), str(good)], False),
        ([name], False),
        (["verify", f"--{name}", str(good)], False),
        (["show", str(good), name], False),
    ])  # fmt: skip


def judge(argv: list[str], sink: str, succeeds: bool, ran: Ran) -> str:
    acting = {ch for ch in ran.out + ran.err if not ch.isprintable()} - {"\n", "\t", "\u200c", "\u200d", "\xa0"}
    lines = ran.err.splitlines()
    if acting:
        return f"prints {sorted(acting)!r}"
    if "Traceback" in ran.err:
        return f"a traceback: {lines[-1]}"
    if not succeeds:
        return "" if ran.code in (1, 2) or (sink == "closed pipe" and ran.code == 0) else f"exit code {ran.code!r}"
    if sink == "full":
        said = lines == ["chatmill: standard output: No space left on device"]
        return (
            ""
            if ran.code == 1 and said
            else f"exit code {ran.code!r} and {ran.err[:200]} although the output cannot be written"
        )
    return "" if ran.code == 0 else f"exit code {ran.code!r}: {ran.err[:200]!r}"


def make(folder: Path) -> bool:
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "".join(ACTING[:-1]).replace("\udcff", "")},
    ]
    (folder / "chat.jsonl").write_text(f"{json.dumps({'messages': turns})}\n" * 9)
    job = Job((InputSource((str(folder / "chat.jsonl"),), shape="messages"),))
    prepare_dataset(job, folder / "data", engine=LocalEngine(1))
    return True


def work(size: int, seed: int, folder: Path, tally: Tally) -> None:
    rng = random.Random(seed)
    # Import the commands here; otherwise, each child would import them.
    app_of()
    assert apart(lambda: make(folder)).value
    for number in range(size):
        argv, succeeds = commands(rng, folder)
        sink = SINKS[number % len(SINKS)]
        ended = apart(lambda argv=argv, sink=sink: run(argv, sink, folder))
        if ended.value is None:
            tally.loses(f"{argv!r} to a {sink}: {ended.broke or ended.refused}")
            continue
        fault = judge(argv, sink, succeeds, Ran(**ended.value))
        if fault:
            tally.is_wrong(f"{argv!r} to a {sink} output: {fault}")
        else:
            tally.judge(survived=succeeds, found=not succeeds)


TRIAL = Trial(
    "hostile names and failing outputs",
    "Runs commands with control characters in names and arguments, and with a standard output that is closed or "
    "full. No control character may be printed. A closed pipe must end a command quietly, and a full disk must give "
    "a one-line error",
    work,
    full=400,
    short=12,
    in_memory=True,
)
