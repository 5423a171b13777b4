"""Check chatmill on a folder of chat templates, against an oracle that shares no code with chatmill.

    python scripts/try_templates.py FOLDER                 every *.jinja file, with about forty conversations
    python scripts/try_templates.py FOLDER --only qwen3    only templates with this name; print all conversations
    python scripts/try_templates.py FOLDER --table FILE    exit with 1 if the inexact results differ from FILE
    python scripts/try_templates.py FOLDER --write FILE    write the list of inexact results to FILE

The control tokens of each template are read from --tokens or FOLDER/tokens.json, or guessed from the template. The exit
code is 1 if any loss mask is wrong.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1] / "tests" / "format" / "template"
sys.path.insert(0, str(TESTS))

from published_trial import Outcome, counts, refusals, share_exact, try_template  # noqa: E402

CONTROL = re.compile(
    r"""<\|[^|<>\s'"{}]{1,40}\|>|<｜[^｜\n]+｜>|<\|"\|>|<\|[a-z_]+>|<[a-z_]+\|>|\[/?[A-Z][A-Z_]{2,30}\]|\[\|[a-z]+\|\]
    |\[gMASK\]|<sop>|<(?:start|end)_of_turn>|\]~!?[a-z][\]\[]|\[e~\[|<SPECIAL_\d+>|</?(?:assistant|user|system)>""",
    re.VERBOSE,
)
SOFT = re.compile(r"</?(?:[a-z]+:)?(?:think|tool_calls?|tool_response|arg_key|arg_value|tool_sep|tool_def_sep)>")
ENDS = re.split(
    r"\s+",
    """<|im_end|> <|eot_id|> <|eom_id|> <|eot|> <|eom|> <|end|> <|END_OF_TURN_TOKEN|> <end_of_turn> <turn|>
    <|tool_response> [|endofturn|] <|end_of_text|> <|endoftext|> <|end_of_turn|> <｜end▁of▁sentence｜> <|return|>
    <|call|> <|assistant_end|> [e~[ <|im_kimia_text_eos|> <|im_msg_end|> <|message_sep|> <|EOT|> </assistant>
    <|observation|>""",
)
"""Known tokens that end an answer."""
NOT_STOPS = ("<|end|>", "<|eom|>")
"""Tokens after which the model continues, in templates with <|return|> or <|message|>."""


def guess_tokens(source: str) -> dict[str, Any]:
    # Hunyuan's template inserts a suffix into its control tokens.
    written = {token.replace("{}", ":opensource") for token in CONTROL.findall(source)}
    soft = {*SOFT.findall(source), "<think>", "</think>"}
    bos, eos = "<s>", "</s>"
    if "<｜end▁of▁sentence｜>" in written:
        bos, eos = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
    elif "<|eot_id|>" in written:
        bos, eos = "<|begin_of_text|>", "<|eot_id|>"
    elif written & {"<start_of_turn>", "<turn|>"}:
        bos, eos = "<bos>", "<eos>"
    ends = [token for token in [*ENDS, "<｜hy_eos:opensource｜>"] if token in written]
    if "<|observation|>" in ends:
        ends += ["<|user|>", "<|endoftext|>"]
        written.add("<|endoftext|>")
    if "<|eom|>" in ends and "<|message|>" in written:
        ends.remove("<|eom|>")
    stops = [token for token in ends if not ("<|return|>" in ends and token in NOT_STOPS)] or [eos]
    soft |= {token for token in written if "tool" in token.lower() or "｜" in token} - {bos, eos, *ends}
    ends = ends if eos in ends else [*ends, eos]
    control = sorted((written - soft) | {bos, eos})
    return {"bos": bos, "eos": eos, "control": control, "soft": sorted(soft), "stops": stops, "ends": ends}


def try_file(path: Path, tokens: dict[str, Any]) -> dict[str, Outcome]:
    source = path.read_text("utf-8")
    with tempfile.TemporaryDirectory() as folder:
        return dict(try_template(source, tokens.get(path.stem) or guess_tokens(source), Path(folder)))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=Path, help="a JSON file with the tokens of each template")
    parser.add_argument(
        "--only", default="", help="use only templates whose name contains this text, and print every conversation"
    )
    parser.add_argument("--table", type=Path, help="exit with code 1 if the inexact results differ from this list")
    parser.add_argument("--write", type=Path, help="write the list of inexact results to this file")
    parser.add_argument("-j", "--jobs", type=int, default=1, help="processes (default: 1)")
    given = parser.parse_args(argv)
    paths = [path for path in sorted(given.folder.glob("*.jinja")) if given.only in path.stem]
    if not paths:
        print(f"{given.folder}: no chat templates; expected *.jinja files", file=sys.stderr)
        return 1
    file = given.tokens or given.folder / "tokens.json"
    tokens = json.loads(file.read_text("utf-8")) if given.tokens or file.is_file() else {}
    began = time.perf_counter()
    work = partial(try_file, tokens=tokens)
    if given.jobs > 1:
        with ProcessPoolExecutor(given.jobs) as pool:
            results = dict(zip((path.stem for path in paths), pool.map(work, paths), strict=True))
    else:
        results = {path.stem: work(path) for path in paths}
    for template, outcomes in results.items():
        for name, outcome in outcomes.items():
            if given.only or outcome.verdict in ("wrong", "ids", "refused"):
                print(f"{outcome.verdict:12} {template} {name}: {outcome.reason} {outcome.detail}"[:600])
    count = counts(results)
    print(f"{len(results)} templates, {count.total()} conversations, {time.perf_counter() - began:.0f} s")
    print(", ".join(f"{verdict} {number}" for verdict, number in sorted(count.items())))
    print(
        f"ids and masks are exact for {100 * share_exact(results):.1f}% of the conversations that transformers renders "
        "completely and with an end token after each answer"
    )
    lines = refusals(results)
    if given.write:
        given.write.write_text("".join(f"{line}\n" for line in lines), "utf-8")
    listed = lines if given.table is None else given.table.read_text("utf-8").splitlines()
    for line in sorted(set(lines) ^ set(listed)):
        print(f"{'now' if line in lines else given.table}: {line}")
    return int(lines != listed or bool(count["wrong"] or count["ids"]))


if __name__ == "__main__":
    sys.exit(main())
