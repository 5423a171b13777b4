"""Profile the parts of chatmill that are furthest from their floors (`make profile`).

    python benchmarks/profiles.py [--conversations N] [--json]

py-spy samples each part in a separate process. Only samples in the function that performs the part, and in
its callees, are counted. This excludes start-up.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from corpus import DATA, Data, add_options, chosen, options_of
from flame import hottest
from measure import machine, report, versions

HERE = Path(__file__).resolve().parent
RATE = 200


class Part(NamedTuple):
    name: str
    title: str
    roots: tuple[str, ...]
    """Names of the functions where the part starts; the first match in a stack is used."""


PARTS = [
    Part("prepare", "preparing a dataset: two workers and the main process", ("run_unit", "prepare")),
    Part(
        "prepare_template",
        "preparing a dataset with a chat template: two workers and the main process",
        ("run_unit", "prepare"),
    ),
    Part("load", "loading: packed batches of (16, 4096) with an audit log", ("get_batch", "_fill")),
    Part("template", "chat templates: reading records, deriving layouts, rendering", ("side",)),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--side", choices=("load",), help="run only this part, on the dataset given by --dataset")
    parser.add_argument("--dataset", type=Path)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.side:
        audited_batches(args.dataset)
        return
    data = chosen(args)
    parts = []
    with tempfile.TemporaryDirectory(dir=DATA) as temporary:
        for part in PARTS:
            stacks = sampled(part, work(part.name, data, Path(temporary)), Path(temporary) / f"{part.name}.txt")
            parts.append({**part._asdict(), "samples": sum(stacks.values()), "stacks": dict(stacks)})
    lines = []
    for part_found in parts:
        lines.append((part_found["title"], f"{part_found['samples']} samples"))
        lines += [
            (f"  {frame}", f"{own:.1%} without callees, {whole:.1%} with callees")
            for frame, own, whole in hottest(part_found["stacks"])
        ]
    figures: dict[str, Any] = {"conversations": data.conversations, "parts": parts, "versions": versions("py-spy")}
    report(f"profiles; {machine('chatmill', 'py-spy')}", lines, figures, as_json=args.json)


def work(name: str, data: Data, folder: Path) -> list[object]:
    if name == "prepare":
        return [HERE / "prepare.py", "--side", "chatmill", *options_of(data), "--folder", folder]
    if name == "prepare_template":
        return [
            HERE / "prepare.py",
            "--format",
            "template",
            "--side",
            "chatmill",
            *options_of(data),
            "--folder",
            folder,
        ]
    if name == "template":
        return [HERE / "render.py", "--format", "template", "--side", "chatmill", *options_of(data)]
    from load import make_dataset

    return [__file__, "--side", "load", "--dataset", make_dataset(data, folder / "unpacked")]


def audited_batches(dataset: Path) -> None:
    from load import SHAPES, config

    from chatmill.audit import Audit
    from chatmill.load.loader import EpisodeLoader

    loader = EpisodeLoader(dataset, config(SHAPES[1]), listener=Audit(dataset.parent / "logs"))
    for _ in range(1500):
        loader.get_batch()
    loader.close()


def sampled(part: Part, command: list[object], out: Path) -> Counter[str]:
    spy = Path(sys.executable).with_name("py-spy")
    options = ["--rate", RATE, "--format", "raw", "--function", "--subprocesses", "--output", out]
    words = [spy, "record", *options, "--", sys.executable, *command]
    done = subprocess.run([str(word) for word in words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    if not out.exists():
        raise SystemExit(f"py-spy: {done.stdout.decode(errors='replace').strip()}")
    return below_roots(out.read_text("utf-8"), part.roots)


def below_roots(raw: str, roots: tuple[str, ...]) -> Counter[str]:
    """Remove the stack frames of the callers of a root function from py-spy's output. Stacks without a root function
    belong to start-up and are dropped.
    """
    found: Counter[str] = Counter()
    for line in raw.splitlines():
        stack, _, samples = line.rpartition(" ")
        frames = [short(frame) for frame in stack.split(";")]
        loaded = next((number for number, frame in enumerate(frames) if frame.startswith("_find_and_load ")), None)
        if loaded is not None:
            frames[loaded:] = ["import"]
        for root in roots:
            at = next((number for number, frame in enumerate(frames) if called(frame) == root), None)
            if at is not None:
                found[";".join(frames[at:])] += int(samples)
                break
    return found


def called(frame: str) -> str:
    return frame.split(" (")[0].rsplit(".", 1)[-1]


def short(frame: str) -> str:
    """Shorten the path in a stack frame: `name (chatmill/rows.py)`, `name (numpy/_core/numeric.py)`."""
    return re.sub(r"\((?:[^()]*/)?(?:site-packages|src|lib/python3\.\d+|benchmarks)/", "(", frame)


if __name__ == "__main__":
    main()
